"""Prefill and decode on workers of their own: the same tokens, and nothing lost when one of them goes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from epd.kv.pass_limits import SchedulerConfig
from epd.kv.prefix_cache import token_identity
from epd.sampling_params import SamplingParams
from epd.stages.connectors.mailbox import InProcessHub
from epd.stages.decode import DecodeStage
from epd.stages.prefill import PrefillStage
from epd.transfer.connectors import TransferOutcome
from tests.stages.conftest import Subject
from tests.stages.split_deployment import GREEDY, Deployment, feed

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")


@pytest.mark.parametrize("num_decode", [1, 3])
@pytest.mark.parametrize("count", [1, 10])
def test_tokens_equal_generate(any_family: Subject, num_decode: int, count: int) -> None:
    deployment = Deployment(any_family, num_decode, random.Random(num_decode * 100 + count))
    prompts = any_family.mix(count)
    assert deployment.run(prompts, GREEDY) == {name: prompt.expected for name, prompt in prompts.items()}
    deployment.settle()


def test_decode_without_room_refuses_and_gives_way(a_family: Subject) -> None:
    longest = max(len(prompt.plan) for prompt in a_family.prompts)
    room = 2 * (longest + 16)
    deployment = Deployment(a_family, 2, random.Random(0), decode_kv_tokens=room)
    prompts = a_family.mix(12)
    assert deployment.run(prompts, GREEDY) == {name: prompt.expected for name, prompt in prompts.items()}
    assert deployment.num_refused > 0
    deployment.settle()


def test_several_answers_are_split_after_the_hand_over(a_family: Subject) -> None:
    sampling = SamplingParams(max_tokens=8, temperature=1.0, n=3)
    prompts = a_family.mix(4)
    split = Deployment(a_family, 2, random.Random(1)).run(prompts, sampling)
    for name, prompt in prompts.items():
        alone = Deployment(a_family, 1, random.Random(2)).run({name: prompt}, sampling)
        assert split[name] == alone[name]


def test_an_answer_of_one_token_needs_no_decode(a_family: Subject) -> None:
    deployment = Deployment(a_family, 1, random.Random(0))
    prompts = a_family.mix(3)
    tokens = deployment.run(prompts, SamplingParams(max_tokens=1))
    assert tokens == {name: prompt.expected[:1] for name, prompt in prompts.items()}
    deployment.settle()
    assert deployment.decode["d0"].engine.counts.num_steps == 0
    assert deployment.decode["d0"].fail_sender("p0") == [], "nothing is kept of what needs no decode"


def test_decode_seats_are_taken_by_answers_not_by_requests(a_family: Subject) -> None:
    hub = InProcessHub()
    engine = a_family.engine(config=SchedulerConfig(max_num_seqs=4))
    stage = DecodeStage(engine, hub.connect("d0", engine.pools))

    def reserve(name: str, n: int) -> bool:
        identity = token_identity([1, 2, 3])
        return stage.reserve(name, "p0", identity, SamplingParams(n=n, max_tokens=4)) is not None

    assert reserve("alone", 128), "one with more answers than there are seats decodes by itself"
    assert not reserve("beside", 1)
    stage.abort("alone")
    assert reserve("three", 3)
    assert not reserve("two", 2)
    assert reserve("one", 1)
    assert not reserve("last", 1)
    assert stage.num_seqs == 4
    stage.abort("three")
    assert reserve("two", 2)
    stage.check_integrity()


def test_keys_and_values_go_out_while_prefill_goes_on(a_family: Subject) -> None:
    deployment = Deployment(a_family, 1, random.Random(0), chunk=8)
    prompt = a_family.prompts[1]
    assert deployment.submit("r", prompt, GREEDY)
    for group in prompt.groups:
        deployment.prefill.engine.add_embeddings("r", group)
    missing = []
    while not deployment.tokens("r"):
        missing.append(deployment.decode["d0"].reception.num_missing("r"))
        deployment.step()
    assert len(missing) == -(-len(prompt.plan) // 8)
    assert missing == [len(prompt.plan) - 8 * i for i in range(len(missing))]


def test_blocks_that_are_being_read_are_not_taken_away(a_family: Subject) -> None:
    """Merged and split requests on one worker: growing answers must not take what is still to be copied."""
    deployment = Deployment(a_family, 1, random.Random(0), chunk=8)
    split, merged = a_family.prompts[2], a_family.prompts[0]
    config = SchedulerConfig(max_chunk_tokens=8)
    num_kv_tokens = len(merged.plan) + len(split.plan) + 8
    engine = a_family.engine(config=config, num_kv_tokens=num_kv_tokens, block_size=4)
    deployment.prefill = PrefillStage(engine, deployment.hub.connect("p0", engine.pools))
    deployment.prefill.submit(merged.request("merged"))
    while not deployment.tokens("merged"):
        deployment.take(deployment.prefill.step())
    assert deployment.submit("split", split, GREEDY)
    for group in split.groups:
        deployment.prefill.engine.add_embeddings("split", group)
    for _ in range(12):  # the decode worker does not read its mail meanwhile
        deployment.take(deployment.prefill.step())
    for _ in range(40):
        deployment.step()
    assert deployment.tokens("split") == split.expected
    assert deployment.tokens("merged") == merged.expected
    deployment.settle()


@pytest.mark.parametrize("steps", range(0, 12, 2))
def test_a_lost_decode_worker_costs_no_prefill(a_family: Subject, steps: int) -> None:
    """Requests on their way go to the other; those that decoded already are prefilled again by the router."""
    deployment = Deployment(a_family, 2, random.Random(steps), chunk=16)
    prompts = a_family.mix(5)
    feed(deployment, prompts)
    for _ in range(steps):
        deployment.step()
    computed = deployment.prefill.engine.counts.num_computed_tokens
    deployment.hub.disconnect("d0")
    del deployment.decode["d0"]
    lost = deployment.prefill.drop_receiver("d0")
    for name in lost:
        request = prompts[name].request(name)
        ticket = deployment.decode["d1"].reserve(name, "p0", request.identity, GREEDY)
        assert ticket is not None
        deployment.placed[name] = "d1"
        deployment.prefill.redirect(name, ticket)
    on_time = [name for name in prompts if deployment.placed[name] == "d1"]
    for _ in range(100):
        deployment.step()
    assert {name: deployment.tokens(name) for name in on_time} == {
        name: prompts[name].expected for name in on_time
    }
    rest = sum(len(prompt.plan) for prompt in prompts.values()) - computed
    assert deployment.prefill.engine.counts.num_computed_tokens - computed <= rest
    deployment.settle()


@pytest.mark.parametrize("steps", range(0, 10, 3))
def test_a_lost_prefill_worker_leaves_nothing_behind(a_family: Subject, steps: int) -> None:
    deployment = Deployment(a_family, 1, random.Random(steps), chunk=16)
    feed(deployment, a_family.mix(5))
    for _ in range(steps):
        deployment.step()
    deployment.hub.disconnect("p0")
    stage = deployment.decode["d0"]
    stage.fail_sender("p0")
    for _ in range(60):
        deployment.take(stage.step())
        stage.check_integrity()
    assert not stage.has_work()
    assert stage.engine.kv.usage == 0


def test_what_a_lost_prefill_worker_has_not_sent_is_told_once_its_failure_has_come(a_family: Subject) -> None:
    """Who asks after the loss would take them for requests that are there, and wait for ever."""
    deployment = Deployment(a_family, 1, random.Random(0), chunk=16)
    feed(deployment, a_family.mix(5))
    deployment.step()
    deployment.prefill.step()
    stage = deployment.decode["d0"]
    arriving = set(stage.arriving)
    deployment.hub.disconnect("p0")
    failed = {end.request_id for end in stage.step().handovers if end.outcome is TransferOutcome.FAILED}
    assert failed
    assert set(stage.fail_sender("p0")) == arriving >= failed
    assert stage.fail_sender("p0") == []


@pytest.mark.parametrize("steps", range(0, 12, 3))
def test_abort_at_any_point_frees_both_sides(a_family: Subject, steps: int) -> None:
    deployment = Deployment(a_family, 2, random.Random(steps), chunk=16)
    prompts = a_family.mix(5)
    feed(deployment, prompts)
    for _ in range(steps):
        deployment.step()
    for name in prompts:
        deployment.prefill.abort(name)
        for stage in deployment.decode.values():
            stage.abort(name)
    deployment.settle()


def test_a_hand_over_that_fails_is_told(a_family: Subject) -> None:
    deployment = Deployment(a_family, 1, random.Random(0))
    prompts = {"r": a_family.prompts[0]}
    feed(deployment, prompts)
    deployment.decode["d0"].abort("r")
    ends: Sequence[object] = ()
    for _ in range(4):
        result = deployment.prefill.step()
        ends = [*ends, *((end.request_id, end.outcome) for end in result.handovers)]
        deployment.decode["d0"].step()
    assert ends == [("r", TransferOutcome.CANCELLED)]
    deployment.prefill.abort("r")
    deployment.settle()
