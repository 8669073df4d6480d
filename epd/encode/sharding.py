"""Chooses the encoder of a group by the kind of sharding of a request's groups, both live and simulated.

groups     each to the least loaded encoder: intra-request parallelism (EPD, section 3.2)
request    all of a request to one encoder, as long as it is available
local      to the worker that prefills them

Where one encoder gets all groups, it can drop tokens before it sends them to another worker.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

Sharding = Literal["groups", "request", "local"]


def wanted_encoder(sharding: Sharding, prefill_worker: str, last_encoder: str | None) -> str | None:
    """Returns the encoder that should take the next group, if it takes work; None for the least loaded.

    last_encoder: encoder of the request's last dispatched group, if any
    """
    match sharding:
        case "local":
            return prefill_worker
        case "request":
            return last_encoder
    return None


def has_sole_encoder(sharding: Sharding, encoders: Collection[str], prefill_worker: str) -> bool:
    """Returns whether one encoder gets all groups of a request, and sends them to another worker.

    encoders: those that take work
    """
    if not encoders or (sharding == "local" and prefill_worker in encoders):
        return False
    return (sharding == "request" or len(encoders) == 1) and set(encoders) != {prefill_worker}
