"""The Grafana dashboard and the alert rules ask only for what the server shows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # its stubs are another package
from prometheus_client.parser import text_string_to_metric_families

from epd.errors import UnavailableError
from epd.serve_app.observability.metrics import SERVICE_COUNTERS, ServerMetrics
from epd.serve_app.service_status import ServiceStatus
from tests import ROOT
from tests.serve_app.conftest import Front
from tests.serve_app.fakes import FakeService
from tests.serve_app.server import wait_until

ALERTS = ROOT / "docs" / "deploy" / "alerts.yaml"
DASHBOARD = ROOT / "docs" / "deploy" / "grafana" / "epd.json"
_NAME = re.compile(r"\bepd_\w+")
_SELECTION = re.compile(r"by \(([^)]*)\)")
_MATCHER = re.compile(r"(\bepd_\w+)\{(\w+)=(~?)\"([^\"]*)\"\}")


def queries() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


def alerts() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def all_queries() -> list[str]:
    return queries() + [rule["expr"] for rule in alerts()]


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
    named = {name for query in all_queries() for name in _NAME.findall(query)}
    assert len(named) > 20
    assert named <= set(shown), named - set(shown)


def test_sums_are_by_labels_that_exist(shown: dict[str, set[str]]) -> None:
    for query in all_queries():
        labels = set().union(*(shown[name] for name in _NAME.findall(query)))
        for selection in _SELECTION.findall(query):
            assert set(selection.split(", ")) <= labels, query


def test_labels_have_the_values_that_are_asked_for(shown: dict[str, set[str]]) -> None:
    """A bucket that does not exist gives no series, and its alert would never fire."""
    asked = [found for query in all_queries() for found in _MATCHER.findall(query)]
    assert {label for _, label, _, _ in asked} == {"le", "status"}
    for name, label, is_pattern, value in asked:
        assert label in shown[name]
        if label == "le":
            assert not is_pattern
            assert f'{name}{{le="{value}"}}' in ServerMetrics().render(ServiceStatus(True, "")).decode()


def test_each_alert_says_what_is_wrong_and_what_to_do(shown: dict[str, set[str]]) -> None:
    assert len({rule["alert"] for rule in alerts()}) == len(alerts()) >= 10
    for rule in alerts():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "action"}
        labels = set().union(*(shown[name] for name in _NAME.findall(rule["expr"])))
        assert set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])) <= labels


def test_the_objectives_of_the_dashboard_are_those_of_the_alerts() -> None:
    """The lines in the panels are the limits of the rules."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    drawn = {
        panel["title"]: panel["fieldConfig"]["defaults"]["thresholds"]["steps"][1]["value"]
        for panel in panels
        if "thresholds" in panel.get("fieldConfig", {}).get("defaults", {})
    }
    limits = {
        rule["alert"]: float(rule["expr"].rpartition("> ")[2]) for rule in alerts() if "> " in rule["expr"]
    }
    assert drawn == {
        "First token within 1 s and 5 s": 1 - limits["EpdSlowFirstToken"],
        "Requests without a server error": 1 - limits["EpdServerErrors"],
        "Requests refused for lack of room": limits["EpdRefusals"],
    }


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
