"""The application, whose decode workers hold their answers while a file is there: see `held_answers.py`."""

# No `from __future__ import annotations`: Serve reads the builder's annotation as a class.

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ray import serve

from epd.serve_app import app
from epd.serve_app.app_args import AppArgs
from epd.serve_app.ray import deployments

BUILDER = f"{__name__}:build_app"
# Of Ray's processes, who inherit it: the file. Without it, as in benchmarks, nothing is held.
HELD_FILE = "EPD_TEST_HELD_FILE"


class Stage(deployments.Stage):
    """A worker of the application, which can be told to hold."""

    async def __init__(self, args: AppArgs) -> None:  # type: ignore[misc] # Serve awaits it
        from epd.stages.decode import DecodeStage
        from tests.serve_app.held_answers import hold

        created, held_file = DecodeStage.__init__, os.environ.get(HELD_FILE)

        def create(stage: DecodeStage, *parts: Any) -> None:
            created(stage, *parts)
            if held_file is not None:
                hold(stage, Path(held_file).exists)

        DecodeStage.__init__ = create  # type: ignore[method-assign, assignment]
        await super().__init__(args)


def build_app(args: AppArgs) -> serve.Application:
    with patch.object(app, "Stage", Stage):
        return app.build_app(args)
