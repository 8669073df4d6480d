"""Answers held to a grammar: the tokens of `generate` under the same masks, in any batch, split and order."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor

from epd.errors import RequestError
from epd.kv.drafting import DraftConfig
from epd.kv.pass_limits import SchedulerConfig
from epd.sampling_params import SamplingParams
from epd.stages.engine.generation import GenerationSettings
from epd.stages.engine.model_runner import ModelRunner
from epd.stages.engine.packed_pass import PackedPass
from epd.stages.grammar.matcher import GrammarBuilder, TokenMatcher
from tests.stages.conftest import Subject
from tests.stages.grammar.formats import SHAPE, WORDS, regex
from tests.stages.prompts import Drive
from tests.stages.test_moving import run_moving
from tests.stages.test_split_stages import Deployment
from tests.tiny_models import load_reference

EOS_IDS = frozenset([467, 468])
GRAMMARS = (SHAPE, WORDS, regex("(yes|no){3,9}"))
GREEDY = SamplingParams(max_tokens=40, grammar=WORDS)
DRAWN = SamplingParams(
    max_tokens=40,
    temperature=1.5,
    top_p=0.98,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    min_tokens=6,
    logprobs=2,
    grammar=SHAPE,
)

# Its rows without a choice are not sampled.
UNREPORTED = replace(DRAWN, logprobs=None)


@pytest.fixture(scope="module")
def shapes(subjects: Callable[[str], Subject]) -> Subject:
    """The embedded model, with its end tokens."""
    return replace(subjects("shapes-vl"), settings=GenerationSettings(EOS_IDS))


@pytest.fixture(scope="module")
def reference(checkpoints: dict[str, Path]) -> Any:
    """The same model with the attention of transformers: an engine on other modules replaces it."""
    return load_reference(checkpoints["shapes-vl"])


class _Masked(LogitsProcessor):  # type: ignore[misc]
    """Rules out by the same library, one call for each token."""

    def __init__(self, matcher: TokenMatcher, num_prompt: int) -> None:
        self.matcher, self.num_taken = matcher, num_prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        for token_id in input_ids[0, self.num_taken :].tolist():
            self.matcher.append(token_id)
        self.num_taken = input_ids.shape[1]
        bits = np.frombuffer(self.matcher.mask(), np.uint8)
        unpacked = np.unpackbits(bits, count=scores.shape[1], bitorder="little")
        allowed = torch.from_numpy(unpacked.view(np.bool_))
        return scores.masked_fill(~allowed, -torch.inf)


@torch.inference_mode()
def generated(subject: Subject, reference: Any, grammar: str) -> tuple[int, ...]:
    """What transformers answers to the prompt without media."""
    plan = subject.prompts[0].plan
    matcher = GrammarBuilder(subject.adapter.tokenizer, EOS_IDS).matcher(grammar)
    assert matcher is not None
    sequences = reference.generate(
        input_ids=torch.from_numpy(plan.token_ids)[None],
        attention_mask=torch.ones(1, len(plan), dtype=torch.int64),
        max_new_tokens=GREEDY.max_tokens,
        do_sample=False,
        eos_token_id=sorted(EOS_IDS),
        logits_processor=[_Masked(matcher, len(plan))],
    )
    return tuple(sequences[0, len(plan) :].tolist())


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_tokens_equal_those_of_generate_under_the_same_masks(
    shapes: Subject, reference: Any, grammar: str
) -> None:
    expected = generated(shapes, reference, grammar)
    sampling = replace(GREEDY, grammar=grammar)
    tokens = Drive(shapes.engine(), seed=0).run({"r": shapes.prompts[0]}, sampling=sampling)
    assert tokens == {"r": expected}
    assert len(expected) > 2


def answers(subject: Subject, sampling: SamplingParams, **options: Any) -> dict[str, tuple[int, ...]]:
    return Drive(subject.engine(**options), seed=4).run(subject.mix(8), sampling=sampling, seed=3)


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN, UNREPORTED], ids=["greedy", "drawn", "unreported"])
def test_passes_that_are_launched_ahead_change_no_token(
    shapes: Subject,
    sampling: SamplingParams,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG", "epd.stages.engine.run_ahead")
    expected, unread = answers(shapes, sampling), list[bool]()
    run = ModelRunner.run_ahead

    def running(runner: ModelRunner, packed: PackedPass, visual: Any, tokens: Tensor | None) -> Tensor:
        unread.append(tokens is not None)
        return run(runner, packed, visual, tokens)

    monkeypatch.setattr(ModelRunner, "run_ahead", running)
    assert answers(shapes, sampling, async_scheduling=True) == expected
    assert unread.count(True) > 5
    assert "could not run ahead" not in caplog.text


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_batches_chunks_drafts_and_preemption_change_no_token(
    shapes: Subject, sampling: SamplingParams
) -> None:
    alone = {
        name: Drive(shapes.engine(), seed=0).run({name: prompt}, sampling=sampling, seed=3)[name]
        for name, prompt in shapes.mix(8).items()
    }
    assert answers(shapes, sampling) == alone
    assert answers(shapes, sampling, config=SchedulerConfig(max_chunk_tokens=5)) == alone
    for method in (DraftConfig("prompt-lookup", 6), DraftConfig("recycling", 3), DraftConfig("auto", 4)):
        assert answers(shapes, sampling, drafting=method) == alone
    engine = shapes.engine(num_kv_tokens=512)
    assert Drive(engine, seed=4).run(shapes.mix(8), sampling=sampling, seed=3) == alone
    assert engine.scheduler.num_preempted > 0


def test_rows_without_a_choice_have_the_tokens_of_masks(shapes: Subject) -> None:
    reported = answers(shapes, DRAWN)
    assert answers(shapes, UNREPORTED) == reported
    drafting = DraftConfig("prompt-lookup", 6)
    assert answers(shapes, UNREPORTED, drafting=drafting, num_kv_tokens=512) == reported


def test_each_of_several_answers_follows_the_grammar(shapes: Subject) -> None:
    drive = Drive(shapes.engine(), seed=0)
    drive.run({"r": shapes.prompts[1]}, sampling=replace(DRAWN, n=3), seed=1)
    texts = ["".join(each.text for each in outputs) for outputs in drive.outputs.values()]
    assert len(set(texts)) > 1
    assert all(re.fullmatch(r'\{"shape":"(circle|square)","count":-?\d+\}?', text) for text in texts)


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_an_answer_handed_over_and_moved_goes_on_with_the_same_tokens(
    shapes: Subject, sampling: SamplingParams
) -> None:
    prompts = shapes.mix(6)
    expected = Drive(shapes.engine(), seed=0).run(prompts, sampling=sampling, seed=3)
    assert Deployment(shapes, 1, random.Random(0)).run(prompts, sampling) == expected
    deployment = Deployment(shapes, 3, random.Random(1))
    assert run_moving(deployment, prompts, sampling) > 5
    assert {name: deployment.tokens(name) for name in prompts} == expected


def test_the_least_length_yields_where_the_grammar_allows_only_the_end(shapes: Subject) -> None:
    sampling = SamplingParams(max_tokens=30, min_tokens=20, grammar=regex("yes"))
    drive = Drive(shapes.engine(), seed=0)
    drive.run({"r": shapes.prompts[0]}, sampling=sampling)
    (outputs,) = drive.outputs.values()
    assert "".join(each.text for each in outputs) == "yes"


@pytest.mark.parametrize("max_tokens", [20, 30])
def test_an_answer_ends_once_its_format_is_complete_whatever_its_least_length(
    shapes: Subject, max_tokens: int
) -> None:
    """End tokens came up to the least length, and "length" was the reason if that was the greatest too."""
    free = SamplingParams(max_tokens=max_tokens, grammar=regex("yes"))
    expected = Drive(shapes.engine(), seed=0).run({"r": shapes.prompts[0]}, sampling=free)
    drive = Drive(shapes.engine(), seed=0)
    assert drive.run({"r": shapes.prompts[0]}, sampling=replace(free, min_tokens=20)) == expected
    (outputs,) = drive.outputs.values()
    assert outputs[-1].finish_reason == "stop"
    assert [each.token.token_id in EOS_IDS for each in outputs] == [*[False] * (len(outputs) - 1), True]


def test_a_grammar_that_cannot_be_built_ends_its_request_alone(shapes: Subject, reference: Any) -> None:
    engine = shapes.engine()
    drive = Drive(engine, seed=0)
    hostile = [f"bad{number}" for number in range(20)]  # more than a worker forgives of its own bugs
    for name in hostile:
        engine.add(shapes.prompts[0].request(name, sampling=replace(GREEDY, grammar=regex("(a"))))
    engine.add(shapes.prompts[0].request("good", sampling=GREEDY))
    faults = []
    while engine.has_work():
        result = engine.step()
        faults += result.faults
        for output in result.outputs:
            drive.outputs.setdefault((output.request_id, 0), []).append(output)
    assert sorted(each.request_id for each in faults) == sorted(hostile)
    assert all(isinstance(each.error, RequestError) for each in faults)
    assert drive.tokens("good") == generated(shapes, reference, WORDS)


def test_the_prompt_is_computed_while_the_grammar_is_built(
    shapes: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing waits in the engine for a grammar: the prompt is computed but for its last token."""
    is_built = False
    monkeypatch.setattr(TokenMatcher, "is_ready", property(lambda _: is_built))
    engine = shapes.engine()
    engine.add(shapes.prompts[0].request("r", sampling=GREEDY))
    for _ in range(5):
        assert not engine.step().outputs
        engine.check_integrity()
    assert engine.kv.num_tokens("r") == len(shapes.prompts[0].plan) - 1
    is_built = True
    assert engine.step().outputs
