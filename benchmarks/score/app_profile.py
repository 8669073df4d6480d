"""Measures the cost of the application on this machine beside the model, and adds it to a profile.

    python -m benchmarks.score.app_profile [MODEL] [--repeats N] --out FILE

Several workers on the shared cores of one machine are a test bench, where this cost decides. The simulator
counts it where a profile has it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count, product
from pathlib import Path
from statistics import fmean

from benchmarks.score import app_costs
from benchmarks.score.app_costs import LAYOUTS, Figures, kinds_of
from benchmarks.score.calibrating import Asked, calibrated
from benchmarks.score.live_app import LiveApp, TrafficResult, live_app
from benchmarks.score.shared_cores import HostCosts, HostedProfile, write_profile
from benchmarks.score.speed import at_speed
from epd.bench.media import MediaLibrary, WriteVideo
from epd.errors import UnavailableError
from epd.machine import usable_cpus
from epd.models import model_folder
from epd.profiles.files import load_profile
from epd.profiles.media import MediaRule
from epd.profiles.profile import Profile, PromptRule
from epd.video.demo_video import write_scene
from epd.workload.config import load_workload
from epd.workload.requests import Workload

_SEED, _NUM_REQUESTS = 7_000, 30
_NUM_ROUNDS = 2  # of all kinds of requests, one behind the other: the machine differs from minute to minute
_LOAD = 0.4  # share of the cores that requests at random times keep busy
_NUM_KV_TOKENS = 32_768
_SEEN: tuple[Mapping[str, object], ...] = (
    {"images": 2, "output_tokens": 5},
    {"videos": 1, "video_s": 2, "video_size": "320x192", "output_tokens": 5},
)
_HEARD: tuple[Mapping[str, object], ...] = ({"audios": 2, "audio_s": 2, "output_tokens": 5},)


@dataclass(frozen=True, slots=True)
class KindAsked:
    """Holds the answers to one kind of questions. kind: its place in `kinds_of`; core_speed: meanwhile."""

    topology: str
    kind: int
    rate: float
    seed: int
    figures: Figures
    core_speed: float

    def asked(self, part: Mapping[str, object]) -> Asked:
        workload = _workload(part, _NUM_REQUESTS, rate=self.rate)
        return Asked(self.topology, workload, self.seed, self.figures, self.core_speed)


@dataclass(frozen=True, slots=True)
class AppRound:
    """Holds what the application answered in all layouts."""

    host: HostCosts
    prompt: PromptRule
    kinds: tuple[KindAsked, ...]


def with_app(
    profile: Profile,
    model: Path,
    write_video: WriteVideo,
    show: Callable[[int, int], None],
    device: str = "auto",
) -> HostedProfile:
    """Returns the profile with the costs of the application on this machine."""
    return fitted(profile, [app_round(profile, model, write_video, show, device, range(_NUM_ROUNDS))])


def app_round(
    profile: Profile,
    model: Path,
    write_video: WriteVideo,
    show: Callable[[int, int], None] = lambda _done, _all: None,
    device: str = "auto",
    numbers: Sequence[int] = (0,),
) -> AppRound:
    """Starts the application in each layout, and asks all kinds of questions, for each number anew.

    One after the other, as users run it: one that is idle takes .15 of a core, in moments that delay others.
    """
    num_kinds = len(kinds_of(profile.media))
    num_steps, steps = len(LAYOUTS) * (2 + len(numbers) * num_kinds), count(1)
    kinds, alone, idle = [], [], []
    for layout in LAYOUTS:
        with _running(profile, model, write_video, layout, device) as load:
            show(next(steps), num_steps)
            alone.append(_alone(profile, load))
            idle.append(load.idle_cores)
            show(next(steps), num_steps)
            for number, kind in product(numbers, range(num_kinds)):
                kinds.append(load.at_random(kind, _SEED + num_kinds * number + kind))
                show(next(steps), num_steps)
    host, prompt = alone[0]
    return AppRound(replace(host, idle_cores=fmean(idle)), prompt, tuple(kinds))


@contextmanager
def _running(
    profile: Profile, model: Path, write_video: WriteVideo, layout: str, device: str
) -> Iterator[_AppLoad]:
    """Runs the application in one layout."""
    options = ["--topology", layout, "--num-kv-tokens", str(_NUM_KV_TOKENS)]
    options += ["--num-threads", str(profile.num_threads or 1)]
    options += ["--device", device, "--dtype", profile.dtype]
    with tempfile.TemporaryDirectory(prefix="epd-profile-app-") as name:
        folder = Path(name)
        with live_app([str(model), *options], folder / f"{layout}.log") as app:
            yield _AppLoad(app, layout, MediaLibrary(folder / "media", write_video), profile.media)


def fitted(profile: Profile, rounds: Sequence[AppRound]) -> HostedProfile:
    """Returns the profile with the costs with which the simulator answers as the application did.

    All costs are at the mean speed of the cores in these rounds, lower than while one stage is measured.
    """
    idle_cores = fmean(each.host.idle_cores for each in rounds)
    sequence_s = fmean(each.host.sequence_s for each in rounds)
    host = replace(rounds[0].host, idle_cores=idle_cores, sequence_s=sequence_s)
    parts = kinds_of(profile.media)
    asked = [kind.asked(parts[kind.kind]) for each in rounds for kind in each.kinds]
    found = calibrated(HostedProfile.of(profile, host, prompt=rounds[0].prompt), asked)
    num_rounds = len(asked) // (len(parts) * len(LAYOUTS))
    layouts = " and ".join(LAYOUTS)
    assumption = f"the application's share: questions at random times, {num_rounds} rounds, of {layouts}"
    found = replace(found, assumptions=(*profile.assumptions, assumption))
    return at_speed(found, fmean(each.core_speed for each in asked))


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

    def __init__(self, app: LiveApp, layout: str, library: MediaLibrary, rule: MediaRule) -> None:
        self._app = app
        self._layout = layout
        self._library = library
        self._kinds = kinds_of(rule)
        self._seeds = count(_SEED - 1000)
        self.idle_cores = 0.0
        for part in _HEARD if rule.kind == "clips" else _SEEN:
            self.in_turn(part, 4)
        self.idle_cores = app.idle_cores()

    def in_turn(self, part: Mapping[str, object], num_requests: int, concurrency: int = 1) -> Figures:
        """Sends requests one after another, or keeps `concurrency` in flight."""
        workload = _workload(part, num_requests, arrival="closed")
        return self._load(workload, next(self._seeds), concurrency).figures(self.idle_cores)

    def at_random(self, kind: int, seed: int) -> KindAsked:
        """Sends requests at random times, at a rate that keeps about a share _LOAD of the cores busy."""
        part = self._kinds[kind]
        free_cores = usable_cpus() - self.idle_cores
        rate = _LOAD * free_cores / max(self.in_turn(part, 6).cpu_s, 1e-3)
        workload = _workload(part, _NUM_REQUESTS, rate=rate)
        result = self._load(workload, seed)
        figures = result.figures(self.idle_cores)
        return KindAsked(self._layout, kind, rate, seed, figures, result.core_speed)

    def _load(self, workload: Workload, seed: int, concurrency: int | None = None) -> TrafficResult:
        result = self._app.send(workload, self._library, seed=seed, concurrency=concurrency)
        failed = [record.error for record in result.records if record.error is not None]
        if failed or not result.served:
            raise UnavailableError(f"the application did not answer: {failed[:1] or 'its log is empty'}")
        return result


def _workload(part: Mapping[str, object], num_requests: int, **when: object) -> Workload:
    return load_workload(None, {"num_requests": num_requests, "mix": [part], **when}).resolve()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?", help="folder or name, by default shapes-vl")
    parser.add_argument("--repeats", default="5", help="runs of each point")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    model = model_folder(options.model)
    command = [sys.executable, "-m", "epd", "profile", str(model), "--repeats", options.repeats]
    subprocess.run([*command, "--out", str(options.out)], check=True)
    found = with_app(load_profile(str(options.out)), model, write_scene, _show)
    write_profile(found, options.out)


def _show(done: int, num_steps: int) -> None:
    print(f"the application: {done} of {num_steps}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
