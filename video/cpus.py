"""How many CPUs this process may really use."""

from __future__ import annotations

import math
import os
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")


def usable_cpus(cgroup_root: Path = CGROUP_ROOT) -> int:
    """The smaller of the CPU affinity and the cgroup's quota, at least 1."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_quota(cgroup_root)
    return max(1, affinity if quota is None else min(affinity, math.ceil(quota)))


def cgroup_quota(cgroup_root: Path) -> float | None:
    """CPUs that the control group allows, None where it sets no bound (version 2, then version 1)."""
    fields = _read(cgroup_root / "cpu.max").split()
    if len(fields) == 2:
        return None if fields[0] == "max" else _ratio(fields[0], fields[1])
    quota = _read(cgroup_root / "cpu" / "cpu.cfs_quota_us").strip()
    period = _read(cgroup_root / "cpu" / "cpu.cfs_period_us").strip()
    return _ratio(quota, period)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _ratio(quota: str, period: str) -> float | None:
    try:
        value = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return None
    return value if value > 0 else None
