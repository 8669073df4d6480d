"""Gathers what replicas are built of, and keeps a worker to its share of a GPU.

Imports torch: replicas import it when they start.
"""

from __future__ import annotations

import logging

import torch

from epd.serve_app.composition import (
    create_app,
    media_settings,
    share_clients,
    share_lead,
    worker_settings,
)
from epd.serve_app.media.media_processes import MediaProcesses
from epd.serve_app.media.media_worker import MediaWorker
from epd.serve_app.network.connector import TransportConfig
from epd.serve_app.network.media_server import MediaServer
from epd.serve_app.network.remote_fleet import RemoteFleet
from epd.serve_app.network.routes import Route
from epd.serve_app.network.worker_server import WorkerServer, WorkerServerConfig
from epd.serve_app.observability.logs import write_logs
from epd.serve_app.ray.gpus import assigned_gpus, largest_share
from epd.video.children.walls import hide_process

logger = logging.getLogger(__name__)
__all__ = [
    "MediaProcesses",
    "MediaServer",
    "MediaWorker",
    "RemoteFleet",
    "WorkerServer",
    "WorkerServerConfig",
    "create_app",
    "hide_process",
    "limit_memory",
    "media_settings",
    "share_clients",
    "share_lead",
    "transport_config",
    "worker_settings",
    "write_logs",
]


def transport_config(connector: str) -> TransportConfig:
    """Returns how the workers of an application with that connector reach each other."""
    return TransportConfig(between_machines=Route(connector))


def limit_memory(device: str, num_workers: int = 1) -> None:
    """Keeps this worker to its share of a GPU that it has with others.

    device: of this worker. num_workers: that share one GPU where the device was given and Ray gave out none.
    """
    if device == "cpu" or not torch.cuda.is_available():
        return
    share = assigned_gpus() or largest_share(num_workers, 1)
    if 0 < share < 1:
        torch.cuda.set_per_process_memory_fraction(share, None if device == "auto" else torch.device(device))
        logger.info("torch takes at most %.0f %% of the memory of the GPU", 100 * share)
