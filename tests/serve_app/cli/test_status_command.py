"""`epd status` as a user meets it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner, Result

from epd.serve_app.cli.program import app
from tests.serve_app.conftest import Front
from tests.serve_app.fakes import FakeService
from tests.serve_app.server import wait_until


def status(front: Front, *options: str) -> Result:
    return CliRunner().invoke(app, ["status", "--url", front.server.url, *options])


def test_a_table_of_workers_and_what_was_decided(front: Front) -> None:
    shown = status(front)
    assert shown.exit_code == 0, shown.output
    lines = [line.split() for line in shown.stdout.splitlines()]
    assert shown.stdout.startswith("2e1p1d, ready; 0 requests, 2 waiting\n")
    assert ["p0", "p", "0", "2", "50%", "-", "3"] in lines
    assert "\np0 sends by link to d1, d2; shared memory to d0\n" in shown.stdout
    assert (
        "\np0 has weights 15.2 GB, room for keys and values 50 GB (871,920 tokens), room for embeddings 3 GB "
        "(65,536 tokens) of 72 GB as bfloat16 on cuda:0\n"
    ) in shown.stdout
    assert ["e1", "e", "(lost)", "0", "0", "-", "-", "0"] in lines
    assert "switch: e1: e to d, gains 9.0 s for 1.0 s: worth it" in shown.stdout
    assert "e1: e to d, done in 0.34 s" in shown.stdout
    assert (
        "traffic: 2 requests in the last ten minutes, 0.033 per second; on average 128 patches"
        in shown.stdout
    )


def first_tokens(front: Front) -> dict[float, float]:
    """How many answers had their first token within so many seconds."""
    name = r"^epd_time_to_first_token_seconds_bucket\{le=\"(.*)\"\} (.*)$"
    found = re.findall(name, front.http.get("/metrics").text, re.MULTILINE)
    return {float(edge): float(count) for edge, count in found}


def bucket(before: dict[float, float], after: dict[float, float]) -> tuple[float, float]:
    """The edges between which the answer lies that came meanwhile."""
    edges = sorted(after)
    place = next(place for place, edge in enumerate(edges) if after[edge] > before.get(edge, 0.0))
    return edges[place - 1] if place else 0.0, edges[place]


def test_it_watches_rates_and_latencies_until_it_is_stopped(
    run_front: Callable[..., Front], monkeypatch: pytest.MonkeyPatch
) -> None:
    front, counts, seen = run_front(), iter(("1.0", "2.0")), list[dict[float, float]]()

    def ask_or_stop(_seconds: float) -> None:
        seen.append(first_tokens(front))
        if front.service.requests:
            raise KeyboardInterrupt
        front.ask()
        counted = f"epd_time_to_first_token_seconds_count {next(counts)}"
        wait_until(lambda: counted in front.http.get("/metrics").text)

    # Others that wait, as `wait_until` does, sleep as before.
    watched = SimpleNamespace(**{**vars(time), "sleep": ask_or_stop})
    monkeypatch.setattr("epd.serve_app.cli.status.time", watched)
    shown = status(front, "--watch")
    assert shown.exit_code == 0, shown.output
    first, second = shown.stdout.split("2e1p1d, ready; ")[1:]
    assert first.endswith("rates and latencies follow in 2 s\n")
    assert "0 requests running, 0 waiting, " in second
    # Of the one answer between two looks: how far into its bucket.
    low, high = bucket(*seen)
    p50_s, p99_s = (low + (high - low) * share for share in (0.5, 0.99))
    assert f"TTFT p50 {p50_s:.3g} s, p99 {p99_s:.3g} s;" in second
    assert "has weights" not in shown.stdout
    front.service.requests.clear()
    last = json.loads(status(front, "--watch", "--json").stdout.splitlines()[-1])
    assert last["status"]["topology"] == "2e1p1d"
    assert last["figures"]["requests_per_s"] > 0


def test_what_was_drafted(run_front: Callable[..., Front]) -> None:
    service = FakeService()
    names = {"num_drafts": 8, "num_draft_tokens": 40, "num_accepted_tokens": 20}
    service.counters |= {f"spec_decode_{name}": float(number) for name, number in names.items()}
    front = run_front(service)
    line = "\ndrafts: 20 of 40 drafted tokens accepted, 2.50 in each pass that checked a draft\n"
    assert line in status(front).stdout
    record = json.loads(status(front, "--json").stdout)
    assert record["drafts"] == {"drafts": 8, "draft_tokens": 40, "accepted_tokens": 20}
    assert "drafts:" not in status(run_front(FakeService())).stdout


def test_one_record_for_machines(front: Front) -> None:
    record = json.loads(status(front, "--json").stdout)
    assert record["status"]["topology"] == "2e1p1d"
    shown = {worker["name"]: worker["transports"] for worker in record["status"]["workers"]}
    assert shown["p0"] == {"d0": "shared memory", "d1": "link", "d2": "link"}
    assert record["load"]["num_requests"] == 2
    assert record["load"]["max_tokens"] == 266


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--url", "http://127.0.0.1:9"), 3, "gave ConnectError; start epd serve"),
        (("--url", "nonsense"), 2, "is not an endpoint"),
    ],
)
def test_what_cannot_be_shown_is_one_line(options: tuple[str, ...], code: int, message: str) -> None:
    shown = CliRunner().invoke(app, ["status", *options])
    assert shown.exit_code == code
    assert message in shown.stderr
    assert len(shown.stderr.splitlines()) == 1


def test_a_key_is_sent_and_asked_for(run_front: Callable[..., Front]) -> None:
    front = run_front(api_key="secret")
    refused = status(front)
    assert (refused.exit_code, "status 401" in refused.stderr) == (2, True)
    assert status(front, "--api-key", "secret").exit_code == 0
