"""Measures what the score compares: profiles of two models, and live runs.

Profiles are measured in turns with the live runs, since cores change within minutes:

    sight    stages | round | two layouts live | round | two layouts live | round
    sound    stages | round | two layouts live

A round asks the application other requests (`kinds_of`, in `LAYOUTS`, with other seeds). A profile knows the
stages and the rounds of its model, and no figure of a live run: of these are used the requests, and the speed
of the cores meanwhile, by a small loop that the client times. Rates of live runs follow from the first round.
Both encode beside the other stages of a worker, the default of `epd serve`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from benchmarks.planning.planner import EPD, NUM_KV_TOKENS, SEED, TOPOLOGIES, WORKLOADS, rate_of, workload_at
from benchmarks.reporting import Row
from benchmarks.score.app_costs import Figures
from benchmarks.score.app_profile import AppRound, app_round, fitted
from benchmarks.score.hearing_checkpoint import write_hearing_checkpoint
from benchmarks.score.live_app import live_app
from benchmarks.score.shared_cores import HostedProfile
from epd.bench.media import MediaLibrary
from epd.models import embedded_model_path
from epd.profiles.files import load_profile
from epd.profiles.profile import Profile
from epd.video.demo_video import write_scene

NUM_REQUESTS, LOAD = 90, 0.5
_SEED_STEP = 100  # between models
_CLIP: Row = {"audios": 1, "audio_s": "2..8", "text_tokens": "16..32", "output_tokens": "8..16"}


@dataclass(frozen=True, slots=True)
class Case:
    """Names a pair."""

    topology: str
    workload: str
    retention: float


@dataclass(frozen=True, slots=True)
class Sense:
    """Describes the pairs of one model.

    reduced: workloads that are asked with half of the visual tokens too
    num_rounds: of the profile: before each second layout, and one more at last if there are more
    num_repeats: of each point of its stages
    """

    name: str
    first_seed: int
    topologies: tuple[str, ...]
    workloads: Mapping[str, Row]
    reduced: tuple[str, ...]
    num_rounds: int
    num_repeats: int

    def cases(self) -> Iterator[Case]:
        pairs = [*((name, 1.0) for name in self.workloads), *((name, 0.5) for name in self.reduced)]
        return (Case(topology, *pair) for topology in self.topologies for pair in pairs)

    def seed(self, case: Case) -> int:
        """Returns the seed of a pair's requests: no two of a layout have the same media."""
        place = list(self.workloads).index(case.workload)
        return self.first_seed + len(self.workloads) * round(10 * (1 - case.retention)) + place


SIGHT = Sense("sight", SEED, TOPOLOGIES, WORKLOADS, ("video of 4 to 8 s",), 3, 9)
SOUND = Sense(
    "sound",
    SEED + _SEED_STEP,
    ("1epd", "1e1p1d"),
    {"clip of 2 to 8 s": _CLIP, "2 to 4 clips": {**_CLIP, "audios": "2..4", "output_tokens": 8}},
    (),
    1,
    5,
)
SENSES = {each.name: each for each in (SIGHT, SOUND)}
CASES = tuple(case for sense in SENSES.values() for case in sense.cases())


def sense_of(case: Case) -> Sense:
    return next(each for each in SENSES.values() if case.workload in each.workloads)


