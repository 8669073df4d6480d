"""A question's own choice of what it reads stays with one worker; where two would share it, it is refused."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from epd.errors import RequestError
from epd.models import embedded_model_path
from epd.reduction import METHODS, QUESTION_METHODS, ReductionPolicy
from serve_app.app_args import AppArgs
from stages.colocated import ColocatedPipeline, EncodedMedia
from tests.serve_app.deployments import NUM_FRAMES, Deployment, Question, deployed
from tests.serve_app.server import served, wait_until
from tests.stages.reduction.prompts import Engines, prompt_of

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")

POLICY = ReductionPolicy("mustdrop", 0.2)


def ask_over_http(url: str, clip: Path, text: str, policy: ReductionPolicy) -> httpx.Response:
    parts = [{"type": "video_url", "video_url": {"url": clip.as_uri()}}, {"type": "text", "text": text}]
    body = {
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": 4,
        "epd": {"reduction": policy.method, "retention": policy.retention, "num_frames": NUM_FRAMES},
    }
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30, trust_env=False)


@pytest.mark.parametrize("topology", ["1e1p1d", "1ep1d", "1e1pd1p1d"])
def test_where_another_worker_decodes_it_is_refused_before_anything_is_fetched(
    topology: str, clip: Path, questions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = Deployment(embedded_model_path(), topology, {})
    messages: list[str] = []
    send = deployment.fleet.send

    async def watched(stage: Any, target: str, message: Any, *bulk: Any) -> Any:
        messages.append(type(message).__name__)
        return await send(stage, target, message, *bulk)

    monkeypatch.setattr(deployment.fleet, "send", watched)
    with served(deployment.service, running=deployment.running()) as server:
        refused = ask_over_http(server.url, clip, questions[0], POLICY)
        assert refused.status_code == 400, refused.text
        assert messages == []
        error = refused.json()["error"]["message"]
        assert re.search(r"received .*'mustdrop'.*; allowed .*; use one", error), error
        for method in METHODS:
            assert (f" {method}" in error) == (method not in QUESTION_METHODS)
        answered = ask_over_http(server.url, clip, questions[0], ReductionPolicy("mustdrop", 1.0))
        assert answered.status_code == 200, answered.text
        assert messages[0] == "FetchMedia"
        wait_until(lambda: not deployment.leftovers())


def test_it_is_refused_also_where_the_topology_changed_while_media_were_fetched(
    clip: Path, questions: list[str]
) -> None:
    async def run() -> None:
        async with deployed(embedded_model_path(), "1e1p1d") as deployment:
            with pytest.raises(RequestError, match="'mustdrop'"):
                await deployment.ask(Question((clip,), questions[0]), reduction=POLICY)
            await deployment.settle()

    asyncio.run(run())


@pytest.mark.parametrize("options", [{"retention": 0.3}, {"retention_min": 0.3, "slo_ttft_s": 1.0}])
def test_a_server_that_would_refuse_what_is_its_default_does_not_start(options: dict[str, float]) -> None:
    with pytest.raises(RequestError, match=r"'mustdrop'.* in topology 1e1p1d"):
        AppArgs(reduction="mustdrop", topology="1e1p1d", **options).resolved()
    AppArgs(reduction="mustdrop", topology="1e1pd", **options).resolved()
    AppArgs(reduction="mustdrop", topology="1e1p1d").resolved()


@pytest.mark.parametrize("topology", ["1epd", "1e2pd"])
def test_where_one_worker_does_both_it_is_answered(
    topology: str, pipeline: ColocatedPipeline, clip: Path, questions: list[str]
) -> None:
    asked = pipeline.ask([clip], questions[0], num_frames=NUM_FRAMES, reduction=POLICY, max_tokens=10)

    async def run() -> None:
        async with deployed(embedded_model_path(), topology) as deployment:
            answer = await deployment.ask(Question((clip,), questions[0]), reduction=POLICY)
            assert answer.tokens == asked.token_ids
            await deployment.settle()

    asyncio.run(run())


def test_an_answer_in_its_middle_is_not_moved_away(
    model: Any, pipeline: ColocatedPipeline, encoded: EncodedMedia, questions: list[str]
) -> None:
    engine = Engines(model, pipeline).engine()

    def is_movable(policy: ReductionPolicy) -> bool:
        prompt = prompt_of(pipeline, encoded, questions[0], policy)
        engine.add(prompt.request(policy.method))
        for group in prompt.groups:
            engine.add_embeddings(policy.method, group)
        while not any(output.request_id == policy.method for output in engine.step().outputs):
            engine.check_integrity()
        choice = engine.detach(policy.method)
        if choice is not None:
            engine.attach(choice)
        return choice is not None

    assert not is_movable(POLICY)
    assert is_movable(ReductionPolicy("fastkv", 0.2))
