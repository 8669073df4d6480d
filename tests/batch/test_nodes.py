"""A batch over several servers keeps all of them busy, also while some are lost and come back.

The driver and the HTTP backend are the real ones; servers and time are virtual.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import epd.batch.http_backend as http_backend
from benchmarks.serving.batch_nodes import bound_s, run
from epd.batch.driver import BatchPlan, run_batch
from epd.batch.http_backend import Asker
from epd.batch.in_flight import InFlight
from epd.batch.lines import LineDefaults
from epd.client.endpoint import Endpoint
from tests.batch.virtual_servers import Costs, VirtualServers


@pytest.mark.parametrize(("num_lost", "num_late", "most_again"), [(0, 0, 1e-9), (4, 2, 0.05)])
def test_a_run_ends_near_the_bound_of_the_slowest_stage(
    num_lost: int, num_late: int, most_again: float
) -> None:
    """400 hours of video in parts of 5 to 15 minutes. Only what a lost node worked on is done again.

    The bound counts nodes that join while they are there. Without work for them the share would be .82.
    """
    found = run(400, num_nodes=8, num_lost=num_lost, num_late=num_late)
    assert 0.9 < found.share <= 1 + 1e-9
    assert found.again <= most_again


def test_the_bound_counts_nodes_while_they_are_there_by_hand() -> None:
    losses = [(2.0, 0, True), (6.0, 0, False)]
    assert bound_s(3.0, 2, losses) == 1.5  # before the loss
    assert bound_s(7.0, 2, losses) == 5.0  # 2 x 2 s, then 3 s of one
    assert bound_s(12.0, 2, losses) == 8.0  # 2 x 2 s, 4 s of one, 2 x 2 s


def test_a_server_with_many_places_has_work_until_all_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All media belong to the other one, which has more places than there are media looked at ahead."""

    def ranked(asker: Asker, _: Any, first: Endpoint | None = None) -> list[Endpoint]:
        other, owner = asker._backend.endpoints
        return [other, owner] if first is other else [owner, other]

    monkeypatch.setattr(Asker, "ranked", ranked)
    rows = [{"id": name, "video": f"{name}.mp4", "question": "?"} for name in map(str, range(400))]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    servers = VirtualServers(Costs(lambda _: 0.0, lambda _: 1.0, 0.0), 2)
    plan = BatchPlan(tmp_path / "in.jsonl", tmp_path / "out.jsonl", LineDefaults(tmp_path))
    run_batch(plan, lambda _: servers.backend(in_flight=InFlight(64, 64)))
    assert [server.work_s["encode"] for server in servers.servers] == pytest.approx([200, 200], abs=40)


@pytest.mark.parametrize("joins", [True, False])
def test_workers_that_join_a_server_get_media_of_a_batch_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, joins: bool
) -> None:
    """Spot nodes: one worker at first, three more after 20 s. Each has twenty lines at a time."""
    servers = VirtualServers(Costs(lambda _: 0.0, lambda _: 4.0, 0.0, num_encoders=100), 1)

    def num_workers(_: Endpoint) -> int:
        return 4 if joins and servers.clock.elapsed_s >= 20 else 1

    monkeypatch.setattr(http_backend, "num_workers", num_workers)
    rows = [{"id": name, "video": f"{name}.mp4", "question": "?"} for name in map(str, range(2000))]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plan = BatchPlan(tmp_path / "in.jsonl", tmp_path / "out.jsonl", LineDefaults(tmp_path))
    run_batch(plan, lambda _: servers.backend(in_flight=InFlight(20, 20, (1,), 20, 20)))
    # Five a second at first. Twenty a second from the look on that finds them, 10 s later at most.
    bounds_s = (20 + 1900 / 20, 30 + 1850 / 20 + 4) if joins else (400, 400)
    assert bounds_s[0] <= max(servers.ended_s.values()) <= bounds_s[1]
