"""A drawn video as the embedded model sees it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from epd.encoders import load_adapter
from epd.models import embedded_model_path
from epd.shapes import make_questions, make_scene
from epd.stages.engine.generation import GenerationSettings
from epd.video.demo_video import write_demo_video
from tests.colocated import ColocatedPipeline, EncodedMedia
from tests.stages.reduction.prompts import Engines
from tests.tiny_models import load_reference

NUM_FRAMES = 80  # 600 visual tokens, three windows
SEED = 4_000_001


@pytest.fixture(scope="module")
def model() -> Any:
    return load_reference(embedded_model_path())


@pytest.fixture(scope="module")
def pipeline(model: Any) -> ColocatedPipeline:
    adapter = load_adapter(embedded_model_path())
    settings = GenerationSettings.of(model.generation_config, adapter.tokenizer.eos_token_id)
    return ColocatedPipeline(model, adapter, settings=settings)


@pytest.fixture(scope="session")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reduction") / "clip.mp4"
    write_demo_video(path, make_scene(SEED, float(NUM_FRAMES)), fps=4, height=180, width=320)
    return path


@pytest.fixture(scope="session")
def questions() -> list[str]:
    scene = make_scene(SEED, float(NUM_FRAMES))
    return [question.text for question in make_questions(scene, random.Random(1), time_margin_s=2.0)][:4]


@pytest.fixture(scope="module")
def encoded(pipeline: ColocatedPipeline, clip: Path) -> EncodedMedia:
    return pipeline.encode_media([clip], num_frames=NUM_FRAMES)


@pytest.fixture(scope="module")
def short(pipeline: ColocatedPipeline, clip: Path) -> EncodedMedia:
    return pipeline.encode_media([clip], num_frames=24)


@pytest.fixture(scope="module")
def engines(model: Any, pipeline: ColocatedPipeline) -> Engines:
    return Engines(model, pipeline)


@pytest.fixture(scope="module")
def reference() -> Any:
    return load_reference(embedded_model_path())
