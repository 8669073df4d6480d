"""The families with adapters of ours as tiny checkpoints, loaded once for all tests of a run."""

from __future__ import annotations

from functools import partial

import pytest

from tests.draws import same_draws
from tests.encoders.families import Family
from tests.encoders.tiny_gemma import build_gemma4
from tests.encoders.tiny_generic import build_glm4v, build_glm_ocr, build_qwen2_vl
from tests.encoders.tiny_minicpm import build_minicpmv4_6, build_minicpmv4_7
from tests.encoders.tiny_tiles import BUILDERS

__all__ = ["same_draws"]


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Family]:
    root = tmp_path_factory.mktemp("checkpoints")
    glm = {"qwen2_vl": build_qwen2_vl, "glm4v": build_glm4v, "glm_ocr": build_glm_ocr}
    builders = {**BUILDERS, **glm, "gemma4": build_gemma4, "minicpmv4_6": build_minicpmv4_6}
    builders["minicpmv4_7"] = partial(build_minicpmv4_7, cuts_frames=True)
    return {name: Family.load(name, build(root / name)) for name, build in builders.items()}


@pytest.fixture(params=list(BUILDERS))
def family(request: pytest.FixtureRequest, families: dict[str, Family]) -> Family:
    return families[request.param]


@pytest.fixture(params=[*BUILDERS, "minicpmv4_7"])
def tiled_or_not(request: pytest.FixtureRequest, families: dict[str, Family]) -> Family:
    """Those, and one whose units have tiles of two sizes."""
    return families[request.param]
