"""A video that is much longer than all others holds up nobody, and does not end the run alone.

The driver and the HTTP backend are the real ones; servers and time are virtual.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from epd.batch.driver import BatchPlan, run_batch
from epd.batch.in_flight import StageSeconds, bounded_makespan_s, busy_order
from epd.batch.lines import LineDefaults
from tests.batch.virtual_servers import Costs, VirtualServers

NUM_SHORT, NUM_QUESTIONS = 60, 2
SHORT_S, LONG_S = 0.2, 20.0  # of reading
ENCODE_S, LANGUAGE_S = 0.8, 0.1
# Of a medium, in the stage that all wait for: videos of any length have as many frames.
ENGINE_S = ENCODE_S + NUM_QUESTIONS * LANGUAGE_S
LONG = "long.mp4"
COSTS = Costs(lambda name: LONG_S if name == LONG else SHORT_S, lambda _: ENCODE_S, LANGUAGE_S, num_readers=4)


def ended(folder: Path, *, long_at: int | None, has_lengths: bool = False) -> dict[str, float]:
    """When each video was answered. long_at: how many short ones the table has before the long one."""
    names = [f"{number}.mp4" for number in range(NUM_SHORT)]
    if long_at is not None:
        names.insert(long_at, LONG)
    folder.mkdir()
    if has_lengths:
        for number, name in enumerate(names):
            with (folder / name).open("wb") as file:
                file.truncate(10_000 * (100 if name == LONG else 1) + number)
    rows = [
        {"id": f"{name} {number}", "video": name, "question": f"q{number}"}
        for name in names
        for number in range(NUM_QUESTIONS)
    ]
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    servers = VirtualServers(COSTS)
    plan = BatchPlan(folder / "in.jsonl", folder / "out.jsonl", LineDefaults(folder))
    summary = run_batch(plan, lambda _: servers.backend())
    assert summary.tally.num_answered == len(rows)
    return servers.ended_s


def test_the_others_end_no_later_than_without_it(tmp_path: Path) -> None:
    """But for its own time where all must pass. It begins anywhere in the run."""
    alone_s = max(ended(tmp_path / "alone", long_at=None).values())
    for place in (0, NUM_SHORT // 3):
        found = ended(tmp_path / f"{place}", long_at=place)
        long_s = found.pop(LONG)
        assert max(found.values()) <= alone_s + ENGINE_S + 1e-6
        assert len([name for name, end_s in found.items() if end_s < long_s]) > LONG_S / ENGINE_S / 2


def test_where_lengths_are_known_it_does_not_end_the_run_alone(tmp_path: Path) -> None:
    """It is the last of the table. Read first, it ends while the others are worked on."""
    unknown = ended(tmp_path / "unknown", long_at=NUM_SHORT)
    assert unknown.pop(LONG) - max(unknown.values()) > LONG_S / 2
    known = ended(tmp_path / "known", long_at=NUM_SHORT, has_lengths=True)
    assert known.pop(LONG) < max(known.values())


@pytest.mark.parametrize("max_tasks", [1, 2, 4, 1000])
def test_jobs_that_are_worked_on_at_once_by_hand(max_tasks: int) -> None:
    # one at once    |r e l|r e l|         two at once  |r  e l|
    #                                                   |r| e l |
    jobs = [StageSeconds(3, 1, 1), StageSeconds(1, 1, 2)]
    assert bounded_makespan_s(jobs, max_tasks) == (9 if max_tasks == 1 else 5)
    assert bounded_makespan_s([], max_tasks) == 0


def test_the_order_is_never_worse_than_the_one_given() -> None:
    jobs: list[Any] = [StageSeconds(0.2, 0.8, 0.2)] * 40 + [StageSeconds(20, 0.8, 0.2)]
    order = busy_order(jobs, 4)
    assert order[0] == 40
    assert bounded_makespan_s([jobs[place] for place in order], 4) < bounded_makespan_s(jobs, 4) - 15
