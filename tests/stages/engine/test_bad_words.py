"""Answers without bad words: the tokens of `generate`, whatever is drafted, preempted or moved."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from epd.kv.drafting import DraftConfig
from epd.sampling_params import SamplingParams
from epd.stages.engine.generation import GenerationSettings
from epd.stages.sampling.sampling_state import with_bad_tokens
from epd.types import Int64Array
from tests.stages.conftest import Subject
from tests.stages.grammar.formats import regex
from tests.stages.prompts import Drive
from tests.stages.test_moving import run_moving
from tests.stages.test_split_stages import Deployment
from tests.tiny_models import load_reference

NUM_TOKENS = 24


@pytest.fixture(scope="module")
def shapes(subjects: Callable[[str], Subject]) -> Subject:
    return subjects("shapes-vl")


@pytest.fixture(scope="module")
def sampling(shapes: Subject) -> SamplingParams:
    """Greedy, without what answers have that are without the words before: one token, two in a row, more."""
    words: list[tuple[int, ...]] = []
    for length in (1, 2, 3, 1, 2, 4):
        answers = Drive(shapes.engine(), seed=0).run(shapes.mix(5), sampling=without(words))
        words += [answer[length : 2 * length] for answer in answers.values()]
    assert {1, 2, 3, 4} == {len(word) for word in words}
    return without(words)


def without(words: Sequence[tuple[int, ...]], **options: Any) -> SamplingParams:
    return SamplingParams(
        max_tokens=NUM_TOKENS, bad_words=("as tokens",), bad_token_ids=tuple(words), **options
    )


@torch.inference_mode()
def generated(subject: Subject, path: Path, sampling: SamplingParams) -> tuple[int, ...]:
    """What transformers answers to the prompt without media."""
    plan = subject.prompts[0].plan
    model: Any = load_reference(path)
    sequences = model.generate(
        input_ids=torch.from_numpy(plan.token_ids)[None],
        attention_mask=torch.ones(1, len(plan), dtype=torch.int64),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=[],
        bad_words_ids=[list(word) for word in sampling.bad_token_ids or ()],
    )
    return tuple(sequences[0, len(plan) :].tolist())


def test_tokens_equal_those_of_generate(
    shapes: Subject, sampling: SamplingParams, checkpoints: dict[str, Path]
) -> None:
    prompts = {"r": shapes.prompts[0]}
    answer = Drive(shapes.engine(), seed=0).run(prompts, sampling=sampling)["r"]
    assert answer == generated(shapes, checkpoints["shapes-vl"], sampling)
    free = SamplingParams(max_tokens=NUM_TOKENS)
    assert answer != Drive(shapes.engine(), seed=0).run(prompts, sampling=free)["r"]


class KnownAnswers:
    """Proposes three tokens that come next in the answer, and one that does not."""

    def __init__(self, answers: Iterable[tuple[int, ...]]) -> None:
        self._answers = list(answers)

    def propose(self, token_ids: Int64Array, room: int, num_sequences: int) -> list[int]:  # noqa: ARG002
        known = tuple(token_ids.tolist())
        begun = [
            (num, answer)
            for answer in self._answers
            for num in range(1, NUM_TOKENS)
            if known[-num:] == answer[:num]
        ]
        num, answer = max(begun, default=(0, self._answers[0]))
        return [*answer[num : num + 3], 3][:room]

    def learn(self, *_: object) -> None: ...


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_preemption_and_moves_change_no_token(
    shapes: Subject, sampling: SamplingParams, temperature: float
) -> None:
    sampling = replace(sampling, temperature=temperature)
    prompts = shapes.mix(6)
    expected = Drive(shapes.engine(), seed=0).run(prompts, sampling=sampling, seed=3)
    for answer in expected.values():
        for word in sampling.bad_token_ids or ():
            places = range(len(answer) - len(word) + 1)
            assert all(answer[start : start + len(word)] != word for start in places)
    engine = shapes.engine(drafting=DraftConfig("recycling", 3))
    assert engine._drafting is not None
    engine._drafting.for_sequence = lambda: KnownAnswers(expected.values())  # type: ignore[method-assign]
    assert Drive(engine, seed=4).run(prompts, sampling=sampling, seed=3) == expected
    assert engine.counts.num_drafted_tokens > engine.counts.num_accepted_tokens > NUM_TOKENS
    longest = max(len(prompt.plan) for prompt in prompts.values())
    engine = shapes.engine(num_kv_tokens=longest + 2 * NUM_TOKENS, block_size=4)
    assert Drive(engine, seed=4).run(prompts, sampling=sampling, seed=3) == expected
    assert engine.scheduler.num_preempted > 0
    deployment = Deployment(shapes, 3, random.Random(1))
    assert run_moving(deployment, prompts, sampling) > 5
    if temperature == 0:
        assert {name: deployment.tokens(name) for name in prompts} == expected


def test_a_format_is_followed_without_the_words(shapes: Subject) -> None:
    held = replace(shapes, settings=GenerationSettings(frozenset([467, 468])))
    params = SamplingParams(max_tokens=30, grammar=regex("(yes|no|maybe){2}"))
    texts = []
    for words in ((), ("no",), ("no", "maybe"), ("yes", "no", "maybe")):
        drive, asked = Drive(held.engine(), seed=0), replace(params, bad_words=words)
        drive.run({"r": held.prompts[0]}, sampling=with_bad_tokens(asked, held.adapter.tokenizer))
        (outputs,) = drive.outputs.values()
        texts.append("".join(each.text for each in outputs))
    assert all(re.fullmatch("(yes|no|maybe){2}", text) for text in texts)
    assert texts[0] == "nono"
    assert "no" not in texts[1]
    assert texts[2] == "yesyes"


def test_words_without_tokens_are_a_bug_of_the_caller(shapes: Subject) -> None:
    request = shapes.prompts[0].request("r")
    with pytest.raises(ValueError, match="bad words"):
        replace(request, sampling=SamplingParams(max_tokens=2, bad_words=("red",)))
