"""A hundred lines of which three end what works on them: the others are answered, the three are explained."""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from epd.batch import http_backend
from epd.batch.driver import BatchPlan, run_batch
from epd.batch.lines import LineDefaults
from epd.serve_app.cli.program import app
from epd.serve_app.local.own_batch import OwnBackend
from epd.serve_app.messages import Prefill
from epd.stages.engine.engine import LanguageEngine
from tests.serve_app.deployments import Deployment
from tests.serve_app.server import served

POISON_TOKENS = 7  # max_tokens of a line that ends what works on it
NUM_LINES = 100
POISONED = frozenset({20, 50, 99})


def written(folder: Path) -> BatchPlan:
    lines = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": "tiny",
                "messages": [{"role": "user", "content": f"What is {number}?"}],
                "max_tokens": POISON_TOKENS if number in POISONED else 2,
            },
        }
        for number in range(NUM_LINES)
    ]
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return BatchPlan(folder / "in.jsonl", folder / "out.jsonl", LineDefaults(folder))


def failures(folder: Path) -> dict[int, dict[str, Any]]:
    lines = (folder / "out.errors.jsonl").read_text().splitlines()
    return {int(each["custom_id"]): each["error"] for each in map(json.loads, lines)}


def test_lines_that_meet_a_bug_of_this_process_are_explained(
    tmp_path: Path, backend: OwnBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = LanguageEngine.add

    def poisoned(engine: LanguageEngine, request: Any, **options: Any) -> None:
        if request.sampling.max_tokens == POISON_TOKENS:
            raise ZeroDivisionError("a bug")
        add(engine, request, **options)

    monkeypatch.setattr(LanguageEngine, "add", poisoned)
    plan = written(tmp_path)
    summary = run_batch(plan, lambda _: nullcontext(backend))
    assert (summary.tally.num_answered, summary.tally.num_failed) == (NUM_LINES - 3, 3)
    told = failures(tmp_path)
    assert told.keys() == POISONED
    assert {each["code"] for each in told.values()} == {"WorkerFaultError"}
    assert all("ZeroDivisionError" in each["message"] for each in told.values())


class DeadlyDeployment:
    """A server over workers that are lost with each poisoned request that they get."""

    def __init__(self, path: Path) -> None:
        self.deployment = Deployment(path, "2epd", {})
        self.send = self.deployment.fleet.send
        self.deployment.fleet.send = self.deadly_send  # type: ignore[method-assign]

    async def deadly_send(self, stage: Any, target: str, message: Any, bulk: Any = None) -> Any:
        if isinstance(message, Prefill) and message.request.sampling.max_tokens == POISON_TOKENS:
            asyncio.get_running_loop().call_soon(self.deployment.fleet.kill, target)
        return await self.send(stage, target, message, bulk)


def test_lines_that_end_workers_of_a_server_are_explained(
    tmp_path: Path, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_backend, "_FIRST_PAUSE_S", 0.05)
    deadly = DeadlyDeployment(checkpoints["qwen2_5_vl"])
    with served(deadly.deployment.service, running=deadly.deployment.running()) as server:
        plan = written(tmp_path)
        arguments = ["batch", str(plan.source), str(plan.out), "--url", server.url, "--json"]
        result = CliRunner().invoke(app, arguments)
        lost = asyncio.run(deadly.deployment.service.status()).counters["workers_lost"]
    assert result.exit_code == 1, result.output  # every line is answered or explained, and some failed
    assert len(plan.out.read_text().splitlines()) == NUM_LINES - 3
    told = failures(tmp_path)
    assert told.keys() == POISONED
    assert all("workers were lost" in each["message"] for each in told.values())
    assert 2 * len(POISONED) <= lost <= 5 * len(POISONED)
