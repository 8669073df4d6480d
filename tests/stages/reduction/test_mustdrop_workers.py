"""A question's own choice of what is kept: held, sent, moved and preempted like any other prompt."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from epd.encoders import FrameSampling
from epd.encoders.groups import prompt_identity
from epd.encoders.reduction import reduce_prompt
from epd.kv.pass_limits import SchedulerConfig
from epd.models import embedded_model_path
from epd.reduction import ReductionPolicy
from epd.sampling_params import SamplingParams
from epd.stages.engine.engine import LanguageEngine
from epd.types import ceil_div
from tests.colocated import ColocatedPipeline, EncodedMedia, plan_media
from tests.serve_app.deployments import LETTERS, NUM_FRAMES, Deployment, Question, deployed, until_decoding
from tests.serve_app.server import served, wait_until
from tests.stages import test_split_stages
from tests.stages.prompts import Prompt
from tests.stages.reduction.prompts import DRAWN, Engines, answered_alone, drive, expected, prompt_of
from tests.stages.test_moving import run_moving

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")

POLICY = ReductionPolicy("mustdrop", 0.25)
BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def prompts(
    pipeline: ColocatedPipeline, engines: Engines, short: EncodedMedia, questions: list[str]
) -> dict[str, Prompt]:
    """Questions that drop tokens, and two that do not."""
    dropping = answered_alone(engines, pipeline, short, questions, {"mustdrop": POLICY})
    return dropping | answered_alone(engines, pipeline, short, questions[:2], {"whole": ReductionPolicy()})


@pytest.fixture(scope="module")
def long(pipeline: ColocatedPipeline, encoded: EncodedMedia, questions: list[str]) -> Prompt:
    return prompt_of(pipeline, encoded, questions[0], POLICY)


def deployment_of(engines: Engines, num_decode: int, seed: int = 1) -> test_split_stages.Deployment:
    return test_split_stages.Deployment(engines, num_decode, random.Random(seed))  # type: ignore[arg-type]


def num_blocks(engine: LanguageEngine, request_id: str) -> int:
    return len(engine.kv.block_table(request_id))


def num_held(prompt: Prompt) -> int:
    """Text, and a quarter of the visual tokens that there would be without reduction."""
    plan = prompt.plan
    return len(plan) - plan.num_visual_tokens + round(POLICY.retention * plan.num_visual_tokens_before)


# What is held


def test_after_the_prompt_the_cache_holds_what_survives_and_no_more(engines: Engines, long: Prompt) -> None:
    engine = engines.engine(block_size=BLOCK_SIZE, enable_prefix_caching=True)
    engine.add(long.request("r"))
    for group in long.groups:
        engine.add_embeddings("r", group)
    while not engine.step().outputs:
        engine.check_integrity()
    engine.check_integrity()
    assert engine.kv.num_tokens("r") == num_held(long)
    assert num_blocks(engine, "r") == ceil_div(num_held(long) + 1, BLOCK_SIZE)
    visual = engine.kv.num_tokens("r") - (len(long.plan) - long.plan.num_visual_tokens)
    assert visual == pytest.approx(0.25 * long.plan.num_visual_tokens_before, rel=0.05)
    assert engine.kv.usage == pytest.approx(num_blocks(engine, "r") / engine.kv.spec.num_blocks[0])
    # What all questions share stays in the prefix cache, for as long as nobody else needs the room.
    assert engine.kv.num_cached(long.request("s").identity) >= long.plan.prefix_length


def test_both_workers_hold_and_send_survivors_alone(engines: Engines, long: Prompt) -> None:
    deployment = deployment_of(engines, 1)
    sent: list[int] = []
    decode = deployment.decode["d0"].engine
    receive = decode.pools.receive

    def watched(ticket: object, source: object, pools: object) -> None:
        sent.extend(span.stop - span.start for span in source.spans)  # type: ignore[attr-defined]
        receive(ticket, source, pools)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode.pools, "receive", watched)
        assert deployment.submit("r", long, DRAWN)
        assert num_blocks(decode, "r") == ceil_div(num_held(long) + 1, decode.kv.block_size)
        for group in long.groups:
            deployment.prefill.engine.add_embeddings("r", group)
        while not (result := deployment.prefill.step()).prefilled:
            deployment.decode["d0"].step()  # reads what it is offered
            assert not sent
        deployment.take(result)
        prefill = deployment.prefill.engine
        assert num_blocks(prefill, "r") == ceil_div(num_held(long) + 1, prefill.kv.block_size)
        deployment.step()
        deployment.step()
    assert sum(sent) == num_held(long)
    (running,) = decode.scheduler.running
    assert running.num_held == num_held(long) + 2  # and what was answered in two steps
    while not deployment.is_over("r"):
        deployment.step()
    deployment.settle()


def test_four_times_as_many_fit_at_once(
    engines: Engines, pipeline: ColocatedPipeline, clip: Path, questions: list[str]
) -> None:
    """In a decode worker with room for four whole prompts of 320 frames; the text takes as much as ever."""
    planned = plan_media(pipeline.adapter, clip, FrameSampling(num_frames=320)).plan
    whole = pipeline.adapter.plan_prompt([planned], questions[0])
    deployment = deployment_of(engines, 1)
    deployment.decode_kv_tokens = 4 * ceil_div(len(whole) + 1, 16) * 16

    def num_at_once(policy: ReductionPolicy) -> int:
        plan = reduce_prompt(whole, policy)
        stage, identity = deployment.new_decode(f"d-{policy.method}"), prompt_identity(plan, ("clip",))
        sampling, count = SamplingParams(max_tokens=2), 0
        while stage.reserve(f"r{count}", "p0", identity, sampling, plan.num_dropped):
            count += 1
            stage.check_integrity()
        return count

    assert num_at_once(ReductionPolicy()) == 4
    assert num_at_once(POLICY) == 15


def test_a_ticket_of_another_length_is_refused(engines: Engines, long: Prompt) -> None:
    deployment, request = deployment_of(engines, 1), long.request("r")
    ticket = deployment.decode["d0"].reserve("r", "p0", request.identity, DRAWN)
    assert ticket is not None
    with pytest.raises(ValueError, match="num_dropped"):
        deployment.prefill.submit(request, ticket)


# The same tokens


@pytest.mark.parametrize("num_decode", [1, 3])
def test_split_over_workers_gives_the_same_tokens(
    num_decode: int, engines: Engines, prompts: dict[str, Prompt]
) -> None:
    deployment = deployment_of(engines, num_decode)
    assert deployment.run(prompts, DRAWN) == expected(prompts)
    deployment.settle()


def test_answers_are_moved_in_their_middle(engines: Engines, prompts: dict[str, Prompt]) -> None:
    deployment = deployment_of(engines, 3)
    assert run_moving(deployment, prompts, DRAWN) > 5
    assert {name: deployment.tokens(name) for name in prompts} == expected(prompts)


def test_a_decode_worker_too_small_for_all_preempts(engines: Engines, prompts: dict[str, Prompt]) -> None:
    deployment = deployment_of(engines, 0)
    deployment.num_decode = 1
    deployment.decode_kv_tokens = 16 * (2 + max(ceil_div(len(each.plan), 16) for each in prompts.values()))
    deployment.decode = {"d0": deployment.new_decode("d0")}
    several = {f"{name}{turn}": prompt for turn in range(2) for name, prompt in prompts.items()}
    assert deployment.run(several, DRAWN) == expected(several)
    deployment.settle()


@pytest.mark.parametrize("steps", [2, 4, 7])
def test_a_lost_decode_worker_costs_no_prefill(
    steps: int, engines: Engines, prompts: dict[str, Prompt]
) -> None:
    deployment = deployment_of(engines, 2, steps)
    for name, prompt in prompts.items():
        assert deployment.submit(name, prompt, DRAWN)
        for group in prompt.groups:
            deployment.prefill.engine.add_embeddings(name, group)
    for _ in range(steps):
        deployment.step()
    deployment.hub.disconnect("d0")
    del deployment.decode["d0"]
    for name in deployment.prefill.drop_receiver("d0"):
        request, dropped = prompts[name].request(name), prompts[name].plan.num_dropped
        ticket = deployment.decode["d1"].reserve(name, "p0", request.identity, DRAWN, dropped)
        assert ticket is not None
        deployment.placed[name] = "d1"
        deployment.prefill.redirect(name, ticket)
    for _ in range(60):
        deployment.step()
    on_time = [name for name, worker in deployment.placed.items() if worker == "d1"]
    assert on_time
    assert {name: deployment.tokens(name) for name in on_time} == {
        name: prompts[name].expected for name in on_time
    }
    deployment.settle()


@pytest.mark.parametrize("mode", ["recompute", "offload"])
def test_several_answers_share_what_is_kept(mode: str, engines: Engines, prompts: dict[str, Prompt]) -> None:
    some = {name: prompt for name, prompt in prompts.items() if name.startswith("mustdrop")}
    alone = {name: drive(engines.engine(), 0, {name: prompt}, n=3)[name] for name, prompt in some.items()}
    assert all(alone[name][: len(prompt.expected)] == prompt.expected for name, prompt in some.items())
    config = SchedulerConfig(preemption=mode)  # type: ignore[arg-type]
    room = 4 * ceil_div(max(len(prompt.plan) + 2 * num_held(prompt) for prompt in some.values()) + 32, 4)
    num_preempted = 0
    for seed in range(3):
        engine = engines.engine(config=config, block_size=4, num_kv_tokens=room, enable_prefix_caching=False)
        assert drive(engine, seed, some, n=3) == alone
        assert engine.kv.usage == 0
        num_preempted += engine.scheduler.num_preempted
    assert num_preempted


# Through the application


def ask_over_http(url: str, clip: Path, text: str, policy: ReductionPolicy) -> httpx.Response:
    parts = [{"type": "video_url", "video_url": {"url": clip.as_uri()}}, {"type": "text", "text": text}]
    body = {
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": 4,
        "epd": {"reduction": policy.method, "retention": policy.retention, "num_frames": NUM_FRAMES},
    }
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=250, trust_env=False, verify=False)


def test_it_is_answered_over_http_where_another_worker_decodes(clip: Path, questions: list[str]) -> None:
    deployment = Deployment(embedded_model_path(), "1e1p1d", {})
    with served(deployment.service, running=deployment.running()) as server:
        answered = ask_over_http(server.url, clip, questions[0], POLICY)
        assert answered.status_code == 200, answered.text
        wait_until(lambda: not deployment.leftovers())


@pytest.mark.parametrize("method", ["mustdrop", "fastkv", "quickprefill"])
def test_it_answers_the_same_in_every_topology(
    method: str, pipeline: ColocatedPipeline, clip: Path, questions: list[str]
) -> None:
    policy = replace(POLICY, method=method)
    asked = [
        pipeline.ask([clip], text, num_frames=NUM_FRAMES, reduction=policy, max_tokens=10).token_ids
        for text in questions[:2]
    ]

    async def run(topology: str) -> None:
        async with deployed(embedded_model_path(), topology) as deployment:
            answers = await asyncio.gather(
                *(deployment.ask(Question((clip,), text), reduction=policy) for text in questions[:2])
            )
            assert [answer.tokens for answer in answers] == asked, topology
            await deployment.settle()

    for topology in ("1epd", "1e2pd", "1e1p1d", "1ep1d", "1e1pd1p1d"):
        asyncio.run(run(topology))


def test_a_switch_in_the_middle_of_answers_changes_no_token(clip: Path, questions: list[str]) -> None:
    sampling = SamplingParams(max_tokens=100, ignore_eos=True)
    some = [Question((clip,), text, sampling) for text in questions[:3]]

    async def run(topology: str, *, is_switched: bool) -> list[tuple[int, ...]]:
        async with deployed(embedded_model_path(), topology) as deployment:
            deployment.held.is_on = is_switched
            asking = [asyncio.create_task(deployment.ask(each, reduction=POLICY)) for each in some]
            if is_switched:
                await until_decoding(deployment, "d0", 1)
                switch = await deployment.service.switch_roles("d0", frozenset({LETTERS["e"]}))
                assert switch.num_moved > 0
                deployment.held.is_on = False
            answers = [(await each).tokens for each in asking]
            await deployment.settle()
            return answers

    alone = asyncio.run(run("1epd", is_switched=False))
    assert asyncio.run(run("1e1p2d", is_switched=True)) == alone
