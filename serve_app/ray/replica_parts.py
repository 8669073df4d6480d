"""Gathers what replicas are built of. Imports torch: replicas import it when they start."""

from __future__ import annotations

from epd.serve_app.composition import create_app, media_settings, share_lead, worker_settings
from epd.serve_app.media.media_processes import MediaProcesses
from epd.serve_app.media.media_worker import MediaWorker
from epd.serve_app.network.media_server import MediaServer
from epd.serve_app.network.remote_fleet import RemoteFleet
from epd.serve_app.network.worker_server import WorkerServer, WorkerServerConfig
from epd.serve_app.observability.logs import write_logs
from epd.serve_app.ray.memory_limit import limit_memory

__all__ = [
    "MediaProcesses",
    "MediaServer",
    "MediaWorker",
    "RemoteFleet",
    "WorkerServer",
    "WorkerServerConfig",
    "create_app",
    "limit_memory",
    "media_settings",
    "share_lead",
    "worker_settings",
    "write_logs",
]
