"""Runs the rounds of `benchmarks.epd_pays`, one by one, and keeps each in a file of lines."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.epd_pays.live import Layout, Round, Times, run_live
from benchmarks.epd_pays.mixes import MIXES, Mix
from benchmarks.epd_pays.plan import KINDS, best_of_families, planner_of
from benchmarks.reporting import RESULTS, Row
from epd.planning.space import Settings

ROUNDS, PLANS = RESULTS / "epd_pays_rounds.jsonl", RESULTS / "epd_pays_plans.json"
# A rate at which each layout has much to do: there its variants are run.
VARIED_RATES: Mapping[str, float] = {
    "four 4K images": 2.25,
    "texts, each second a long video": 12.0,
    "long videos": 8.0,
}
# A round with a larger share of late passes is not reported, and is run again.
MOST_LATE = 0.05
# Workers as an earlier mix may have left them: too few encode.
UNFIT = "2e3p3d"
# Few enough workers that two cores can compute them at two factors.
THREE, THREE_WORKERS, THREE_DILATED = "three workers", {"split": "1e1p1d", "merged": "3epd"}, (1.0, 4.0)


@dataclass(frozen=True, slots=True)
class Case:
    """One round at one rate. variant: empty for the layout of a kind as it was planned."""

    mix: str
    kind: str
    variant: str
    rate: float
    round_index: int
    dilate: float


def planned(mix: Mix) -> Row:
    """Returns the best layout of each kind for both objectives, from an earlier run or planned now."""
    known: Row = json.loads(PLANS.read_text(encoding="utf-8")) if PLANS.exists() else {}
    if mix.name not in known:
        known[mix.name] = {
            name: {
                kind: {
                    "topology": str(best.candidate.topology),
                    "settings": asdict(best.candidate.settings),
                    "goodput": round(best.goodput, 3),
                }
                for kind, best in best_of_families(planner_of(mix, slo)).items()
            }
            for name, slo in (("slo", mix.slo), ("loose", mix.loose))
        }
        PLANS.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    found: Row = known[mix.name]
    return found


def layout_of(plan: Row, kind: str, variant: str) -> Layout:
    """Returns the layout of a case. plan: of its mix, for its objectives."""
    settings = Settings(**{**plan[kind]["settings"], "degrees": ()})
    layout = Layout(plan[kind]["topology"], settings)
    match variant:
        case "not sharded":
            return replace(layout, settings=replace(settings, sharding="request"))
        case "not overlapped":
            return replace(layout, is_overlapped=False)
        case "three workers":
            return replace(layout, topology=THREE_WORKERS[kind])
        case "unfit":
            return replace(layout, topology=UNFIT)
        case "unfit, roles follow":
            return replace(layout, topology=UNFIT, is_elastic=True)
    return layout


def cases(mix: Mix, round_index: int, dilate: float) -> Iterator[Case]:
    """Yields the cases of a round: every kind of layout at every rate, then variants of the split one."""
    for rate in mix.rates:
        for kind in KINDS:
            yield Case(mix.name, kind, "", rate, round_index, dilate)
    for variant in ("not sharded", "not overlapped", "unfit", "unfit, roles follow"):
        yield Case(mix.name, "split", variant, VARIED_RATES[mix.name], round_index, dilate)


def three_workers(mix: Mix, round_index: int) -> Iterator[Case]:
    """Yields the cases that show what slowing down changes."""
    rate = VARIED_RATES[mix.name] / 4
    for kind in THREE_WORKERS:
        for dilate in THREE_DILATED:
            yield Case(mix.name, kind, THREE, rate, round_index, dilate)


def kept_rounds(path: Path = ROUNDS) -> dict[Case, Round]:
    """Returns what was measured, each case as it was measured last."""
    found = dict[Case, Round]()
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            times = tuple(Times(*each) for each in row["times"])
            found[Case(**row["case"])] = Round(times, row["late_share"], row["num_switches"])
    return found


def measure(todo: Sequence[Case], path: Path = ROUNDS) -> None:
    """Runs what is not there yet, or had too many late passes; each round is kept when it ends."""
    for case in todo:
        known = kept_rounds(path).get(case)
        if known is not None and known.late_share <= MOST_LATE:
            continue
        mix = MIXES[case.mix]
        layout = layout_of(planned(mix)["slo"], case.kind, case.variant)
        with tempfile.TemporaryDirectory() as folder:
            found = run_live(
                mix, layout, mix.arrivals(case.rate, case.round_index), Path(folder), case.dilate
            )
        row = {
            "case": asdict(case),
            "topology": layout.topology,
            "late_share": round(found.late_share, 4),
            "num_switches": found.num_switches,
            "times": [[each.has_media, each.ttft_s, each.tpot_s, each.gap_s] for each in found.times],
        }
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(case, layout.topology, row["late_share"], flush=True)
