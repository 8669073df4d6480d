"""`epd batch` over 10,000 hours of video on eight nodes in virtual time, while some are lost and others join.

    python -m benchmarks.serving.batch_nodes [--hours 10000] [--nodes 8]

The driver and its HTTP backend are the real ones: order, rendezvous hashing, retries, results. Nodes are
virtual: each reads, encodes and answers one medium at a time in each stage, at the costs of a profile. Prints
and writes benchmarks/results/batch_nodes.{json,md}: the time, beside the bound of the slowest stage.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from epd.batch.driver import BatchPlan, run_batch
from epd.batch.lines import LineDefaults
from tests import ROOT
from tests.batch.virtual_servers import Costs, VirtualServers

RESULTS = ROOT / "benchmarks" / "results"
# Of a second of video at one frame a second: 242 core seconds an hour of H.264 on 16 cores, 43 H100 hours of
# encoding and prefill for 10,000 hours (docs/how-to/answer-many-videos.md). Of a question: a short answer.
READ_SHARE, ENCODE_SHARE, LANGUAGE_S = 242 / 3600 / 16, 43 / 10_000, 0.2
PART_S, NUM_QUESTIONS = (300, 900), 1
RUNS = ((0, 0), (16, 0), (16, 2))  # losses, and nodes that join
STAGES = ("read", "encode", "language")


@dataclass(frozen=True)
class Run:
    """What a run gave, times in virtual seconds. bound_s: when the slowest stage of the nodes would end."""

    num_nodes: int
    hours: float
    num_media: int
    num_lost: int  # times that a node was lost, and came back
    num_late: int  # nodes that joined while it ran
    end_s: float
    bound_s: float
    again: float  # work that was done again, as a share

    @property
    def share(self) -> float:
        return self.bound_s / self.end_s


def parts(hours: float, rng: random.Random) -> list[int]:
    """Seconds of the parts of videos."""
    found, left = list[int](), hours * 3600
    while left > 0:
        found.append(min(rng.randint(*PART_S), max(1, round(left))))
        left -= found[-1]
    return found


def schedule(
    num_nodes: int, num_lost: int, num_late: int, until_s: float, rng: random.Random
) -> list[tuple[float, int, bool]]:
    """Nodes that are lost and come back, evenly over a time, and late ones, whose numbers are the highest."""
    found = list[tuple[float, int, bool]]()
    for late in range(num_nodes, num_nodes + num_late):
        found += [(0.0, late, True), (rng.uniform(0.1, 0.5) * until_s, late, False)]
    for place in range(num_lost):
        at_s, node = until_s * (place + rng.random()) / num_lost, place % num_nodes
        found += [(at_s, node, True), (at_s + rng.uniform(0.3, 0.9) * until_s / num_lost, node, False)]
    return found


def costs() -> Costs:
    def seconds(name: str) -> float:
        return float(name.removesuffix(".mp4").partition("-")[2])

    return Costs(
        lambda name: READ_SHARE * seconds(name), lambda name: ENCODE_SHARE * seconds(name), LANGUAGE_S
    )


def bound_s(work_s: float, num_nodes: int, losses: Sequence[tuple[float, int, bool]]) -> float:
    """When work that nodes share evenly is done, if those that are there do nothing else."""
    now_s, there = 0.0, num_nodes
    for at_s, _, is_lost in sorted(losses):
        if work_s <= (at_s - now_s) * there:
            break
        work_s -= (at_s - now_s) * there
        now_s, there = at_s, there + (-1 if is_lost else 1)
    return now_s + work_s / there


def run(hours: float, num_nodes: int, num_lost: int, num_late: int = 0, seed: int = 1, **options: Any) -> Run:
    rng = random.Random(seed)
    lengths = parts(hours, rng)
    totals_s = {
        "read": READ_SHARE * sum(lengths),
        "encode": ENCODE_SHARE * sum(lengths),
        "language": LANGUAGE_S * NUM_QUESTIONS * len(lengths),
    }
    losses = schedule(num_nodes, num_lost, num_late, max(totals_s.values()) / num_nodes, rng)
    servers = VirtualServers(costs(), num_nodes + num_late, losses)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (folder / "in.jsonl").open("w") as file:
            for number, seconds in enumerate(lengths):
                for question in range(NUM_QUESTIONS):
                    row = {"id": f"{number} {question}", "video": f"https://h/{number}-{seconds}.mp4"}
                    file.write(json.dumps({**row, "question": f"q{question}"}) + "\n")
        plan = BatchPlan(folder / "in.jsonl", folder / "out.jsonl", LineDefaults(folder))
        summary = run_batch(plan, lambda _: servers.backend(**options))
        assert summary.tally.num_answered == NUM_QUESTIONS * len(lengths), summary.failure_lines("")
    done_s = sum(servers.work_s(stage) for stage in STAGES)
    return Run(
        num_nodes,
        hours,
        len(lengths),
        num_lost,
        num_late,
        max(servers.ended_s.values()),
        max(bound_s(total_s, num_nodes + num_late, losses) for total_s in totals_s.values()),
        done_s / sum(totals_s.values()) - 1,
    )


def page(found: Sequence[Run]) -> str:
    rows = [
        f"| {each.num_nodes} | {each.hours:,.0f} | {each.num_lost} | {each.num_late} | "
        f"{each.end_s / 3600:.2f} | {each.bound_s / 3600:.2f} | {each.share:.1%} | {each.again:.2%} |"
        for each in found
    ]
    return "\n".join(
        [
            "# A batch on several nodes in virtual time",
            "",
            "`python -m benchmarks.serving.batch_nodes` repeats it.",
            "The driver and its HTTP backend are the real ones. Nodes and time are virtual.",
            "Nodes are lost and come back over the whole run. A lost node ends what it works on.",
            "Nodes that join were named at the start, and answer from a moment in its first half on.",
            "The bound is when the slowest stage would end if each node that is there did nothing else.",
            "Each node reads with 16 cores, and has one GPU at the costs of",
            "[answer-many-videos](../../docs/how-to/answer-many-videos.md#estimate-the-size).",
            "",
            "| nodes | hours of video | losses | nodes that join | hours | bound of the slowest stage "
            "| share of it | again |",
            "|---:|---:|---:|---:|---:|---:|---:|---:|",
            *rows,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=10_000)
    parser.add_argument("--nodes", type=int, default=8)
    given = parser.parse_args()
    found = []
    for num_lost, num_late in RUNS:
        start_s = time.monotonic()
        found.append(run(given.hours, given.nodes, num_lost, num_late))
        print(found[-1], f"{found[-1].share:.3f}", f"{time.monotonic() - start_s:.1f} s", flush=True)
    (RESULTS / "batch_nodes.json").write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n")
    (RESULTS / "batch_nodes.md").write_text(page(found))


if __name__ == "__main__":
    main()
