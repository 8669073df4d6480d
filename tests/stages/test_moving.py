"""Answers moved between decode workers in their middle: the same tokens, whoever is lost meanwhile."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from epd.kv.scheduled_request import KeptPrompts
from epd.sampling_params import SamplingParams
from epd.stages.decode import DecodeStage
from tests.stages.conftest import Subject
from tests.stages.prompts import MAX_TOKENS, Prompt
from tests.stages.test_split_stages import Deployment

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")

# What depends on the tokens before: draws, penalties, the end that may not come yet, text that is held back.
DRAWN = SamplingParams(
    max_tokens=MAX_TOKENS,
    temperature=0.8,
    repetition_penalty=1.3,
    presence_penalty=0.5,
    min_tokens=4,
    logprobs=2,
    stop=("no such text",),
)
GREEDY = SamplingParams(max_tokens=MAX_TOKENS)
# Of three answers to one prompt, some end sooner than others, the first one too.
OF_SEVERAL_LENGTHS = replace(DRAWN, n=3, min_tokens=1, stop_token_ids=tuple(range(3, 400, 16)))


def move(deployment: Deployment, name: str, target: str, sampling: SamplingParams = GREEDY) -> bool:
    """Begins a move, as a router would; False, and the request goes on, if it cannot be."""
    source = deployment.decode[deployment.placed[name]]
    paused = source.moving.pause(name)
    if paused is None:
        return False
    sender, (identity, room) = deployment.placed[name], paused
    dropped = deployment.num_dropped.get(name, 0)
    ticket = deployment.decode[target].reserve(name, sender, identity, sampling, dropped, room)
    if ticket is None:
        source.moving.resume(name)
        return False
    assert source.moving.move(name, ticket)
    deployment.placed[name] = target
    return True


def is_decoding(stage: DecodeStage, name: str) -> bool:
    return any(each.request_id == name and each.is_decoding for each in stage.engine.scheduler.running)


def run_moving(deployment: Deployment, prompts: dict[str, Prompt], sampling: SamplingParams) -> int:
    """Runs all to their end while they are moved at random. Returns how often one was."""
    for name, prompt in prompts.items():
        assert deployment.submit(name, prompt, sampling)
        for group in prompt.groups:
            deployment.prefill.engine.add_embeddings(name, group)
    num_moved = 0
    for _ in range(400):
        deployment.step()
        for name in prompts:
            other = deployment.rng.choice(sorted(deployment.decode.keys() - {deployment.placed[name]}))
            if deployment.rng.random() < 0.3:
                num_moved += move(deployment, name, other, sampling)
        if all(deployment.is_over(name, sampling.n) for name in prompts):
            break
    deployment.settle()
    return num_moved


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_moved_answer_goes_on_with_the_same_tokens(a_family: Subject, sampling: SamplingParams) -> None:
    prompts = a_family.mix(8)
    expected = Deployment(a_family, 1, random.Random(0)).run(prompts, sampling)
    deployment = Deployment(a_family, 3, random.Random(1))
    assert run_moving(deployment, prompts, sampling) > 10
    assert {name: deployment.tokens(name) for name in prompts} == expected


@pytest.mark.parametrize("kv_tokens", [4096, 512])
@pytest.mark.parametrize(
    "sampling",
    [OF_SEVERAL_LENGTHS, replace(DRAWN, n=3), replace(GREEDY, n=2)],
    ids=["lengths", "drawn", "greedy"],
)
def test_several_answers_to_one_prompt_are_moved_together(
    a_family: Subject, sampling: SamplingParams, kv_tokens: int
) -> None:
    prompts = a_family.mix(6)
    expected = Deployment(a_family, 1, random.Random(0)).run(prompts, sampling)
    deployment = Deployment(a_family, 3, random.Random(1), decode_kv_tokens=kv_tokens)
    assert run_moving(deployment, prompts, sampling) > 10
    assert {name: deployment.tokens(name) for name in prompts} == expected
    if sampling is OF_SEVERAL_LENGTHS:
        lengths = {key: len(outputs) for key, outputs in deployment.outputs.items()}
        assert any(lengths[name, 0] < max(lengths[name, 1], lengths[name, 2]) for name in prompts)


@pytest.mark.parametrize("name", ["qwen3_5", "gemma3"])
def test_several_answers_begin_elsewhere_with_the_state_or_window_of_their_prompt(
    name: str, subjects: Callable[[str], Subject]
) -> None:
    subject = subjects(name)
    prompts, sampling = subject.mix(4), replace(OF_SEVERAL_LENGTHS, max_tokens=40)
    expected = Deployment(subject, 1, random.Random(0)).run(prompts, sampling)
    deployment = Deployment(subject, 3, random.Random(1), decode_kv_tokens=768)
    assert run_moving(deployment, prompts, sampling) > 5
    assert {name: deployment.tokens(name) for name in prompts} == expected


def test_what_would_move_gives_way_to_answers_that_grow(
    subjects: Callable[[str], Subject], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stay then, with their tokens."""
    subject, sampling = subjects("qwen3_5"), replace(GREEDY, n=3)
    prompts, give_way, gave_way = subject.mix(4), KeptPrompts.give_way, list[bool]()
    expected = Deployment(subject, 1, random.Random(0)).run(prompts, sampling)
    monkeypatch.setattr(KeptPrompts, "give_way", lambda kept: gave_way.append(give_way(kept)) or gave_way[-1])
    tight = Deployment(subject, 1, random.Random(1), decode_kv_tokens=256)
    assert tight.run(prompts, sampling) == expected
    assert any(gave_way)
    tight.settle()


