"""What the parts of an orchestrator share, made by hand."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from epd.control.admission import AdmissionQueue
from epd.control.routing import Router
from epd.serve_app.orchestration.config import OrchestratorConfig
from epd.serve_app.orchestration.encode_dispatcher import EncodeDispatcher
from epd.serve_app.orchestration.requests import Requests, Shared


def shared_parts(
    fleet: Any = None,
    *,
    dispatcher: Any = None,
    attempts: Mapping[str, Any] | None = None,
    loads: Mapping[str, Any] | None = None,
    clock: Callable[[], float] = time.time,
    **config: Any,
) -> Shared:
    """attempts, loads: as of `Requests`. dispatcher: by default a real one. config: of OrchestratorConfig"""
    fleet, router, requests = fleet or SimpleNamespace(workers={}), Router(), Requests(clock)
    requests.attempts.update(attempts or {})
    requests.loads.update(loads or {})
    dispatcher = dispatcher or EncodeDispatcher(fleet, router, max_backlog_patches=1)
    return Shared(fleet, router, AdmissionQueue(8), dispatcher, requests, OrchestratorConfig(**config))
