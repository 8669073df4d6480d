"""Runs many seeds, and says of each that fails how to repeat it with the faults that it needs.

python -m tests.faults --seeds 1000 --results benchmarks/results/faults.md   goes on after those counted there
python -m tests.faults --start 17 --seeds 1 --trace --only 0,3
python -m tests.faults --aim machines
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch

from tests.faults.plan import AIMS, SIZES, FaultPlan, drawn, size_of
from tests.faults.pool import Pool, build_pool, read_once, use_own_folder
from tests.faults.simulation import Result, simulate

MAX_BLAMED = 0.005  # of the requests that were not poisoned
BROKEN = "## Broken lines of the recovery"
_PROGRESS_S = 30.0
_MAX_SEEDS = 400  # of a process: with thousands, collecting garbage takes 16 % of its time, 2 % at first
_MAX_SHOWN = 1500  # characters of a finding
_LOSSES = ("kill", "strike", "machine", "freeze", "poisoned workers")
_OTHERS = ("cut", "switch", "drain", "clock", "board", "front", "copy")


@dataclass
class Totals:
    """Sums up seeds. failed, blaming: those with findings, and with blame. next_seed: after the last one."""

    num_seeds: int = 0
    virtual_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    failed: list[int] = field(default_factory=list)
    blaming: list[int] = field(default_factory=list)
    next_seed: int = 0

    @classmethod
    def read(cls, path: Path) -> Totals:
        """Reads what earlier runs have counted; nothing if there is no file."""
        if not path.exists():
            return cls()
        kept = json.loads(path.read_text())
        return cls(**kept | {"counts": Counter(kept["counts"])})

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(vars(self), indent=1) + "\n")

    def add(self, result: Result) -> None:
        self.num_seeds += 1
        self.next_seed = result.plan.seed + 1
        self.virtual_s += result.virtual_s
        self.counts += result.counts
        self.counts[f"{result.plan.size} worlds"] += 1
        if result.findings:
            self.failed.append(result.plan.seed)
        if result.counts["blamed"]:
            self.blaming.append(result.plan.seed)

    @property
    def lacking(self) -> Sequence[str]:
        """Returns what many seeds must show, and these do not."""
        num_requests = max(1, self.counts["answered"])
        return [
            *(() if self.counts["redirects"] else ("nothing is redirected",)),
            *(
                ()
                if self.counts["blamed"] <= max(1, MAX_BLAMED * num_requests)
                else ("innocents are blamed",)
            ),
        ]

    @property
    def rows(self) -> Sequence[tuple[str, str]]:
        counts = self.counts
        errors = {name: num for name, num in sorted(counts.items()) if name.endswith("Error")}
        return (
            ("seeds", f"{self.num_seeds:,}"),
            *((f"of them {size} worlds", f"{counts[f'{size} worlds']:,}") for size in ("middle", "small")),
            ("run twice, equal to the last bit", f"{counts['equal runs']:,}"),
            ("simulated hours", f"{self.virtual_s / 3600:.1f}"),
            ("processes struck, frozen or lost with a machine", f"{sum(counts[name] for name in _LOSSES):,}"),
            *((f"of other faults, {name}", f"{counts[name]:,}") for name in _OTHERS),
            ("answers with the undisturbed tokens", f"{counts['answered'] - counts['wrong']:,}"),
            ("answers with other tokens", f"{counts['wrong']:,}"),
            ("prompts sent to another decode worker", f"{counts['redirects']:,}"),
            ("attempts retried", f"{counts['retries']:,}"),
            ("workers that encoded for lost encoders", f"{counts['encode fallbacks']:,}"),
            ("clients that left", f"{counts['left']:,}"),
            ("cut off by a lost front", f"{counts['cut off by a lost front']:,}"),
            *((f"stated errors, {name}", f"{num:,}") for name, num in errors.items()),
            ("requests blamed that were not poisoned", f"{counts['blamed']:,}"),
            ("the same, where strikes follow requests", f"{counts['blamed after strikes']:,}"),
            ("requests that did not end", f"{counts['hung']:,}"),
            ("seeds that left anything behind, or failed otherwise", f"{len(self.failed):,}"),
        )

    def table(self) -> str:
        lines = [f"| {name} | {value} |" for name, value in self.rows]
        return "\n".join(["| simulated faults | |", "|---|---:|", *lines])


def needed(plan: FaultPlan, fails: Callable[[FaultPlan], bool]) -> FaultPlan:
    """Leaves out every fault without which a plan still fails, one at a time."""
    number = 0
    while number < len(plan.faults):
        smaller = plan.without(number)
        if fails(smaller):
            plan = smaller
        else:
            number += 1
    return plan


def _explain(result: Result, pool: Pool) -> None:
    """Prints what was wrong, and how to repeat it with few faults."""
    print(f"seed {result.plan.seed} failed:")
    for finding in result.findings:
        print("   ", finding[:_MAX_SHOWN].replace("\n", "\n    "))
    plan = needed(result.plan, lambda smaller: bool(simulate(smaller, pool).findings))
    kept = [number for number, fault in enumerate(result.plan.faults) if fault in plan.faults]
    print("   ", "\n    ".join(plan.lines()))
    only = ",".join(map(str, kept))
    print(
        f"    repeat it: python -m tests.faults --start {plan.seed} --seeds 1 --trace --only {only}"
        f" --aim {plan.aim!r} --size {plan.size}",
        flush=True,
    )


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds")
    parser.add_argument("--start", type=int, help="the first seed; by default the first that is not counted")
    parser.add_argument("--aim", choices=AIMS, default="", help="of all seeds; by default each has its own")
    parser.add_argument("--size", choices=SIZES, default="", help="of all worlds; by default drawn for each")
    parser.add_argument("--twice", action="store_true", help="run each seed again, which must be equal")
    parser.add_argument("--only", help="numbers of the faults that are kept, with commas, of one seed")
    parser.add_argument("--processes", type=int, default=1, help="that share the seeds")
    parser.add_argument("--trace", action="store_true", help="print all that happens")
    parser.add_argument("--results", type=Path, help="page of all runs, which are counted beside it")
    return parser.parse_args()


def _plan(seed: int, pool: Pool, arguments: argparse.Namespace) -> FaultPlan:
    size, only = arguments.size or size_of(seed), arguments.only
    plan = drawn(seed, len(pool.questions), arguments.aim, size)
    kept = None if only is None else {int(each) for each in only.split(",") if each}
    for number in reversed(range(len(plan.faults))):
        if kept is not None and number not in kept:
            plan = plan.without(number)
    return plan


def _run(arguments: argparse.Namespace, pool: Pool, seed: int) -> Result:
    plan = _plan(seed, pool, arguments)
    result = simulate(plan, pool, is_printed=arguments.trace)
    if arguments.twice:
        again = simulate(plan, pool, run=1)
        if (again.digest, again.findings) == (result.digest, result.findings):
            result.counts["equal runs"] += 1
        else:
            result.findings.append(f"another run differs: {result.digest}, {again.digest}, {again.findings}")
    return result


def results(arguments: argparse.Namespace, pool: Pool, seeds: Sequence[int]) -> Iterator[Result]:
    """Yields what comes of seeds, in their order."""
    run = partial(_run, arguments, pool)
    if arguments.processes == 1:
        yield from map(run, seeds)
        return
    with get_context("fork").Pool(arguments.processes, use_own_folder, (), _MAX_SEEDS) as processes:
        yield from processes.imap(run, seeds)


def main() -> int:
    arguments = _parsed()
    counted = None if arguments.results is None else arguments.results.with_suffix(".json")
    totals = Totals() if counted is None else Totals.read(counted)
    start, num_failed = totals.next_seed if arguments.start is None else arguments.start, len(totals.failed)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="epd-faults-") as folder, read_once():
        pool, said_s = build_pool(Path(folder)), time.monotonic()
        for result in results(arguments, pool, range(start, start + arguments.seeds)):
            totals.add(result)
            if result.findings:
                _explain(result, pool)
            if time.monotonic() - said_s > _PROGRESS_S:
                said_s = time.monotonic()
                print(f"{totals.num_seeds} seeds, {len(totals.failed)} failed", flush=True)
                _keep(totals, counted)
    print(totals.table())
    _keep(totals, counted)
    return 1 if len(totals.failed) > num_failed else 0


def _keep(totals: Totals, counted: Path | None) -> None:
    """Writes the counts, and the page beside them."""
    if counted is not None:
        totals.write(counted)
        page = counted.with_suffix(".md")
        page.write_text(_page(totals, page))


def _page(totals: Totals, page: Path) -> str:
    """Returns a page with a new table; what follows from its first heading on stays."""
    _, heading, rest = _text(page).partition("\n## ")
    words = (
        "These are all runs of `make faults`, each with the code of its day. The next has new seeds. It runs "
        "each seed twice: a digest of all that happened, and when, must be equal, and so must the findings."
    )
    return f"# Simulated faults\n\n{totals.table()}\n\n{words}\n{heading}{rest}"


def _text(page: Path) -> str:
    return page.read_text() if page.exists() else ""


def write_broken(page: Path, text: str) -> None:
    """Replaces the part of a page about broken lines."""
    head, _, _ = _text(page).partition(BROKEN)
    page.write_text(f"{head.rstrip()}\n\n{BROKEN}\n\n{text}\n")


if __name__ == "__main__":
    raise SystemExit(main())
