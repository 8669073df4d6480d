"""Decodes that run ahead of what the host has read give the tokens of those that do not."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from epd.encoders.device import HostCopy
from epd.kv.block_pool import BlockPool
from epd.kv.pass_limits import SchedulerConfig
from epd.sampling_params import SamplingParams
from epd.stages.engine.engine import LanguageEngine
from epd.stages.engine.generation import GenerationSettings, TokenOutput
from epd.stages.engine.model_runner import ModelRunner
from epd.stages.engine.packed_pass import GroupKind, PackedPass, Segment, joined_pass, packed_pass
from epd.stages.engine.run_ahead import RunAhead
from epd.stages.engine.sequence import TokenSequence
from epd.stages.sampling import sampler
from epd.types import ceil_div
from tests.stages.conftest import Subject
from tests.stages.grammar.formats import WORDS
from tests.stages.prompts import MAX_TOKENS, Drive

# transformers near 5.17 hands torch tensors to numpy in InternVL's processor, in a way that numpy 2 regrets.
pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")


def ahead(subject: Subject, **options: Any) -> LanguageEngine:
    return subject.engine(async_scheduling=True, **options)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happened: each pass that ran ahead of what was read, each that did not, and each reading.

    A pass with a prompt is noted once more, and so is one that is computed in step.
    """
    noted: list[str] = []
    run, read, in_step = ModelRunner.run_ahead, sampler.TokensAhead.read, ModelRunner.run

    def running(
        runner: ModelRunner, packed: PackedPass, visual: Any, unread: torch.Tensor | None
    ) -> torch.Tensor:
        noted.append("launch" if unread is None else "launch ahead")
        if packed.num_prompt:
            noted.append("prompt beside")
        return run(runner, packed, visual, unread)

    def stepping(runner: ModelRunner, segments: Any) -> torch.Tensor:
        noted.append("in step")
        return in_step(runner, segments)

    def reading(tokens: sampler.TokensAhead) -> tuple[list[sampler.SampledToken], list[bool]]:
        noted.append("read")
        return read(tokens)

    monkeypatch.setattr(ModelRunner, "run_ahead", running)
    monkeypatch.setattr(ModelRunner, "run", stepping)
    monkeypatch.setattr(sampler.TokensAhead, "read", reading)
    return noted


@pytest.mark.parametrize("count", [1, 12])
def test_tokens_equal_generate(any_family: Subject, count: int, events: list[str]) -> None:
    engine = ahead(any_family, config=SchedulerConfig(max_chunk_tokens=24))
    prompts = any_family.mix(count)
    tokens = Drive(engine, seed=count).run(prompts)
    assert tokens == {name: prompt.expected for name, prompt in prompts.items()}
    assert engine.kv.usage == 0
    assert events.count("launch ahead") > MAX_TOKENS // 2


def test_a_pass_is_launched_before_the_one_before_it_is_read(a_family: Subject, events: list[str]) -> None:
    prompt = a_family.prompts[0]
    Drive(ahead(a_family), seed=0).run({"r": prompt})
    num_decodes = len(prompt.expected) - 1
    passes = [event for event in events if event != "in step"]
    assert passes == ["launch", *["launch ahead", "read"] * (num_decodes - 1), "read"]


