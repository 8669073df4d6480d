"""Native families as tiny checkpoints, loaded once for all tests of a run."""

from __future__ import annotations

import pytest

from tests.draws import same_draws
from tests.encoders.families import Family
from tests.encoders.tiny_gemma import build_gemma4
from tests.encoders.tiny_tiles import BUILDERS

__all__ = ["same_draws"]


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Family]:
    root = tmp_path_factory.mktemp("checkpoints")
    builders = {**BUILDERS, "gemma4": build_gemma4}
    return {name: Family.load(name, build(root / name)) for name, build in builders.items()}


@pytest.fixture(params=list(BUILDERS))
def family(request: pytest.FixtureRequest, families: dict[str, Family]) -> Family:
    return families[request.param]
