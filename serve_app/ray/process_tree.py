"""Finds the processes below this one by their parents, and ends them with everything they have started."""

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
    """Makes processes below this one its children when their parent ends, so that none is lost track of."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children(pid: int) -> dict[int, str]:
    """Returns the names of a process's live children, by their ids."""
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
        time.sleep(_LOOK_AGAIN_S)  # then their children are adopted


def _reap() -> bool:
    """Reaps children that have ended with all their threads. Returns whether none is left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    except ChildProcessError:
        return True
    return False
