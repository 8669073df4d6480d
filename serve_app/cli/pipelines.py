"""Loads models for the commands that run them in this process. Imports torch: commands import it when run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from epd import console, video
from epd.errors import check_question
from epd.kv.drafting import NO_DRAFTS, DraftConfig
from epd.models import model_folder
from epd.pixel_settings import AUTHORS_LIMITS, PixelSettings
from epd.reduction import TowerMerge
from epd.stages.colocated import ColocatedPipeline
from epd.stages.evaluation import evaluate as run_evaluation
from epd.stages.placement import Placement
from epd.stages.profiling import Profiler
from epd.video.demo_video import Filming

__all__ = ["Filming", "Profiler", "load_pipeline", "open_pipeline", "placement_of", "run_evaluation"]


def open_pipeline(
    paths: Sequence[str],
    question: str,
    model: Path | None,
    skip_static: float | None = None,
    *,
    merge: TowerMerge | None = None,
    device: str = "auto",
    dtype: str = "auto",
    drafting: DraftConfig = NO_DRAFTS,
    tensor_parallel_size: int = 1,
    enforce_eager: bool = False,
    pixels: PixelSettings = AUTHORS_LIMITS,
) -> ColocatedPipeline:
    """Checks the input, then loads a model. Raises EPDError."""
    check_question(question)
    for path in paths:
        video.media_kind(path)
    placement = placement_of(device, dtype, model)
    return load_pipeline(
        model,
        placement,
        skip_static=skip_static,
        merge=merge,
        drafting=drafting,
        tensor_parallel_size=tensor_parallel_size,
        enforce_eager=enforce_eager,
        pixels=pixels,
    )


def placement_of(device: str, dtype: str, model: Path | None) -> Placement:
    """Returns where a model runs: see `Placement.resolve`. Raises RequestError."""
    return Placement.resolve(device, dtype, model_folder(model))


def load_pipeline(
    model: Path | None,
    placement: Placement,
    num_threads: int | None = None,
    skip_static: float | None = None,
    drafting: DraftConfig = NO_DRAFTS,
    merge: TowerMerge | None = None,
    tensor_parallel_size: int = 1,
    *,
    enforce_eager: bool = False,
    pixels: PixelSettings = AUTHORS_LIMITS,
) -> ColocatedPipeline:
    """Loads a model. Raises EPDError."""
    with console.loading_bar() as show:
        return ColocatedPipeline.load(
            model_folder(model),
            placement=placement,
            num_threads=num_threads,
            skip_static=skip_static,
            merge=merge,
            drafting=drafting,
            tensor_parallel_size=tensor_parallel_size,
            enforce_eager=enforce_eager,
            pixels=pixels,
            on_progress=show,
        )
