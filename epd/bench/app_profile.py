"""Measures the cost of the application on this machine beside the model: `epd profile --app`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import count, product
from pathlib import Path
from statistics import fmean

from epd.bench.live_app import LiveApp, TrafficResult, live_app
from epd.bench.media import MediaLibrary, WriteVideo
from epd.errors import UnavailableError
from epd.machine import usable_cpus
from epd.profiles import HostCosts, Profile, app_costs
from epd.profiles.app_costs import KINDS, LAYOUTS, Figures
from epd.profiles.host import PromptRule
from epd.simulate.calibrating import Asked, calibrated
from epd.workload.config import load_workload
from epd.workload.requests import Workload

_SEED, _NUM_REQUESTS = 7_000, 30
_NUM_ROUNDS = 2  # of all kinds of requests, one behind the other: the machine differs from minute to minute
_LOAD = 0.4  # share of the cores that requests at random times keep busy
_NUM_KV_TOKENS = 32_768
_WARM_UP: tuple[Mapping[str, object], ...] = (
    {"images": 2, "output_tokens": 5},
    {"videos": 1, "video_s": 2, "video_size": "320x192", "output_tokens": 5},
)


def with_app(
    profile: Profile,
    model: Path,
    write_video: WriteVideo,
    show: Callable[[int, int], None],
    device: str = "auto",
) -> Profile:
    """Returns the profile with the costs of the application on this machine. Starts it in two layouts.

    Both run at once and get requests in turns, so that a machine that is slow for a while slows both. All
    costs are at the speed that the cores had meanwhile, which is lower than while one stage is measured.
    """
    num_steps, steps = len(LAYOUTS) + 2 + _NUM_ROUNDS * len(KINDS) * len(LAYOUTS), count(1)
    with tempfile.TemporaryDirectory(prefix="epd-profile-app-") as name, ExitStack() as stack:
        folder, loads = Path(name), {}
        for layout in LAYOUTS:
            options = ["--topology", layout, "--num-kv-tokens", str(_NUM_KV_TOKENS)]
            options += ["--num-threads", str(profile.num_threads or 1)]
            options += ["--device", device, "--dtype", profile.dtype]
            app = stack.enter_context(live_app([str(model), *options], folder / f"{layout}.log"))
            loads[layout] = _AppLoad(app, layout, MediaLibrary(folder / "media", write_video))
            show(next(steps), num_steps)
        host, prompt = _alone(profile, loads[LAYOUTS[0]])
        show(next(steps), num_steps)
        asked = []
        for number, (part, each) in enumerate(product(_NUM_ROUNDS * KINDS, loads.values())):
            asked.append(each.at_random(part, _SEED + number // len(loads)))
            show(next(steps), num_steps)
    # The layout that gets no requests takes its idle share.
    both = replace(host, idle_cores=sum(each.idle_cores for each in loads.values()))
    found = calibrated(replace(profile, host=both, prompt=prompt), asked)
    show(next(steps), num_steps)
    assert found.host is not None
    layouts = " and ".join(LAYOUTS)
    assumption = f"the application's share: questions at random times, {_NUM_ROUNDS} rounds, of {layouts}"
    found = replace(
        found,
        host=replace(found.host, idle_cores=host.idle_cores),
        assumptions=(*profile.assumptions, assumption),
    )
    return found.at_speed(fmean(each.core_speed for each in asked))


def _alone(profile: Profile, loads: _AppLoad) -> tuple[HostCosts, PromptRule]:
    """Computes costs from requests that are sent one after another."""
    alone = loads.in_turn(app_costs.ALONE, 10)
    at_once = loads.in_turn(app_costs.ALONE, 16, app_costs.NUM_AT_ONCE)
    long = loads.in_turn(app_costs.LONG, 6)
    more_s = app_costs.sequence_s(alone, at_once) - profile.decode.cost.per_unit_s
    host = HostCosts(usable_cpus(), loads.idle_cores, sequence_s=max(0.0, more_s))
    return host, app_costs.prompt_rule(alone, long)


class _AppLoad:
    """Sends requests to a running application. idle_cores: in use without any request."""

    def __init__(self, app: LiveApp, layout: str, library: MediaLibrary) -> None:
        self._app = app
        self._layout = layout
        self._library = library
        self._seeds = count(_SEED - 1000)
        self.idle_cores = 0.0
        for part in _WARM_UP:
            self.in_turn(part, 4)
        self.idle_cores = app.idle_cores()

    def in_turn(self, part: Mapping[str, object], num_requests: int, concurrency: int = 1) -> Figures:
        """Sends requests one after another, or keeps `concurrency` in flight."""
        workload = _workload(part, num_requests, arrival="closed")
        return self._load(workload, next(self._seeds), concurrency).figures(self.idle_cores)

    def at_random(self, part: Mapping[str, object], seed: int) -> Asked:
        """Sends requests at random times, at a rate that keeps about a share _LOAD of the cores busy."""
        free_cores = usable_cpus() - self.idle_cores
        rate = _LOAD * free_cores / max(self.in_turn(part, 6).cpu_s, 1e-3)
        workload = _workload(part, _NUM_REQUESTS, rate=rate)
        result = self._load(workload, seed)
        return Asked(self._layout, workload, seed, result.figures(self.idle_cores), result.core_speed)

    def _load(self, workload: Workload, seed: int, concurrency: int | None = None) -> TrafficResult:
        result = self._app.send(workload, self._library, seed=seed, concurrency=concurrency)
        failed = [record.error for record in result.records if record.error is not None]
        if failed or not result.served:
            raise UnavailableError(f"the application did not answer: {failed[:1] or 'its log is empty'}")
        return result


def _workload(part: Mapping[str, object], num_requests: int, **when: object) -> Workload:
    return load_workload(None, {"num_requests": num_requests, "mix": [part], **when}).resolve()
