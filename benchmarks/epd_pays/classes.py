"""Whether slower encoders pay beside one GPU, and what a class costs that becomes slow, in virtual time.

    python -m benchmarks.epd_pays.classes [--rounds N]

The real application runs as in `benchmarks.epd_pays.replicas`, with classes of workers: one paced A100, and
two encoders beside it that take SLOWER times as long. All on the one device stands beside.
In the second table two encoders are of a class each, and one becomes SLOWED times slower halfway through a
round. Work is shared by measured speed, as where there are classes, or by counts, as where there are none.
Writes benchmarks/results/classes.{json,md}.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

from benchmarks.epd_pays.replicas import PROFILE, TRAFFIC, question
from benchmarks.epd_pays.virtual import run_case
from benchmarks.epd_pays.virtual_workers import virtual_workers
from benchmarks.reporting import Row, Section, run_sections, setting
from epd.bench.compare import Case, Comparison, Serve, Served
from epd.bench.media import MediaLibrary
from epd.profiles.profile import Profile
from epd.serve_app.app_args import AppArgs
from epd.serve_app.cli.compare import costs_of
from epd.serve_app.local import own_service
from epd.serve_app.local.fleet import LocalFleet
from epd.serve_app.local.own_service import OwnService, started
from epd.serve_app.local.paced_layouts import OwnClient, PacedLayout, paced_args
from epd.serve_app.local.pacing import Encode, Pace
from epd.video.demo_video import write_scene
from epd.workload.comparison import Layout, Round, Traffic
from tests.faults.pool import read_once

SLOWER, SLOWED = (3.0, 20.0), 5.0
# By traffic of `replicas`, requests a second.
RATES = {
    "one image": (4, 5.7, 8, 11),
    "four images": (1.4, 2, 2.8, 4),
    "long video": (1.4, 2, 2.8, 4, 5.7),
    "texts beside long videos": (2, 2.8, 4, 5.7),
}
_TWO, _EACH = ("small=roles:e,count:2",), ("quick=roles:e,count:1", "other=roles:e,count:1")


@dataclass(frozen=True, slots=True)
class Setup:
    """Describes a server: its layout, its classes, and how much slower their workers are than the GPU.

    slowed: how many times slower the class `other` becomes halfway. by_speed: whether measured speeds weigh.
    """

    layout: str
    classes: tuple[str, ...] = ()
    slower: float = 1.0
    slowed: float = 1.0
    by_speed: bool = True


SETUPS = (Setup("1epd"), *(Setup(layout, _TWO, by) for by in SLOWER for layout in ("2e1pd", "2e1epd")))
SLOWED_SETUPS = (
    Setup("2e1pd", _EACH, SLOWER[0]),
    Setup("2e1pd", _EACH, SLOWER[0], SLOWED),
    Setup("2e1pd", _EACH, SLOWER[0], SLOWED, by_speed=False),
)


class _ClassPace(Pace):
    """Paces the encoders of a class. half_s: of a round, after which a tower takes `slowed` times as long."""

    def __init__(self, profile: Profile, slower: float, slowed: float, half_s: float) -> None:
        super().__init__(profile, slower)
        self._slowed, self._slow_from_s = slowed, time.perf_counter() + half_s
        self._half_s = half_s

    def reset(self) -> None:
        super().reset()
        self._slow_from_s = time.perf_counter() + self._half_s

    def encoder(self, encode: Encode) -> Encode:
        paced, last = super().encoder(encode), super().encoder(lambda *_: None)

        def call(runs: Sequence[Any], *share: float | None) -> Any:
            is_slow = self._slowed > 1 and time.perf_counter() >= self._slow_from_s
            for _ in range(round(self._slowed) - 1 if is_slow else 0):
                last(runs)
            return paced(runs, *share)

        return call


@dataclass(frozen=True, slots=True)
class _PacedClasses(PacedLayout):
    others: Sequence[Pace] = ()

    def begin(self) -> None:
        for each in (self.pace, *self.others):
            each.reset()


def serve_classes(setup: Setup, found: Comparison) -> Serve:
    """Returns what serves a setup in the loop that runs, which is virtual."""
    profile = costs_of(found.question)

    @asynccontextmanager
    async def serve(layout: Layout, traffic: Traffic) -> AsyncIterator[Served]:
        half_s = (traffic.workload.duration_s or 0.0) / 2
        plain = dict(paced_args(layout, found.question, traffic.dilate))
        args = AppArgs(**plain | {"worker_classes": list(setup.classes)}).resolved()
        paces = {
            name: _ClassPace(profile, setup.slower, setup.slowed if name == "other" else 1.0, half_s)
            for name in args.worker_classes
        }
        pace = Pace(profile, traffic.dilate)
        with mock.patch.object(own_service, "create_fleet", _fleet_of(args.classes, paces)):
            service, answers = await started(args, is_greedy=True, pace=pace)
        if not setup.by_speed:
            service.router.speeds = None
        try:
            own = OwnService(answers, asyncio.get_running_loop())
            client = own.model, OwnClient(own, found.question.timeout_s)
            yield _PacedClasses([client], pace, list(paces.values()))
        finally:
            await service.close()
            answers.close()

    return serve


def _fleet_of(classes: Mapping[str, str], paces: Mapping[str, Pace]) -> Any:
    """Returns what makes a fleet whose workers are paced as their classes are."""
    create = own_service.create_fleet

    def create_paced(*arguments: Any, **options: Any) -> LocalFleet:
        fleet = create(*arguments, **options)
        own: Any = fleet._config.own
        for name, settings in list(own.items()):
            if (pace := paces.get(classes.get(name, ""))) is not None:
                own[name] = replace(settings, pace=pace)
        return fleet

    return create_paced


def rounds_of(setup: Setup, traffic: Traffic, rate: float, rounds: int, media: Path) -> Iterator[Round]:
    found = Comparison(question((traffic,), rounds))
    library = MediaLibrary(media, write_scene)
    for index in range(rounds):
        case = Case(traffic, Layout.parse(setup.layout), rate, index)
        library.draw([*found.requests(case), *found.warm_requests(case)], lambda *_: None)
        yield run_case(found, case, serve_classes(setup, found), library)


def rows_of(setups: Sequence[Setup], rounds: int) -> list[Row]:
    """Returns a row for each traffic and rate, each from a process of its own: worlds leave memory behind."""
    rows = list[Row]()
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for name, rates in RATES.items():
            for rate in rates:
                rows.append(pool.apply(row_of, (setups, rounds, name, rate)))
                print(rows[-1], flush=True)
    return rows


def row_of(setups: Sequence[Setup], rounds: int, name: str, rate: float) -> Row:
    """Returns what each setup attains, the mean of the rounds, and its median TTFT."""
    traffic = {each.name: each for each in TRAFFIC}[name].model_copy(update={"rates": RATES[name]})
    row: Row = {"traffic": name, "rate": f"{rate:g}"}
    with TemporaryDirectory() as folder, read_once(), virtual_workers():
        for setup in setups:
            found = list(rounds_of(setup, traffic, rate, rounds, Path(folder)))
            attained = mean(one.attained(traffic.slo) for one in found)
            ttft = median(each.ttft_s or 0.0 for one in found for each in one.outcomes)
            row[_words(setup)] = f"{attained:.2f} ({ttft:.2f} s)"
    return row


def _words(setup: Setup) -> str:
    if setup.classes != _EACH:
        return f"{setup.layout}, {setup.slower:g} times" if setup.classes else setup.layout
    if setup.slowed == 1:
        return "both as fast"
    return f"one slowed, {'by speed' if setup.by_speed else 'by counts'}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="seeds a cell (default: %(default)s)")
    options = parser.parse_args()
    sections = {
        "layouts": Section(
            "Encoders beside one A100: share of the requests in time (median TTFT)",
            lambda: rows_of(SETUPS, options.rounds),
        ),
        "slowed": Section("One of two encoders becomes slow", lambda: rows_of(SLOWED_SETUPS, options.rounds)),
    }
    here = {"profile": PROFILE, "rounds": str(options.rounds), "clock": "virtual"}
    run_sections(
        "classes",
        "Classes of workers",
        sections,
        list(sections),
        lambda: setting(("torch", "transformers"), **here),
        module="epd_pays.classes",
    )


if __name__ == "__main__":
    main()
