"""A worker thread whose reports are kept until a test asks for them."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from epd.serve_app.messages import WorkerReport
from epd.serve_app.worker.worker_settings import Transport, WorkerSettings
from epd.serve_app.worker.worker_thread import WorkerCallbacks, WorkerThread
from epd.topology import Stage


class KeepingThread(WorkerThread):
    """failure: why the worker has ended, if it has."""

    def __init__(
        self, name: str, roles: frozenset[Stage], settings: WorkerSettings, transport: Transport
    ) -> None:
        super().__init__(name, roles, settings, transport, WorkerCallbacks(self._keep, self._fail))
        self.failure = ""
        self._reports: list[WorkerReport] = []
        self._has_reports = asyncio.Event()

    async def take_reports(self, wait_s: float) -> list[WorkerReport]:
        """Returns new reports: at once if there are any, else those that come within `wait_s`."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._has_reports.wait(), wait_s)
        self._has_reports.clear()
        reports, self._reports = self._reports, []
        return reports

    def _keep(self, report: WorkerReport) -> None:
        self._reports.append(report)
        self._has_reports.set()

    def _fail(self, reason: str) -> None:
        self.failure = reason
        self._has_reports.set()
