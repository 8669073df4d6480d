"""Counts the work of other orchestrators at workers that several share; alone, it changes nothing.

reports of workers --work of everybody--> Router: what is more than was sent from here is the others'
                   --less than before--> requests and groups that wait look for room again
"""

from __future__ import annotations

from epd.control.routing import Router
from epd.serve_app.messages import WorkerLoad, WorkerReport
from epd.serve_app.orchestration.encode_dispatcher import EncodeDispatcher
from epd.serve_app.orchestration.placement import RequestPlacer


class SharedLoad:
    """Passes on what reports show of others."""

    def __init__(self, router: Router, dispatcher: EncodeDispatcher, placement: RequestPlacer) -> None:
        """Starts alone."""
        self._router = router
        self._dispatcher = dispatcher
        self._placement = placement
        self._is_shared = False

    def share(self, *, is_shared: bool) -> None:
        """Begins or ends to count others. is_shared: whether there are any."""
        if self._is_shared and not is_shared:
            self._router.clear_reported()
        self._is_shared = is_shared

    def reported(self, report: WorkerReport, before: WorkerLoad | None) -> None:
        """Notes a report whose events have been taken. before: the worker's load in the last one."""
        if not self._is_shared:
            return
        if report.load.work is not None:
            self._router.set_reported(report.worker, report.load.work)
        if before is None or has_freed(before, report.load):
            self._placement.wake()
            self._dispatcher.wake()


def has_freed(before: WorkerLoad, now: WorkerLoad) -> bool:
    """Returns whether a worker has less of anything than before, so that there may be room."""
    usages = ((before.kv_usage, now.kv_usage), (before.seq_usage, now.seq_usage))
    works = zip(before.work or (), now.work or (), strict=False)
    return any((new or 0) < (old or 0) for old, new in (*usages, *works))
