"""What `make clients` counts as an error, and its smallest part: the official client, and no environment."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.clients import __main__ as clients
from benchmarks.clients import asks as asks_module
from benchmarks.clients.asks import Case, Scene, difference, openai_batches, openai_client, run, whose
from benchmarks.clients.environments import VLLM_VARIABLE, NotInstalledError, environment
from benchmarks.clients.page import PAGE, RUNNERS, programs
from benchmarks.clients.questions import drawn_cases
from epd.models import embedded_model_path
from epd.serve_app.files.settings import FileSettings
from epd.serve_app.http.api import ApiSettings
from tests import ROOT
from tests.serve_app.real_app import real_app

CASE = Case("What?", "data:image/png;base64,AAAA", "", {"text": "red", "image": "blue"})


def test_the_official_client_gets_what_plain_http_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asks_module, "MODEL", "tiny")
    monkeypatch.setattr(asks_module, "_LINES_PER_BATCH", 2)
    api = ApiSettings(files=FileSettings(tmp_path / "kept"))
    with real_app(embedded_model_path(), "1e1p1d", api) as app:
        cases = drawn_cases(app.url, tmp_path, 2)
        asks = openai_client(f"{app.url}/v1")
        outcome = run(asks, cases, 2 * len(asks))
        assert outcome.errors == {}, outcome.examples
        assert outcome.asked == dict.fromkeys(asks, 2)
        batched = openai_batches(f"{app.url}/v1", cases, 5)
        assert batched.errors == {}, batched.examples
        assert batched.asked == {"text": 2, "image": 2, "video": 1}
        others = [replace(case, expected={"text": "no", "image": "no", "video": "no"}) for case in cases]
        assert openai_batches(f"{app.url}/v1", others, 3).errors == {"ours": 3}
        assert clients.refused(app.url) == 0
        httpx.post(f"{app.url}/v1/chat/completions", json={"messages": []}, trust_env=False, timeout=None)
        assert clients.refused(app.url) == 1


def test_make_clients_runs_every_program_of_the_page() -> None:
    """But for curl and Python, which the README has, and Open WebUI, which is a container."""
    text = PAGE.read_text(encoding="utf-8")
    found = programs(text)
    assert found.keys() == RUNNERS.keys()
    assert text.count("```python\n") + text.count("```javascript\n") == len(found)
    for code in found.values():
        assert code.count("http://127.0.0.1:8000/v1") == code.count("file:///media/clip.mp4") == 1
    command = ["make", "--dry-run", "clients"]
    steps = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "python -m benchmarks.clients.page" in steps


def test_other_answers_than_those_of_plain_http_are_errors_of_ours() -> None:
    assert difference("image streamed", CASE, "blue") == ""
    assert "plain HTTP gave 'blue'" in difference("image streamed", CASE, "red")
    assert difference("json schema", CASE, True) == ""
    assert difference("json schema", CASE, False)
    outcome = run({"text": lambda _case: "green"}, [CASE], 10)
    assert outcome.errors == {"ours": 10}


def test_what_a_client_raises_by_itself_is_its_own_error() -> None:
    def parse(_case: Case) -> bool:
        return bool(Scene.model_validate_json("{"))

    assert run({"json": parse}, [CASE], 3).errors == {"theirs": 3}
    refused: Any = type("BadRequestError", (Exception,), {"status_code": 400})
    assert whose(refused()) == "ours"
    assert whose(TimeoutError()) == "ours"
    wrapped = ValueError()
    wrapped.__cause__ = refused()
    assert whose(wrapped) == "ours"


def test_without_vllm_the_reason_is_written_down(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VLLM_VARIABLE, str(tmp_path))
    with pytest.raises(NotInstalledError, match=VLLM_VARIABLE):
        environment("vllm bench serve")


def test_clients_that_did_not_run_keep_their_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(clients, "RESULTS", tmp_path)
    monkeypatch.setattr(clients, "setting", lambda *_args, **_more: {"date": "today"})
    row = {"client": "openai", "requests": 20}
    clients.save({"clients": [row, {"client": "AIPerf", "requests": 1}], "missing": [], "errors": []})
    clients.save({"clients": [row | {"requests": 1000}], "missing": [], "errors": []})
    found = json.loads((tmp_path / "clients.json").read_text())
    assert [(each["client"], each["requests"]) for each in found["clients"]] == [
        ("openai", 1000),
        ("AIPerf", 1),
    ]
    assert "| openai | 1000 |" in (tmp_path / "clients.md").read_text()
