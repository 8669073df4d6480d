"""The application with encoders that are as slow as if each had a device of its own. Serve imports it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray import serve

import epd.serve_app.app
from epd.serve_app.app_args import AppArgs
from epd.serve_app.local.pacing import paced_tower
from epd.serve_app.ray import deployments
from epd.topology import Stage

# An encoder takes at least so long for a group of frames.
GROUP_S = 0.5


class PacedStage(deployments.Stage):
    """A stage worker with paced encoders."""

    async def __init__(self, args: AppArgs) -> None:  # type: ignore[misc] # Serve awaits it
        from epd.serve_app.worker.worker_core import WorkerCore  # torch, which only workers need

        build = WorkerCore._build

        def build_paced(core: WorkerCore, stage: Stage) -> Any:
            return slowed(build(core, stage), stage)

        WorkerCore._build = build_paced  # type: ignore[assignment, method-assign]
        await super().__init__(args)


def slowed(role: Any, stage: Stage) -> Any:
    """Returns a role of a worker, whose tower is paced if it encodes."""
    if stage == "encode":
        role.stage._encoder.encode = paced_tower(role.stage._encoder.encode, _seconds)
    return role


def _seconds(groups: Sequence[Any]) -> float:
    return GROUP_S * len(groups)


def build_app(args: AppArgs) -> serve.Application:
    """Builds the application without running it."""
    epd.serve_app.app.Stage = PacedStage  # type: ignore[misc]
    return epd.serve_app.app.build_app(args)


build_app.__annotations__["args"] = AppArgs  # Serve reads it as a class
