"""The application that tests on Ray share: a start takes a minute of CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve_app.ray.declared_app import DeclaredApp, declared_app
from tests.serve_app.ray.ray_session import RaySession

SHARED_TOPOLOGY = "1e1p2d"
# A process that starts on busy cores may be silent for some seconds.
SHARED_HANG_S = 30.0
# Replicas are started again while other tests run: that takes minutes, and says nothing.
TIMEOUT_S = 3600
KEY = "a-key-for-tests"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="package")
def shared_app(
    ray_session: RaySession, checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DeclaredApp]:
    """Two fronts behind the proxy, and four workers; each test leaves it idle, and leaves as many."""
    with declared_app(
        ray_session,
        model=checkpoints["qwen2_5_vl"],
        model_name="tiny",
        topology=SHARED_TOPOLOGY,
        num_fronts=2,
        api_key=KEY,
        allowed_media_path=tmp_path_factory.getbasetemp(),
        num_kv_tokens=1 << 15,
        max_num_seqs=128,
        hang_s=SHARED_HANG_S,
        drain_s=120,
    ) as app:
        yield app
    assert [path for files in app.pool_files for path in files.paths()] == []
