"""How the system schedules a process of tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def as_before() -> Iterator[None]:
    """Keeps how this thread is scheduled.

    As root, the AV1 encoder makes the thread that opens it a real-time one, before all others of the machine.
    What the thread starts later would be so too, and one that spins would leave no time to anybody.
    """
    policy, parameter = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, parameter)