@dataclass(frozen=True, slots=True)
class LiveRun:
    """Holds what the application did with the requests of a pair. core_speed: meanwhile."""

    case: Case
    rate: float
    figures: Figures
    core_speed: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Holds what is measured so far: rounds of each profile, by its sense, and live runs."""

    rounds: Mapping[str, tuple[AppRound, ...]] = field(default_factory=dict)
    runs: tuple[LiveRun, ...] = ()


class Run:
    """Keeps what is measured in a folder, after each step."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._measured = folder / "measured.json"
        self._type = TypeAdapter(Measured)

    def clear(self) -> None:
        for sense in SENSES.values():
            self._stages(sense).unlink(missing_ok=True)
        self._measured.unlink(missing_ok=True)

    def _stages(self, sense: Sense) -> Path:
        return self._folder / f"{sense.name}.json"

    def model(self, sense: Sense) -> Path:
        """Returns the folder of the checkpoint; the one that hears is written where it is not there yet."""
        if sense is SIGHT:
            return embedded_model_path()
        path = self._folder / "checkpoint"
        return path if path.exists() else write_hearing_checkpoint(path)

    def stages(self, sense: Sense) -> Profile:
        """Returns the profile without the application."""
        path = self._stages(sense)
        if not path.exists():
            command = [str(EPD), "profile", str(self.model(sense)), "--out", str(path)]
            command += ["--repeats", str(sense.num_repeats)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return load_profile(str(path))

    def measured(self) -> Measured:
        if not self._measured.exists():
            return Measured()
        return self._type.validate_json(self._measured.read_bytes())

    def rounds(self, sense: Sense) -> tuple[AppRound, ...]:
        return self.measured().rounds.get(sense.name, ())

    def add_round(self, sense: Sense, one: AppRound) -> None:
        now = self.measured()
        self._write(Measured({**now.rounds, sense.name: (*self.rounds(sense), one)}, now.runs))

    def add_runs(self, runs: Sequence[LiveRun]) -> None:
        now = self.measured()
        self._write(Measured(now.rounds, (*now.runs, *runs)))

    def _write(self, measured: Measured) -> None:
        self._measured.write_bytes(self._type.dump_json(measured, indent=1))


def measure(run: Run, cases: Sequence[Case]) -> None:
    """Measures what is not there yet."""
    for sense in SENSES.values():
        wanted = [case for case in cases if sense_of(case) is sense]
        if wanted:
            _measure(run, sense, wanted)


def _measure(run: Run, sense: Sense, cases: Sequence[Case]) -> None:
    """Measures before each second layout, and at last, a round of the profile."""
    stages = run.stages(sense)
    first = None
    for number, topology in enumerate(sense.topologies):
        done = {each.case for each in run.measured().runs}
        left = [case for case in cases if case.topology == topology and case not in done]
        if left and number % 2 == 0:
            _add_round(run, sense, stages, number // 2)
        if left:
            first = first or fitted(stages, run.rounds(sense)[:1])
            measure_layout(run, sense, first, topology, left)
    if {each.case for each in run.measured().runs} >= set(sense.cases()):
        _add_round(run, sense, stages, len(sense.topologies) // 2)


def _add_round(run: Run, sense: Sense, stages: Profile, number: int) -> None:
    if len(run.rounds(sense)) <= number < sense.num_rounds:
        print(f"{sense.name}: round {number + 1} of the profile", file=sys.stderr, flush=True)
        run.add_round(sense, app_round(stages, run.model(sense), write_scene, numbers=[number]))


def measure_layout(
    run: Run, sense: Sense, profile: HostedProfile, topology: str, cases: Sequence[Case]
) -> None:
    """Sends the requests of pairs of one layout. profile: for their rates."""
    with tempfile.TemporaryDirectory(prefix="epd-score-") as folder:
        library = MediaLibrary(Path(folder) / "media", write_scene)
        options = [str(run.model(sense)), "--topology", topology]
        options += ["--num-threads", str(profile.num_threads or 1), "--num-kv-tokens", str(NUM_KV_TOKENS)]
        with live_app(options, Path(folder) / "serve.log") as app:
            for part in sense.workloads.values():
                app.send(workload_at(part, 4, 2.0), library, seed=sense.first_seed - 1)
            for case in cases:
                part = sense.workloads[case.workload]
                rate = rate_of(profile, topology, part, LOAD)
                extra = {} if case.retention == 1 else {"epd": {"retention": case.retention}}
                result = app.send(
                    workload_at(part, NUM_REQUESTS, rate), library, seed=sense.seed(case), extra=extra
                )
                run.add_runs([LiveRun(case, rate, result.figures(0.0), result.core_speed)])
