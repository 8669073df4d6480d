"""Finds the processes below this one by their parents, and ends them with everything they have started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from epd.errors import EPDError, exit_code
from epd.serve_app.held_folder import remove_own
from epd.serve_app.network.memory import remove_orphans

_PR_SET_CHILD_SUBREAPER = 36
_LOOK_AGAIN_S, _END_S = 0.02, 5.0


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


def end_with_error(error: EPDError) -> NoReturn:
    """Ends this process as `end_process`, with the error's line and exit code."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    end_process(exit_code(error))


def end_process(code: int) -> NoReturn:
    """Ends this process at once, every process below it, and removes what they hold on disk."""
    sys.stdout.flush()
    end_descendants(_END_S)
    remove_own()
    remove_orphans()
    os._exit(code)


def _reap() -> bool:
    """Reaps children that have ended with all their threads. Returns whether none is left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    except ChildProcessError:
        return True
    return False
