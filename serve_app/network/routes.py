"""Chooses how data gets from one worker's pool to another worker.

same worker                       same process     the receiver reads the pool itself
same machine, pool of the CPU     shared memory    the receiver maps the pool
same machine, pool of a GPU       cuda ipc         the receiver opens the pool, if it sees that GPU
                                  staging          through a bounded segment of host memory
another machine                   link             through messages, of bounded size and number
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum


class Route(StrEnum):
    """Names a way, as `epd status` shows it."""

    SAME_PROCESS = "same process"
    SHARED_MEMORY = "shared memory"
    CUDA_IPC = "cuda ipc"
    STAGING = "staging"
    LINK = "link"


@dataclass(frozen=True, slots=True)
class PeerPlace:
    """Says where a worker is, as far as its pools are concerned.

    epoch: unique to its process
    node_id: of its machine, whose shared memory it sees
    gpus: ids of the GPUs whose memory it can open
    """

    epoch: str
    node_id: str
    gpus: Collection[str] = ()


def choose_route(
    gpu: str, here: PeerPlace, there: PeerPlace | None, *, is_staged: bool = False, may_open: bool = True
) -> Route:
    """Returns the route from a pool of this worker to another worker.

    gpu: that the pool is on; empty for a pool of the CPU
    there: None for a worker that is not known, which gets messages alone, if any
    is_staged: whether pools of this machine are staged although they could be reached
    may_open: False for a receiver that has failed to open the pool before
    """
    if there is None or there.node_id != here.node_id:
        return Route.LINK
    if there.epoch == here.epoch:
        return Route.SAME_PROCESS
    if is_staged:
        return Route.STAGING
    if not gpu:
        return Route.SHARED_MEMORY
    return Route.CUDA_IPC if may_open and gpu in there.gpus else Route.STAGING
