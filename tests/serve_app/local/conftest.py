"""A pipeline for batches and the colocated pipeline it must equal, of one tiny checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from epd.engine_config import EngineConfig
from epd.serve_app.local.batch import LocalBackend
from epd.serve_app.service import ModelCard
from epd.stages.batch.batch import BatchPipeline
from epd.stages.colocated import ColocatedPipeline


@pytest.fixture(scope="session")
def batch_pipeline(checkpoints: dict[str, Path]) -> BatchPipeline:
    return BatchPipeline.load(checkpoints["qwen2_5_vl"], EngineConfig(num_threads=1, num_kv_tokens=8192))


@pytest.fixture(scope="session")
def colocated(checkpoints: dict[str, Path]) -> ColocatedPipeline:
    return ColocatedPipeline.load(checkpoints["qwen2_5_vl"], EngineConfig(num_kv_tokens=8192))


@pytest.fixture
def backend(batch_pipeline: BatchPipeline) -> LocalBackend:
    return LocalBackend(batch_pipeline, ModelCard("tiny", 0))
