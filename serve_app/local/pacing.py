"""Lets the passes of workers last as long as if each had a device of its own.

The real application runs, with a small model. What a pass of it lasts follows from the work that the live
scheduler put into it, by the costs of a profile. A factor slows everything down alike, so that a few cores
have the time to compute it all.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from epd.control.elasticity.controller import ControllerConfig
from epd.profiles.profile import Profile
from epd.simulate.clock import seconds_of
from epd.simulate.language import PassTicks
from epd.topology import Stage

Encode = Callable[..., Any]  # as `FrameEncoder.encode`


def slowed(config: ControllerConfig, dilate: float) -> ControllerConfig:
    """Returns the controller of roles with its times on this machine's clock."""
    names = (
        "interval_s", "horizon_s", "load_s", "max_drain_s", "cache_s", "cooldown_s", "turn_cooldown_s",
        "turn_s", "memory_s", "backoff_s",
    )  # fmt: skip
    return replace(config, **{name: dilate * getattr(config, name) for name in names})


def wait_out(start: float, seconds: float) -> bool:
    """Waits until so many seconds after the start. Returns whether it was later than that already."""
    left = seconds - (time.perf_counter() - start)
    time.sleep(max(0.0, left))
    return left < 0


def paced_tower(
    encode: Encode,
    seconds: Callable[[Sequence[Any]], float],
    wait: Callable[[float, float], object] = wait_out,
) -> Encode:
    """Returns a call of the tower that lasts longer; nobody gets its embeddings before it ends.

    seconds: by the runs of patches of a call
    wait: gets the start of a call and how long it lasts
    """

    def paced(runs: Sequence[Any], *share: float | None) -> Any:
        start = time.perf_counter()
        embeddings = encode(runs, *share)
        wait(start, seconds(runs))
        return embeddings

    return paced


class Pace:
    """Lets the passes of all workers last as long as on the devices of a profile, times a factor.

    profile: by the patches and tokens of the model that runs
    num_late: of num_passes, those whose own work took longer than that
    """

    def __init__(self, profile: Profile, dilate: float) -> None:
        self.num_passes = self.num_late = 0
        self._encode, self._pass = profile.encode.cost, PassTicks(profile)
        self._switch_s = profile.switch_s
        self._dilate = dilate
        self._lock = threading.Lock()

    @property
    def late_share(self) -> float:
        return self.num_late / max(1, self.num_passes)

    @property
    def controller(self) -> ControllerConfig:
        """Returns the controller of roles, by this machine's clock."""
        return slowed(ControllerConfig(), self._dilate)

    def reset(self) -> None:
        """Counts from here on."""
        with self._lock:
            self.num_passes = self.num_late = 0

    def slow(self, stage: Stage, role: Any) -> None:
        """Slows a worker's stage down, as `WorkerPace` says."""
        if stage == "encode":
            role.stage._encoder.encode = self.encoder(role.stage._encoder.encode)
        else:
            role.stage.engine.step = self.engine(role.stage.engine)

    def started(self, start_s: float) -> None:
        """Waits until new roles, which were asked for at a time, would be there."""
        self._wait(start_s, self._switch_s)

    def encoder(self, encode: Encode) -> Encode:
        """Returns the call of a tower."""

        def seconds(runs: Sequence[Any]) -> float:
            return self._encode.seconds(sum(run.grid.num_patches for run in runs), len(runs))

        return paced_tower(encode, seconds, self._wait)

    def engine(self, engine: Any) -> Callable[[], Any]:
        """Returns the step of a language engine, whose scheduler says what is in each pass."""
        step, schedule, costs = engine.step, engine.scheduler.schedule, list[float]()

        def noted() -> Any:
            output = schedule()
            if output.chunks:
                costs.append(seconds_of(self._pass.mixed(output)))
            return output

        def paced() -> Any:
            start_s = time.perf_counter()
            costs.clear()
            result = step()
            if costs:
                self._wait(start_s, sum(costs))
            return result

        engine.scheduler.schedule = noted
        return paced

    def _wait(self, start: float, seconds: float) -> None:
        is_late = wait_out(start, seconds * self._dilate)
        with self._lock:
            self.num_passes += 1
            self.num_late += is_late
