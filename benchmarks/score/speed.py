"""Measures the speed of the cores while an application runs, and gives a profile that speed."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any, Self

from benchmarks.score.shared_cores import WAYS, HostCosts, HostedProfile, Overhead
from epd.profiles.measuring import piece_s

_PAUSE_S = 0.02
_LEAST_FREE = 0.05  # cores left free of idle use, however slow all of them are


class SpeedSampler:
    """Measures pieces of work per CPU second on a thread of its own: 1 or 2 % of a core."""

    def __init__(self) -> None:
        self._taken: list[float] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="core-speed", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._taken or not self._is_over.wait(_PAUSE_S):
            self._taken.append(piece_s())

    @property
    def core_speed(self) -> float:
        """Returns the speed, once entered and left."""
        return len(self._taken) / sum(self._taken)


def at_speed(profile: HostedProfile, core_speed: float) -> HostedProfile:
    """Returns the profile at that core speed. Raises ValueError where cores do not compute everything."""
    if profile.core_speed is None:
        raise ValueError(f"profile {profile.name!r} does not know at which speed its cores were measured")
    factor = profile.core_speed / core_speed
    return replace(
        profile,
        core_speed=core_speed,
        encode=profile.encode.times(factor),
        prefill=profile.prefill.times(factor),
        decode=profile.decode.times(factor),
        transfer=profile.transfer.times(factor),
        video={codec: table.times(factor) for codec, table in profile.video.items()},
        images=None if profile.images is None else profile.images.times(factor),
        audio=None if profile.audio is None else profile.audio.times(factor),
        host=_slower(profile.host, factor),
    )


def _slower(host: HostCosts, factor: float) -> HostCosts:
    """Returns costs with work multiplied by a factor; pure delays stay as they were."""
    seconds = ("token_s", "encode_s", "prefill_s", "decode_s", "sequence_s")
    ways: dict[str, Overhead] = {name: getattr(host, name) for name in WAYS}
    changes: dict[str, Any] = {
        name: Overhead(factor * way.work_s, way.delay_s, factor * way.beside_s) for name, way in ways.items()
    }
    changes |= {name: factor * getattr(host, name) for name in seconds}
    return replace(host, idle_cores=min(factor * host.idle_cores, host.num_cores - _LEAST_FREE), **changes)
