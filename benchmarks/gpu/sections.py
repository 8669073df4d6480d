"""Runs sections one after another, each within its time; one that fails does not stop the others.

section   | row, printed | row, printed | ...     rows of a section that fails later are kept
budget_s  [ ................................. )   an alarm ends it there, between two calls of Python
"""

from __future__ import annotations

import gc
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

import torch

from benchmarks.gpu.setup import Setup
from benchmarks.reporting import Row

# The result of a check stands in this column.
OK = "ok"


class OutOfTimeError(Exception):
    """A section has used up its time."""


@dataclass(frozen=True, slots=True)
class GpuSection:
    """A table of checks or measurements.

    run: yields its rows as they are found.
    budget_s: seconds after which it is ended.
    """

    title: str
    run: Callable[[Setup], Iterator[Row]]
    budget_s: float


@dataclass(slots=True)
class Outcome:
    """What a section has found. problem: why it is not complete, or which checks failed; else empty."""

    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0
    problem: str = ""


def run_all(
    sections: Mapping[str, GpuSection], wanted: Sequence[str], setup: Setup, total_s: float
) -> dict[str, Outcome]:
    """Runs the wanted sections, none beyond `total_s` seconds from now."""
    end_s = time.monotonic() + total_s
    outcomes = {}
    for name in wanted:
        left_s = end_s - time.monotonic()
        print(f"[{total_s - left_s:6.1f} s] {name}: {sections[name].title}", flush=True)
        outcomes[name] = _run(name, sections[name], setup, left_s)
        outcome = outcomes[name]
        print(f"{'':10} {name} took {outcome.seconds:.1f} s: {outcome.problem or 'done'}", flush=True)
    return outcomes


def _run(name: str, section: GpuSection, setup: Setup, left_s: float) -> Outcome:
    outcome, start_s = Outcome(), time.monotonic()
    try:
        with _alarm(min(section.budget_s, left_s)):
            for row in section.run(setup):
                outcome.rows.append(row)
                print(f"{'':10} {', '.join(f'{key} {value}' for key, value in row.items())}", flush=True)
    except OutOfTimeError:
        outcome.problem = f"ended after {min(section.budget_s, max(left_s, 0.0)):.0f} s"
    except Exception as error:  # noqa: BLE001 # whatever it is, the other sections run
        traceback.print_exc()
        outcome.problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    failed = sum(row.get(OK) is False for row in outcome.rows)
    if failed:
        outcome.problem = f"{failed} checks of '{name}' failed. {outcome.problem}".strip()
    outcome.seconds = time.monotonic() - start_s
    _free(setup)
    return outcome


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raises OutOfTimeError in the main thread when the time is over."""
    if seconds <= 0:
        raise OutOfTimeError

    def ring(_number: int, _frame: FrameType | None) -> None:
        raise OutOfTimeError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _free(setup: Setup) -> None:
    """Gives memory back that a section's pools and models have taken."""
    gc.collect()
    if setup.placement.is_cuda:
        torch.cuda.synchronize(setup.placement.device)
        torch.cuda.empty_cache()
