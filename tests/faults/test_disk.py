"""A disk that fails: each line of a batch once, whole, and nothing left; keys and values right, or a miss."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.disk import drawn_faults, run_batch_on
from tests.faults.disk_store import run_store_on

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of ended servers
NUM_SEEDS = 150


def test_batches_survive_a_disk_that_fails_and_servers_that_end(tmp_path: Path) -> None:
    done = set[str]()
    for seed in range(NUM_SEEDS):
        wrong, disk = run_batch_on(tmp_path / f"{seed}", seed, drawn_faults(seed))
        assert not wrong, (seed, wrong)
        done |= disk.failed
    # What is to be survived has happened, to each operation.
    kinds, operations = ("full", "broken", "ends"), ("open", "write", "fsync", "replace")
    assert done == {f"{kind} at {operation}" for kind in kinds for operation in operations}


def test_a_seed_repeats_its_operations(tmp_path: Path) -> None:
    first, again = (run_batch_on(tmp_path / name, 51, drawn_faults(51))[1] for name in ("a", "b"))
    assert len(first.operations) > 30
    assert first.operations == again.operations


def test_keys_and_values_survive_a_disk_that_fails_and_servers_that_end(tmp_path: Path) -> None:
    done = set[str]()
    for seed in range(NUM_SEEDS):
        wrong, disk = run_store_on(tmp_path / f"{seed}", seed, drawn_faults(seed))
        assert not wrong, (seed, wrong)
        done |= disk.failed
    kinds, operations = ("full", "broken", "ends"), ("open", "write", "link", "replace")
    assert done == {f"{kind} at {operation}" for kind in kinds for operation in operations}
