"""Says what this process and those below it are waiting for: printed where a test has waited in vain.

load 3.1 2.0 1.2 on 2 cores
thread MainThread: fetch.py:12 read <- fetch.py:40 answer
process 71 python, child of 70: R, 4.2 s of CPU in 9.0 s, 310 MB, in do_wait
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_NUM_FRAMES = 6


def what_waits() -> str:
    """Returns a line for the machine, for each thread of this process and for each process below it."""
    load = " ".join(f"{each:.1f}" for each in os.getloadavg())
    rows = [f"load {load} on {len(os.sched_getaffinity(0))} cores", *_threads(), *_processes(os.getpid())]
    return "\n".join(rows)


def children_of(pid: int) -> Iterator[int]:
    """Yields the processes that a process has started and that have not ended."""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            yield from map(int, path.read_text(encoding="ascii").split())


def _threads() -> Iterator[str]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        stack = reversed(traceback.extract_stack(frame)[-_NUM_FRAMES:])
        calls = " <- ".join(f"{Path(call.filename).name}:{call.lineno} {call.name}" for call in stack)
        yield f"thread {names.get(ident, ident)}: {calls}"


def _processes(parent: int) -> Iterator[str]:
    for pid in children_of(parent):
        with suppress(OSError):  # it may end meanwhile
            yield _process(pid, parent)
        yield from _processes(pid)


def _process(pid: int, parent: int) -> str:
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    name, fields = stat[stat.index("(") + 1 : stat.rindex(")")], stat[stat.rindex(")") + 2 :].split()
    ticks = os.sysconf("SC_CLK_TCK")
    cpu_s = (int(fields[11]) + int(fields[12])) / ticks
    wall_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / ticks
    megabytes = int(fields[21]) * os.sysconf("SC_PAGE_SIZE") // 10**6
    waits_in = Path(f"/proc/{pid}/wchan").read_text(encoding="ascii")
    where = f", in {waits_in}" if re.search("[a-z]", waits_in) else ""
    return (
        f"process {pid} {name}, child of {parent}: {fields[0]}, {cpu_s:.1f} s of CPU in {wall_s:.1f} s, "
        f"{megabytes} MB{where}"
    )