def test_the_next_pass_is_what_would_be_packed_anew(
    any_family: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever ends, arrives or comes back meanwhile; nothing but the tokens is another."""
    launched, widths, num_beside = RunAhead._launched, set[int](), 0
    wrong: list[AssertionError] = []  # a pass that raises is computed in step

    def checked(
        ahead: RunAhead, batch: Any, packed: PackedPass, unread: torch.Tensor | None, visual: Any = None
    ) -> Any:
        nonlocal num_beside
        pairs = zip(batch.sequences, batch.sampler._nums_unread, strict=True)
        segments = [
            each.segment(start := each.scheduled.num_tokens - 1 + num_unread, start + 1, 1, engine.kv)
            for each, num_unread in pairs
            if each not in batch.ends
        ]
        for chunk in batch.chunks:
            sequence = engine._sequences.of_chunk(chunk)
            segments.append(sequence.segment(chunk.start, chunk.stop, int(sequence in batch.ends), engine.kv))
        try:
            _check_equal(packed, ahead._runner.packed(segments))
        except AssertionError as error:
            wrong.append(error)
        if unread is not None:
            widths.add(len(segments))
            num_beside += bool(batch.chunks)
        return launched(ahead, batch, packed, unread, visual)

    monkeypatch.setattr(RunAhead, "_launched", checked)
    take = BlockPool.take  # blocks that do not follow each other
    monkeypatch.setattr(BlockPool, "take", lambda pool, count, _=None: take(pool, count))
    prompt, engine = any_family.prompts[0], ahead(any_family, block_size=4)
    drive, detached = Drive(engine, seed=2), list[TokenSequence]()
    for count in (MAX_TOKENS, 9, 6, MAX_TOKENS):
        engine.add(
            prompt.request(f"{count}/{len(engine.request_ids)}", sampling=SamplingParams(max_tokens=count))
        )
    while engine.has_work():
        if engine.counts.num_steps == 4:
            engine.add(prompt.request("late"))
            detached = engine.detach(f"{MAX_TOKENS}/0")
        elif detached and engine.counts.num_steps > 5:
            engine.attach(detached)
            detached = []
        for name in engine.request_ids:
            for group in prompt.groups if engine.counts.num_steps in (0, 4) else ():
                engine.add_embeddings(name, group)
        drive.step()
    assert not wrong
    assert num_beside, "a prompt was meant to be beside passes that run ahead"
    assert widths >= {2, 3, 4}, "the next pass was meant to be of all, and of some"
    assert all(drive.tokens(name) == prompt.expected for name in ("late", f"{MAX_TOKENS}/0"))


def _check_equal(packed: PackedPass, anew: PackedPass) -> None:
    """Compares passes but for their tokens; of tables what is read, the blocks of tokens that are known."""
    assert np.array_equal(packed.positions, anew.positions)
    assert np.array_equal(packed.logit_rows, anew.logit_rows)
    assert np.array_equal(packed.visual_rows, anew.visual_rows)
    assert (packed.states, packed.segments, packed.adapters) == (anew.states, anew.segments, anew.adapters)
    assert (packed.num_deepstack, packed.num_prompt) == (anew.num_deepstack, anew.num_prompt)
    for found, expected in zip(packed.batches, anew.batches, strict=True):
        assert np.array_equal(found.query_starts, expected.query_starts)
        assert np.array_equal(found.context_lens, expected.context_lens)
        assert np.array_equal(found.slot_mapping, expected.slot_mapping)
        assert (found.window, found.both_ways) == (expected.window, expected.both_ways)
        dtypes = [each.dtype for each in (found.context_lens, found.block_tables, found.slot_mapping)]
        assert dtypes == [np.int32, np.int32, np.int64]
        for row, length in enumerate(found.context_lens.tolist()):
            stop = ceil_div(length, found.block_size)
            assert np.array_equal(found.block_tables[row, :stop], expected.block_tables[row, :stop])


@pytest.mark.parametrize("first", [1, 2, 3])
@pytest.mark.parametrize("adapters", [("", "", "", ""), ("", "a", "", ""), ("", "", "b", "a")])
def test_passes_that_are_joined_are_what_would_be_packed_at_once(
    first: int, adapters: tuple[str, ...]
) -> None:
    """Of decodes and chunks, with tables of other lengths, in two layer groups."""
    segments = [
        Segment(
            np.arange(num_new),
            np.tile(num_cached + np.arange(num_new), (3, 1)),
            [num_cached, num_cached // 2],
            [np.arange(num_blocks, dtype=np.int32), np.arange(num_blocks, dtype=np.int32) + 40],
            num_logits=num_logits,
            lora=lora,
            num_prompt=num_new - num_logits,
        )
        for lora, (num_new, num_cached, num_blocks, num_logits) in zip(
            adapters, [(1, 6, 2, 1), (1, 30, 8, 1), (9, 4, 4, 0), (5, 0, 3, 1)], strict=True
        )
    ]
    kinds = [GroupKind(), GroupKind(window=7)]
    parts = packed_pass(segments[:first], kinds, 4), packed_pass(segments[first:], kinds, 4)
    joined, anew = joined_pass(*parts), packed_pass(segments, kinds, 4)
    _check_equal(joined, anew)
    assert np.array_equal(joined.token_ids, anew.token_ids)


@pytest.mark.parametrize("mode", ["recompute", "offload"])
def test_preemption_changes_no_token(a_family: Subject, mode: str, events: list[str]) -> None:
    longest = max(len(prompt.plan) for prompt in a_family.prompts)
    config = SchedulerConfig(max_chunk_tokens=32, preemption=mode)  # type: ignore[arg-type]
    engine = ahead(
        a_family, config=config, block_size=4, num_kv_tokens=2 * longest + 24, enable_prefix_caching=True
    )
    for seed in range(2):
        prompts = a_family.mix(12)
        tokens = Drive(engine, seed).run(prompts)
        assert tokens == {name: prompt.expected for name, prompt in prompts.items()}
    assert engine.scheduler.num_preempted > 0, "the pool was meant to be too small"
    assert "launch ahead" in events


SAMPLINGS = {
    "drawn": SamplingParams(max_tokens=12, temperature=0.8, top_p=0.95, top_k=50),
    "repeated": SamplingParams(max_tokens=12, repetition_penalty=1.3),
    "both, reported": SamplingParams(max_tokens=12, temperature=0.9, repetition_penalty=1.3, logprobs=2),
    "several": SamplingParams(max_tokens=10, temperature=1.0, n=3),
    "not too early": SamplingParams(max_tokens=12, min_tokens=6, temperature=1.0, stop_token_ids=(5, 9)),
}


@pytest.mark.parametrize("name", list(SAMPLINGS))
def test_what_is_drawn_is_what_is_drawn_in_step(a_family: Subject, name: str, events: list[str]) -> None:
    """Beside greedy answers; tokens, their probabilities and ends."""
    found: list[dict[tuple[str, int], list[TokenOutput]]] = []
    for engine in (a_family.engine(), ahead(a_family)):
        drive = Drive(engine, seed=3)
        engine.add(a_family.prompts[0].request("greedy"))
        drive.run({"drawn": a_family.prompts[0]}, sampling=SAMPLINGS[name], seed=11)
        found.append(drive.outputs)
    plain, early = (
        {key: [_without_noise(out) for out in outs] for key, outs in each.items()} for each in found
    )
    assert early == plain
    assert "launch ahead" in events


def _without_noise(output: TokenOutput) -> Any:
    token = output.token
    return (
        output.index,
        token.token_id,
        output.text,
        output.finish_reason,
        pytest.approx(token.logprob, abs=1e-4),
    )


def test_what_depends_on_known_tokens_is_chosen_once_they_are_booked(
    a_family: Subject, monkeypatch: pytest.MonkeyPatch, events: list[str]
) -> None:
    """Counts of tokens are the host's: the pass is launched as early all the same."""
    sampling, prompt = SamplingParams(max_tokens=8, frequency_penalty=0.7), a_family.prompts[0]
    plain = Drive(a_family.engine(), seed=0).run({"r": prompt}, sampling=sampling)
    choose = sampler.SamplerAhead.sample

    def choosing(ahead: sampler.SamplerAhead, *arguments: Any) -> sampler.TokensAhead:
        events.append(f"choose after {ahead._states[0].num_generated}")
        return choose(ahead, *arguments)

    monkeypatch.setattr(sampler.SamplerAhead, "sample", choosing)
    assert Drive(ahead(a_family), seed=0).run({"r": prompt}, sampling=sampling) == plain
    assert [event for event in events if event != "in step"][:6] == [
        "launch",
        "choose after 1",
        "launch ahead",
        "read",
        "choose after 2",
        "launch ahead",
    ]
    assert events[-2:] == ["choose after 7", "read"]


def test_one_that_depends_on_known_tokens_does_not_keep_the_others_from_running_ahead(
    a_family: Subject, events: list[str]
) -> None:
    """It ends, is aborted, or another joins it; all have the tokens that they have in step."""
    counted = SamplingParams(max_tokens=7, frequency_penalty=0.7)
    found: list[dict[str, tuple[int, ...]]] = []
    for engine in (a_family.engine(), ahead(a_family)):
        drive, prompt = Drive(engine, seed=0), a_family.prompts[0]
        engine.add(prompt.request("greedy"))
        for name in ("ends", "aborted"):
            engine.add(prompt.request(name, sampling=counted))
        for _ in range(4):
            drive.step()
        engine.abort("aborted")
        engine.add(prompt.request("joins", sampling=counted))
        while engine.has_work():
            drive.step()
        found.append({name: drive.tokens(name) for name in ("greedy", "ends", "joins")})
    assert found[0] == found[1]
    assert found[0]["greedy"] == a_family.prompts[0].expected
    assert events.count("launch") < 4 < events.count("launch ahead")


def test_draws_go_on_where_those_that_count_tokens_have_left(a_family: Subject, events: list[str]) -> None:
    """Just before the tokens of a pass with both are chosen."""
    drawn = SamplingParams(max_tokens=16, temperature=1.0, ignore_eos=True)
    counted = SamplingParams(max_tokens=16, frequency_penalty=0.7)
    found: list[dict[str, tuple[int, ...]]] = []
    for engine in (a_family.engine(), ahead(a_family)):
        drive, prompt = Drive(engine, seed=0), a_family.prompts[0]
        engine.add(prompt.request("drawn", sampling=drawn, seed=7))
        engine.add(prompt.request("counted", sampling=counted))
        for _ in range(5):
            drive.step()
        engine.abort("counted")
        while engine.has_work():
            drive.step()
        found.append({"drawn": drive.tokens("drawn")})
    assert found[0] == found[1]
    assert events.count("launch") == 1


def test_prompts_are_computed_beside_decodes_that_run_ahead(a_family: Subject, events: list[str]) -> None:
    """One after another in chunks: but for the first, no pass is computed in step, and none is launched anew.

    Each decodes in the pass behind that of its last chunk.
    """
    config = SchedulerConfig(max_chunk_tokens=16)
    engine = ahead(a_family, config=config)
    drive, prompt = Drive(engine, seed=0), a_family.prompts[0]
    engine.add(prompt.request("first", sampling=SamplingParams(max_tokens=60, ignore_eos=True)))
    while not drive.tokens("first"):
        drive.step()
    del events[:]
    for name in ("second", "third"):
        engine.add(prompt.request(name))
        num_steps = engine.counts.num_steps
        while len(drive.tokens(name)) < 2:
            drive.step()
        num_chunks = ceil_div(len(prompt.plan), 16)
        assert engine.counts.num_steps - num_steps == num_chunks + 2, (
            "one is under way at first, one is decoded"
        )
    while engine.has_work():
        drive.step()
    assert drive.tokens("second") == drive.tokens("third") == prompt.expected
    assert events.count("prompt beside") == 2 * num_chunks
    assert events.count("launch") == 1
    assert "in step" not in events


KINDS = {
    "greedy": SamplingParams(max_tokens=40, ignore_eos=True),
    "drawn": SamplingParams(max_tokens=30, temperature=0.8, top_p=0.95, top_k=50, ignore_eos=True),
    "counted": SamplingParams(max_tokens=9, frequency_penalty=0.7, temperature=0.9),
    "repeated": SamplingParams(max_tokens=12, repetition_penalty=1.3, temperature=0.9, logprobs=1),
    "several": SamplingParams(max_tokens=8, temperature=1.0, n=2),
    "one token": SamplingParams(max_tokens=1),
    "held": SamplingParams(max_tokens=10, temperature=1.0, grammar=WORDS),
}


@pytest.mark.parametrize(("seed", "mode"), [(0, "offload"), (1, "recompute")])
def test_whatever_comes_and_goes_the_tokens_are_those_in_step(
    subjects: Callable[[str], Subject], seed: int, mode: str, events: list[str]
) -> None:
    """Arrivals of all kinds, cancellations and preemption; answers that are cancelled begin alike.

    Most passes run ahead, though one request in seven has two answers, and one in five is more important.
    """
    subject = replace(subjects("shapes-vl"), settings=GenerationSettings(frozenset([467, 468])))
    rng = random.Random(seed)
    arrivals = [(kind, rng.randrange(3), rng.randrange(20)) for kind in [*KINDS] * 4]
    cancelled = set(rng.sample([f"{number}" for number in range(len(arrivals))], 6))
    longest = max(len(prompt.plan) for prompt in subject.prompts)
    config = SchedulerConfig(max_chunk_tokens=32, max_num_batched_tokens=48, preemption=mode)  # type: ignore[arg-type]
    found, num_preempted = [], 0
    for runs_ahead in (False, True):
        events.clear()
        engine = subject.engine(
            async_scheduling=runs_ahead, config=config, block_size=4, num_kv_tokens=2 * longest + 24
        )
        engine.grammars.start(WORDS).result()
        drive, step = Drive(engine, seed), 0
        while step < 50 or engine.has_work():
            for number, (kind, which, at) in enumerate(arrivals):
                if at == step:
                    prompt = subject.prompts[which]
                    options = {"seed": number, "priority": -(number % 5 == 4)}
                    engine.add(prompt.request(f"{number}", sampling=KINDS[kind], **options))
                    for group in prompt.groups:
                        engine.add_embeddings(f"{number}", group)
                if at + 9 == step and f"{number}" in cancelled:
                    engine.abort(f"{number}")
            drive.step()
            step += 1
        assert engine.kv.usage == 0
        found.append({key: [out.token.token_id for out in outs] for key, outs in drive.outputs.items()})
        num_preempted = engine.scheduler.num_preempted
    plain, early = found
    for key in plain.keys() | early.keys():
        pair = plain.get(key, []), early.get(key, [])
        num_common = min(map(len, pair)) if key[0] in cancelled else max(map(len, pair))
        assert pair[0][:num_common] == pair[1][:num_common], (key, KINDS)
    assert num_preempted > 0, "the pool was meant to be too small"
    assert events.count("prompt beside") >= 10
    assert 2 * events.count("in step") < events.count("launch ahead")


def test_a_guess_that_was_wrong_is_computed_again(
    a_family: Subject, monkeypatch: pytest.MonkeyPatch, events: list[str]
) -> None:
    """On a GPU, a draw looks at the likeliest tokens alone at first; here that is wrong every third time."""
    draw, calls = sampler._draw, iter(range(10**6))

    def drawing(*arguments: Any, **options: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        ids, are_exact = draw(*arguments, **options)
        if options["is_bounded"] and next(calls) % 3 == 0:
            return (ids + 1) % 7, [torch.tensor([False])]
        return ids, are_exact

    drawn = sampler._Choice._drawn
    monkeypatch.setattr(sampler, "_draw", drawing)
    seen: dict[int, Any] = {}  # which keeps them, so that no later one has the id of an earlier one

    def bounded_at_first(choice: Any, *, is_bounded: bool) -> Any:
        is_first = id(choice) not in seen
        seen[id(choice)] = choice
        return drawn(choice, is_bounded=is_first)

    monkeypatch.setattr(sampler._Choice, "_drawn", bounded_at_first)
    prompts = a_family.mix(5)
    tokens = Drive(ahead(a_family), seed=1).run(prompts)
    assert tokens == {name: prompt.expected for name, prompt in prompts.items()}
    assert events.count("launch") > 1, "what came after a wrong guess was meant to be launched again"


def test_a_guess_that_was_wrong_stops_nobody_else(
    a_family: Subject, monkeypatch: pytest.MonkeyPatch, events: list[str]
) -> None:
    """Every token of the first row is wrong at first; the others are never launched anew."""
    drawn, sampling = sampler._Choice._drawn, SamplingParams(max_tokens=8, temperature=1.0, ignore_eos=True)
    plain = Drive(a_family.engine(), seed=0).run({"r": a_family.prompts[0]}, sampling=sampling, seed=5)
    bounded: list[Any] = []  # which keeps them, so that no later one has the id of an earlier one

    def wrong_at_first(choice: Any, *, is_bounded: bool) -> Any:
        is_first = not any(each is choice for each in bounded)
        ids, copy = drawn(choice, is_bounded=is_bounded)
        if is_first and choice._groups:
            bounded.append(choice)
            ids = ids.clone()
            ids[0] = (ids[0] + 1) % 7
            copy = HostCopy([ids, torch.tensor([False])])
        return ids, copy

    engine = ahead(a_family)
    drive, prompt = Drive(engine, seed=0), a_family.prompts[0]
    engine.add(prompt.request("r", sampling=sampling, seed=5))
    for name in ("second", "third"):
        engine.add(prompt.request(name, sampling=SamplingParams(max_tokens=30, ignore_eos=True)))
    while not all(drive.tokens(name) for name in ("r", "second", "third")):
        drive.step()
    monkeypatch.setattr(sampler._Choice, "_drawn", wrong_at_first)
    while engine.has_work():
        drive.step()
    assert len(bounded) > 5
    assert drive.tokens("r") == plain["r"]
    assert drive.tokens("second") == drive.tokens("third")
    assert drive.tokens("third")[:MAX_TOKENS] == prompt.expected
    assert events.count("launch") == 1


def test_a_request_that_arrives_is_not_held_up(a_family: Subject, events: list[str]) -> None:
    engine = ahead(a_family)
    drive, prompt = Drive(engine, seed=0), a_family.prompts[0]
    engine.add(prompt.request("first", sampling=SamplingParams(max_tokens=64, ignore_eos=True)))
    while events.count("launch ahead") < 2:
        drive.step()
    engine.add(prompt.request("second"))
    for _ in range(2):  # the pass that is under way, then the prompt
        drive.step()
    assert len(drive.tokens("second")) == 1
    while engine.has_work():
        drive.step()
    assert drive.tokens("second") == prompt.expected


def test_answers_that_leave_take_nothing_along(a_family: Subject, events: list[str]) -> None:
    """One is aborted and its id used again, one moves away and back, while passes with them are under way."""
    engine = ahead(a_family, block_size=4)
    drive, prompt, other = Drive(engine, seed=0), a_family.prompts[0], a_family.prompts[2]
    for name in ("aborted", "moved", "stays"):
        engine.add(prompt.request(name))
    while events.count("launch ahead") < 3:
        drive.step()
    engine.abort("aborted")
    engine.add(other.request("aborted"))
    del drive.outputs["aborted", 0]
    sequences = engine.detach("moved")
    assert len(sequences) == 1
    drive.step()
    known = drive.tokens("moved")
    assert known == prompt.expected[: len(known)]
    engine.attach(sequences)
    for group in other.groups:
        engine.add_embeddings("aborted", group)
    while engine.has_work():
        drive.step()
    assert drive.tokens("stays") == drive.tokens("moved") == prompt.expected
    assert drive.tokens("aborted") == other.expected
    assert engine.kv.usage == 0


def test_answers_of_a_request_that_fails_end_together(
    a_family: Subject, monkeypatch: pytest.MonkeyPatch, events: list[str]
) -> None:
    """The first cannot take its fourth token: the second gives none in that step, and others all."""
    push = TokenSequence.push

    def failing(sequence: TokenSequence, token: sampler.SampledToken) -> TokenOutput:
        if (sequence.request_id, sequence.num_generated) == ("fails", 3):
            raise RuntimeError("no text")
        return push(sequence, token)

    monkeypatch.setattr(TokenSequence, "push", failing)
    engine, prompt = ahead(a_family), a_family.prompts[0]
    engine.add(prompt.request("fails", sampling=SamplingParams(max_tokens=9, temperature=1.0, n=2)))
    engine.add(prompt.request("lasts"))
    results = []
    while engine.has_work():
        results.append(engine.step())
        engine.check_integrity()
    outputs = [output for result in results for output in result.outputs]
    assert [fault.request_id for result in results for fault in result.faults] == ["fails"]
    assert [each.choice for each in outputs if each.request_id == "fails"] == [0, 1, 0, 1, 0, 1]
    lasts = tuple(each.token.token_id for each in outputs if each.request_id == "lasts")
    assert lasts == prompt.expected
    assert "launch ahead" in events


def test_a_pass_that_fails_is_done_again_in_step(
    a_family: Subject, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read, calls = sampler.TokensAhead.read, iter(range(10**6))

    def failing(tokens: sampler.TokensAhead) -> tuple[list[sampler.SampledToken], list[bool]]:
        if next(calls) % 2:
            raise RuntimeError("the device has failed")
        return read(tokens)

    monkeypatch.setattr(sampler.TokensAhead, "read", failing)
    prompts = a_family.mix(5)
    tokens = Drive(ahead(a_family), seed=1).run(prompts)
    assert tokens == {name: prompt.expected for name, prompt in prompts.items()}
    assert "ran ahead has failed" in caplog.text
