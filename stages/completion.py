"""Reports when work that was queued on a device is done, without waiting for it.

A kernel is launched long before it has written. Who offers what it writes to another worker, or tells the
sender of a copy that it has been read, records a completion after the launch and asks again in later steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class Completion(Protocol):
    """Stands for everything that was queued before it."""

    def is_done(self) -> bool:
        """Reports whether all of that has been computed and written. Never waits."""
        ...


@dataclass(frozen=True, slots=True)
class _Done:
    """Stands for work of a CPU, which is done when the call returns."""

    def is_done(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class _EventCompletion:
    """Stands for the work before a CUDA event."""

    event: torch.cuda.Event

    def is_done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]


DONE: Completion = _Done()


def recorded(device: torch.device) -> Completion:
    """Returns the completion of everything queued so far on the device's current stream; of a CPU, `DONE`."""
    if device.type == "cpu":
        return DONE
    return _EventCompletion(torch.cuda.current_stream(device).record_event())
