"""A model of this process that answers batches, and the plain loop that it must equal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from epd.engine_config import EngineConfig
from epd.serve_app.cli.own_model import open_model
from epd.serve_app.local.own_batch import OwnBackend
from epd.serve_app.local.own_service import OwnService
from tests.colocated import ColocatedPipeline


@pytest.fixture(scope="package")
def service(checkpoints: dict[str, Path]) -> Iterator[OwnService]:
    config = EngineConfig(num_threads=1, num_kv_tokens=8192)
    with open_model(checkpoints["qwen2_5_vl"], config, model_name="tiny") as opened:
        yield opened


@pytest.fixture(scope="session")
def colocated(checkpoints: dict[str, Path]) -> ColocatedPipeline:
    return ColocatedPipeline.load(checkpoints["qwen2_5_vl"], EngineConfig(num_kv_tokens=8192))


@pytest.fixture
def backend(service: OwnService) -> OwnBackend:
    return OwnBackend(service, max_requests=56)
