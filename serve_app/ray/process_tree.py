"""The processes below this one: found by their parents, and ended with everything that they have started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_LOOK_AGAIN_S = 0.02


def adopt_orphans() -> None:
    """From now on, processes below this one whose parent ends become its children: none gets out of sight."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children(pid: int) -> dict[int, str]:
    """Names of the processes that another one is the parent of, by their ids; not of ones that have ended."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            head, _, rest = status.read_text().rpartition(") ")
            state, parent = rest.split()[:2]
            if int(parent) == pid and state not in "ZX":
                found[int(status.parent.name)] = head.partition("(")[2]
    return found


def end_descendants(within_s: float) -> None:
    """Ends all processes below this one with SIGKILL, parents first; after `adopt_orphans`.

    Returns when they have ended with all their threads, which hold locks and files until then.
    """
    end_s = time.monotonic() + within_s
    while time.monotonic() < end_s:
        for pid in children(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if _reap():
            return
        time.sleep(_LOOK_AGAIN_S)  # then their children are ours


def _reap() -> bool:
    """Forgets children that have ended with all their threads. Returns whether none is left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    except ChildProcessError:
        return True
    return False
