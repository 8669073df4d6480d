"""Large tensors are given back to the system when they end, and what is resident is read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from epd.host_memory import map_large_tensors

SIZE, LARGE_PAGE = 16 << 20, 2 << 20
# The C library would take tensors from the heap once a larger one was given back, and keep the first of two.
PROGRAM = f"""
from epd import encoders
import torch
from epd.host_memory import map_large_tensors, resident_bytes
def refused():  # how often the kernel had no large page, and gave small ones in its place
    counters = (line.split() for line in open("/proc/vmstat"))
    return sum(int(count) for name, count in counters if name == "thp_fault_fallback")
before = refused()
print(map_large_tensors())
torch.ones({28 << 20}, dtype=torch.uint8)
first, second = torch.ones({SIZE}, dtype=torch.uint8), torch.ones({SIZE}, dtype=torch.uint8)
held = resident_bytes()
print([line for line in open("/proc/self/smaps_rollup") if "AnonHugePages" in line][0].split()[1])
print(refused() - before)
del first
print(held - resident_bytes())
"""


def test_large_tensors_go_back_to_the_system_and_are_made_of_large_pages() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    has_mapped, large_kb, num_refused, given_back = done.stdout.split()
    if has_mapped == "False":
        pytest.skip("this system has no large pages")
    assert int(large_kb) * 1024 + int(num_refused) * LARGE_PAGE >= SIZE
    assert int(given_back) >= 0.9 * SIZE


@pytest.mark.parametrize("modes", ["always madvise [never]", ""])
def test_small_pages_leave_the_heap_as_it_is(tmp_path: Path, modes: str) -> None:
    file = tmp_path / "sys/kernel/mm/transparent_hugepage/enabled"
    file.parent.mkdir(parents=True)
    file.write_text(modes)
    assert not map_large_tensors(tmp_path)
    assert not map_large_tensors(tmp_path / "nothing")


def test_a_threshold_that_was_asked_for_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    assert not map_large_tensors()


# In a process of its own: of one with large libraries, the system may take as much back meanwhile.
PEAKS = f"""
import mmap
from epd.host_memory import resident_bytes, resident_peak_bytes
before = resident_bytes()
print(before)
print(resident_peak_bytes(lambda: mmap.mmap(-1, {4 * SIZE}).write(bytes({4 * SIZE}))) - before)
print(resident_peak_bytes(lambda: None) - before)
"""


def test_the_peak_of_an_action_is_seen_after_it() -> None:
    done = subprocess.run([sys.executable, "-c", PEAKS], capture_output=True, text=True, check=True)
    before, in_action, after = map(int, done.stdout.split())
    assert before > 0
    assert in_action >= 3 * SIZE
    assert after < 2 * SIZE, "the earlier peak is forgotten"
