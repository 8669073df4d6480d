"""Shows the workers of a fleet in a service's status."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from epd.serve_app.messages import WorkerLoad
from epd.serve_app.service import WorkerStatus
from epd.serve_app.worker_info import WorkerInfo
from epd.topology import Stage, role_letters

_ALL_ROLES: frozenset[Stage] = frozenset({"video", "encode", "prefill", "decode"})


def has_all_roles(infos: Collection[WorkerInfo]) -> bool:
    """Returns whether every role that an answer needs has a live worker."""
    return {stage for info in infos if info.is_alive for stage in info.roles} >= _ALL_ROLES


def worker_statuses(
    infos: Collection[WorkerInfo], loads: Mapping[str, WorkerLoad], switching: Collection[str]
) -> tuple[WorkerStatus, ...]:
    """Returns the status of each worker. loads: their last reports. switching: those being switched here."""
    return tuple(_status(info, loads.get(info.name, WorkerLoad()), switching) for info in infos)


def _status(info: WorkerInfo, load: WorkerLoad, switching: Collection[str]) -> WorkerStatus:
    return WorkerStatus(
        name=info.name,
        roles=role_letters(info.roles),
        is_alive=info.is_alive,
        num_waiting=load.num_waiting,
        num_running=load.num_running,
        kv_usage=load.kv_usage,
        encoder_cache_usage=load.encoder_cache_usage,
        num_role_switches=load.num_role_switches,
        is_switching=info.name in switching or bool(info.leaving),
        transports=load.transports,
        memory=load.memory,
    )
