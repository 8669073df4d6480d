"""How much room for keys and values an engine gets where nobody says."""

from __future__ import annotations

import pytest

from serve_app.app_args import AppArgs
from stages.engine import setup as engine_setup

GIB = 1 << 30


def test_keys_and_values_follow_the_containers_limit_not_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_setup, "memory_limit_bytes", lambda: 8 * GIB)
    assert engine_setup.default_kv_tokens(1 << 20) == 2 * 1024


@pytest.mark.parametrize(("topology", "num_pools"), [("1epd", 2), ("1e1p1d", 3), ("1e1pd", 3), ("2e2p2d", 6)])
def test_workers_of_a_machine_share_a_quarter_of_its_memory(
    topology: str, num_pools: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every one may be given a role that keeps keys and values."""
    assert AppArgs(topology=topology).num_kv_pools == num_pools
    monkeypatch.setattr(engine_setup, "memory_limit_bytes", lambda: 24 * GIB)
    each = engine_setup.default_kv_tokens(1 << 20, num_pools)
    assert each * num_pools <= 6 * 1024 < (each + 1) * num_pools
