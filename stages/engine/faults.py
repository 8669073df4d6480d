"""Reruns a pass that raises in parts, so that it costs only the requests that it raises for alone.

[ a b c d ]  raises
[ a b ] done   [ c d ]  raises
               [ c ]  raises alone: c fails   [ d ] done
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from epd.errors import EPDError, InputError, InternalError, RankLostError

logger = logging.getLogger(__name__)

_PartT = TypeVar("_PartT")
# After this many failures in a row with no success between them, the worker itself is broken.
MAX_FAULTS_IN_A_ROW = 16


@dataclass(frozen=True, slots=True)
class RequestFault:
    """Reports a request that its worker cannot continue, and has forgotten. cause: what was raised."""

    request_id: str
    cause: Exception

    @property
    def error(self) -> EPDError:
        """Returns the client's error: of a bug no more than its type."""
        return InternalError.of(self.cause)


def logged_fault(request_id: str, cause: Exception) -> RequestFault:
    """Returns the fault, with its traceback in the log unless the request itself is at fault."""
    if not isinstance(cause, InputError):
        logger.error("request %s failed alone; others go on", request_id, exc_info=cause)
    return RequestFault(request_id, cause)


class FaultCounts:
    """Counts the requests that have failed in a row; decides when the worker itself is to end."""

    def __init__(self) -> None:
        self._num_in_a_row = 0

    def succeeded(self) -> None:
        self._num_in_a_row = 0

    def failed(self, request_id: str, cause: Exception) -> RequestFault:
        """Logs the cause. Raises it where too many requests have failed in a row by no fault of their own."""
        self._num_in_a_row += not isinstance(cause, InputError)
        if self._num_in_a_row > MAX_FAULTS_IN_A_ROW:
            raise cause
        return logged_fault(request_id, cause)


def run_apart(
    parts: Sequence[_PartT],
    run: Callable[[Sequence[_PartT]], None],
    fail: Callable[[_PartT, Exception], None],
) -> None:
    """Runs all parts at once; where that raises, runs halves, and reports which of them raises alone.

    run: has no effect if it raises.
    Raises RankLostError, which no request is to blame for.
    """
    try:
        run(parts)
    except RankLostError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, it costs the part that it belongs to
        if len(parts) == 1:
            fail(parts[0], error)
            return
        middle = len(parts) // 2
        run_apart(parts[:middle], run, fail)
        run_apart(parts[middle:], run, fail)
