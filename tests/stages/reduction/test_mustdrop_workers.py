"""A question's own choice of what it reads stays with one worker; where two would share it, it is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from epd.errors import RequestError, http_status
from epd.models import embedded_model_path
from epd.reduction import METHODS, QUESTION_METHODS, ReductionPolicy
from serve_app.app_args import AppArgs
from stages.colocated import ColocatedPipeline, EncodedMedia
from tests.serve_app.deployments import NUM_FRAMES, Deployment, Question, deployed
from tests.stages.reduction.prompts import Engines, prompt_of

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")

POLICY = ReductionPolicy("mustdrop", 0.2)


async def sent(deployment: Deployment, question: Question, policy: ReductionPolicy) -> list[str]:
    """The kinds of messages that workers get while the question is asked; it has to be refused."""
    messages: list[str] = []
    send = deployment.fleet.send

    async def watched(stage: Any, target: str, message: Any, *bulk: Any) -> Any:
        messages.append(type(message).__name__)
        return await send(stage, target, message, *bulk)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deployment.fleet, "send", watched)
        with pytest.raises(RequestError, match=r"received .*'mustdrop'.*; allowed .*; use one") as refused:
            await deployment.ask(question, reduction=policy)
    assert http_status(refused.value) == 400
    for method in METHODS:
        assert (f" {method}" in str(refused.value)) == (method not in QUESTION_METHODS)
    return messages


@pytest.mark.parametrize("topology", ["1e1p1d", "1ep1d", "1e1pd1p1d"])
def test_where_another_worker_decodes_it_is_refused_before_anything_is_done(
    topology: str, clip: Path, questions: list[str]
) -> None:
    async def run() -> None:
        async with deployed(embedded_model_path(), topology) as deployment:
            question = Question((clip,), questions[0])
            assert await sent(deployment, question, POLICY) == []
            assert (await deployment.ask(question, reduction=ReductionPolicy("mustdrop", 1.0))).tokens
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
