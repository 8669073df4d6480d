"""The Grafana dashboard asks only for what the server shows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from epd.errors import UnavailableError
from epd.serve_app.observability.metrics import SERVICE_COUNTERS
from tests import ROOT
from tests.serve_app.conftest import Front
from tests.serve_app.fakes import FakeService
from tests.serve_app.server import wait_until

DASHBOARD = ROOT / "docs" / "deploy" / "grafana" / "epd.json"
_NAME = re.compile(r"\bepd_\w+")
_SELECTION = re.compile(r"by \(([^)]*)\)")


def queries() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


@pytest.fixture
def shown(run_front: Callable[..., Front]) -> dict[str, set[str]]:
    """Labels by name of everything that a server shows that has answered one request and failed another."""
    front = run_front(FakeService(counters=dict.fromkeys(SERVICE_COUNTERS, 1.0)))
    front.ask()
    front.service.error = UnavailableError("gone")
    front.ask()
    wait_until(lambda: "UnavailableError" in front.http.get("/metrics").text)
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(front.http.get("/metrics").text):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


def test_every_query_names_metrics_that_exist(shown: dict[str, set[str]]) -> None:
    named = {name for query in queries() for name in _NAME.findall(query)}
    assert len(named) > 20
    assert named <= set(shown), named - set(shown)


def test_sums_are_by_labels_that_exist(shown: dict[str, set[str]]) -> None:
    for query in queries():
        labels = set().union(*(shown[name] for name in _NAME.findall(query)))
        for selection in _SELECTION.findall(query):
            assert set(selection.split(", ")) <= labels, query


def test_the_figures_of_the_service_are_all_on_it(shown: dict[str, set[str]]) -> None:
    """What users and operators look at first."""
    asked = "".join(queries())
    for name in (
        "epd_time_to_first_token_seconds", "epd_time_per_output_token_seconds", "epd_stage_seconds",
        "epd_stage_queue_seconds", "epd_encoder_cache_hits_total", "epd_visual_tokens_dropped_total",
        "epd_role_switches_total", "epd_worker_kv_usage", "epd_worker_encoder_cache_usage",
    ):  # fmt: skip
        assert name in asked


def test_panels_do_not_lie_on_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    panels: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
