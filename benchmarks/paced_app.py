"""The application with encoders that are as slow as if each had a device of its own. Serve imports it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ray import serve

import serve_app.app
from epd.topology import Stage
from serve_app.app_args import AppArgs
from serve_app.ray import deployments
from stages.encode.encoder import EncodedBatch

# An encoder takes at least so long for a group of frames.
GROUP_S = 0.5


class PacedStage(deployments.Stage):
    """A stage worker with paced encoders."""

    async def __init__(self, args: AppArgs) -> None:  # type: ignore[misc] # Serve awaits it
        from serve_app.worker.worker_core import WorkerCore  # torch, which only workers need

        build = WorkerCore._build

        def build_paced(core: WorkerCore, stage: Stage) -> Any:
            role: Any = build(core, stage)
            if stage == "encode":
                role.stage.step = _paced(role.stage.step)
            return role

        WorkerCore._build = build_paced  # type: ignore[assignment, method-assign]
        await super().__init__(args)


def _paced(step: Callable[[], list[EncodedBatch]]) -> Callable[[], list[EncodedBatch]]:
    def paced() -> list[EncodedBatch]:
        start_s = time.perf_counter()
        batches = step()
        num_groups = sum(each.num_encoded for each in batches)
        time.sleep(max(0.0, GROUP_S * num_groups - (time.perf_counter() - start_s)))
        return batches

    return paced


def build_app(args: AppArgs) -> serve.Application:
    """Builds the application without running it."""
    serve_app.app.Stage = PacedStage  # type: ignore[misc]
    return serve_app.app.build_app(args)


build_app.__annotations__["args"] = AppArgs  # Serve reads it as a class
