"""The benchmark of a decode step times every part of it."""

from __future__ import annotations

from benchmarks.engine.host_step import host_rows


def test_every_part_of_a_step_is_timed_and_together_they_are_the_step() -> None:
    (row,) = host_rows([2], ["drawn"], 8)
    parts = {name: row[name] for name in ("schedule", "inputs", "sample", "read", "book", "rest")}
    assert min(parts.values()) > 0
    assert row["step_us"] >= max(parts.values())
