"""Loads models for the commands that run them in this process. Imports torch: commands import it when run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from epd import console, video
from epd.engine_config import DEFAULT_ENGINE, EngineConfig
from epd.errors import check_question
from epd.models import model_folder
from epd.stages.colocated import ColocatedPipeline
from epd.stages.evaluation import evaluate as run_evaluation
from epd.stages.placement import Placement
from epd.stages.profiling import Profiler
from epd.video.demo_video import Filming

__all__ = ["Filming", "Profiler", "load_pipeline", "open_pipeline", "placement_of", "run_evaluation"]


def open_pipeline(
    paths: Sequence[str], question: str, model: Path | None, config: EngineConfig = DEFAULT_ENGINE
) -> ColocatedPipeline:
    """Checks the input, then loads a model. Raises EPDError."""
    check_question(question)
    for path in paths:
        video.media_kind(path)
    return load_pipeline(model, config)


def placement_of(config: EngineConfig, model: Path | str | None) -> Placement:
    """Returns where a model runs: see `Placement.resolve`. Raises RequestError."""
    return Placement.resolve(config.device, config.dtype, model_folder(model, config.revision))


def load_pipeline(model: Path | None, config: EngineConfig) -> ColocatedPipeline:
    """Loads a model. Raises EPDError."""
    with console.loading_bar() as show:
        return ColocatedPipeline.load(model_folder(model, config.revision), config, on_progress=show)
