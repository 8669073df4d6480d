"""Reports what this process may use of its machine: CPUs in its affinity and memory, in its control groups.

Every default that depends on the machine asks here: `os.cpu_count` and the machine's memory ignore a
container's limits. Both versions of control groups are read, the process's own group and those above it.
`system`: the root of the file system, for tests.

While a process that looks at others had no core, it could hear of nobody: that time counts against nobody.
"""

from __future__ import annotations

import atexit
import gc
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SYSTEM = Path("/")
_BEGAN_S = time.time() - time.monotonic()


def steady_time_s() -> float:
    """Returns Unix time on a clock that was set when this process began.

    Steps of the wall clock since then do not move it. Other processes' clocks may differ: give them ages.
    """
    return _BEGAN_S + time.monotonic()


def usable_cpus(system: Path = _SYSTEM) -> int:
    """Returns the smaller of the CPU affinity and the quota of the control groups, at least 1."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(system)
    return max(1, affinity if quota is None else min(affinity, math.ceil(quota)))


def cpu_quota(system: Path = _SYSTEM) -> float | None:
    """Returns the CPUs that the control groups allow, None where they set no bound."""
    new = [_ratio(*_fields(group / "cpu.max")) for group in _groups(system, "")]
    old = [
        _ratio(*_fields(group / "cpu.cfs_quota_us"), *_fields(group / "cpu.cfs_period_us"))
        for group in _groups(system, "cpu")
    ]
    return min((quota for quota in (*new, *old) if quota is not None), default=None)


def memory_limit_bytes(system: Path = _SYSTEM) -> int:
    """Returns the memory that this process and its container may have together, used or not."""
    return min(_machine_bytes(system, "MemTotal"), *(limit for limit, _ in _memory_groups(system)))


def available_memory_bytes(system: Path = _SYSTEM) -> int:
    """Returns the memory that is free now: on the machine, and within the limits of control groups."""
    left = (limit - used for limit, used in _memory_groups(system))
    return max(0, min(_machine_bytes(system, "MemAvailable"), *left))


def _memory_groups(system: Path) -> Iterator[tuple[int, int]]:
    """Yields (limit, bytes in use that cannot be dropped) of each control group; skips unlimited ones."""
    yield 2**63, 0
    for name, (limit, current, cache) in {
        "": ("memory.max", "memory.current", "inactive_file"),
        "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    }.items():
        for group in _groups(system, name):
            allowed = _fields(group / limit)
            if allowed and allowed[0].isdigit():
                used = int((_fields(group / current) or ["0"])[0])
                yield int(allowed[0]), used - _named(group / "memory.stat", cache)


def _groups(system: Path, controller: str) -> list[Path]:
    """Returns the folders of this process's control group and those above; controller: "" for version 2.

    Inside a container the groups may be named as the host sees them, while its root is the container's:
    folders that do not exist have no files to read.
    """
    root = system / "sys/fs/cgroup" / controller
    for line in _text(system / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(",") and ".." not in path:
            own = root / path.lstrip("/")
            return [own, *(each for each in own.parents if each.is_relative_to(root))]
    return [root]


def _machine_bytes(system: Path, name: str) -> int:
    """Returns a row of /proc/meminfo, which is in kibibytes; without one, the pages of this machine."""
    found = _named(system / "proc/meminfo", f"{name}:") * 1024
    return found or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _named(path: Path, name: str) -> int:
    """Returns the number behind a name that begins a line, 0 without one."""
    rows = (line.split() for line in _text(path).splitlines())
    return next((int(row[1]) for row in rows if row[:1] == [name]), 0)


def _fields(path: Path) -> list[str]:
    return _text(path).split()


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _ratio(*fields: str) -> float | None:
    """Returns quota / period; None for no quota, which is "max" or -1, and for anything but two numbers."""
    try:
        quota, period = map(int, fields)
        return quota / period if quota > 0 else None
    except (ValueError, ZeroDivisionError):
        return None


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keeps what the block imports, large packages, from Python's garbage collector, now and later.

    Searching torch and transformers takes a quarter of the CPU time of importing them, and finds nothing.
    What stood before the block is kept too, until the process ends: nanobind would report it as leaked.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)
        if was_enabled:
            gc.enable()


class Looks:
    """Regular looks, every_s apart."""

    def __init__(self, every_s: float, now_s: float) -> None:
        self._every_s = every_s
        self._looked_s = now_s

    def late_s(self, now_s: float) -> float:
        """Returns how late this look is, at least 0. To be called at each."""
        late_s = max(0.0, now_s - self._looked_s - self._every_s)
        self._looked_s = now_s
        return late_s


def excused(heard_s: float, late_s: float, now_s: float) -> float:
    """Returns a time when something was heard, as if nobody had been silent while a look was late."""
    return min(heard_s + late_s, now_s)