def test_an_answer_goes_on_where_it_was_if_the_other_worker_is_lost(a_family: Subject) -> None:
    deployment = Deployment(a_family, 1, random.Random(0))
    prompt = a_family.prompts[1]
    begin(deployment, prompt)
    deployment.decode["d1"] = deployment.new_decode("d1")
    assert move(deployment, "r", "d1")
    deployment.hub.disconnect("d1")
    del deployment.decode["d1"]
    for _ in range(3):
        deployment.step()
    assert not deployment.is_over("r")  # nobody goes on with it until the loss is told
    deployment.decode["d0"].moving.drop_receiver("d1")
    for _ in range(20):
        deployment.step()
    assert deployment.tokens("r") == prompt.expected
    deployment.settle()


def test_an_answer_goes_on_where_it_was_if_the_other_worker_does_not_want_it(a_family: Subject) -> None:
    deployment = Deployment(a_family, 2, random.Random(0))
    prompt = a_family.prompts[1]
    begin(deployment, prompt)
    other = {"d0": "d1", "d1": "d0"}[deployment.placed["r"]]
    assert move(deployment, "r", other)
    deployment.decode[other].abort("r")
    for _ in range(20):
        deployment.step()
    assert deployment.tokens("r") == prompt.expected
    deployment.settle()


@pytest.mark.parametrize("steps", range(3))
def test_an_answer_that_is_aborted_while_it_moves_leaves_nothing(a_family: Subject, steps: int) -> None:
    deployment = Deployment(a_family, 2, random.Random(steps))
    begin(deployment, a_family.prompts[2])
    source = deployment.decode[deployment.placed["r"]]
    assert move(deployment, "r", {"d0": "d1", "d1": "d0"}[deployment.placed["r"]])
    for _ in range(steps):
        source.step()
    for stage in deployment.decode.values():
        stage.abort("r")
    deployment.settle()


def test_what_cannot_be_moved_goes_on(a_family: Subject) -> None:
    """A request that is not decoding has nothing to move."""
    deployment = Deployment(a_family, 1, random.Random(0))
    several = SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, n=2)
    assert deployment.submit("r", a_family.prompts[0], several)
    stage = deployment.decode["d0"]
    assert stage.moving.pause("r") is None
    assert stage.moving.pause("unknown") is None
    for _ in range(40):
        deployment.step()
    assert deployment.is_over("r", n=2)
    deployment.settle()


def test_what_decodes_here_is_not_taken_again(a_family: Subject) -> None:
    """A worker that was to give up decoding goes on, after its answers were paused to be moved."""
    deployment = Deployment(a_family, 1, random.Random(0))
    prompt = a_family.prompts[2]
    begin(deployment, prompt)
    stage = deployment.decode["d0"]
    paused = stage.moving.pause("r")
    assert paused is not None
    stage.moving.resume_all()
    assert stage.reserve("r", "d0", paused[0], GREEDY) is None
    for _ in range(40):
        deployment.step()
    assert deployment.tokens("r") == prompt.expected
    deployment.settle()


def begin(deployment: Deployment, prompt: Prompt) -> None:
    """The request "r", up to some tokens of its answer."""
    assert deployment.submit("r", prompt, GREEDY)
    for group in prompt.groups:
        deployment.prefill.engine.add_embeddings("r", group)
    while len(deployment.tokens("r")) < 4:
        deployment.step()
    assert is_decoding(deployment.decode[deployment.placed["r"]], "r")


def test_priority_goes_along(a_family: Subject) -> None:
    """From prefill to decode, and on to another decode worker."""
    deployment = Deployment(a_family, 2, random.Random(0))
    prompt = a_family.prompts[0]
    request = replace(prompt.request("r", sampling=GREEDY), priority=5)
    ticket = deployment.decode["d0"].reserve("r", "p0", request.identity, GREEDY)
    deployment.placed["r"] = "d0"
    deployment.prefill.submit(request, ticket)
    assert [each.priority for each in deployment.prefill.engine.scheduler.waiting] == [5]
    for worker in ("d0", "d1"):
        running = deployment.decode[worker].engine.scheduler.running
        while not running:
            deployment.step()
        assert [each.priority for each in running] == [5]
        if worker == "d0":
            assert move(deployment, "r", "d1")
    for _ in range(20):
        deployment.step()
    assert deployment.tokens("r") == prompt.expected
    deployment.settle()
