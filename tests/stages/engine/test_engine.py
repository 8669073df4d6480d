"""Tokens of the engine equal `model.generate`, whoever else is in the batch and however the work is cut."""

from __future__ import annotations

import pytest

from epd.errors import InfeasibleError, RequestError
from epd.kv.pass_limits import SchedulerConfig
from epd.sampling_params import SamplingParams
from epd.stages.decoder.decoder import FusedDecoder, ModulesDecoder
from epd.stages.engine.generation import Extent
from tests.stages.conftest import Subject, check
from tests.stages.prompts import Drive

# transformers near 5.17 hands torch tensors to numpy in InternVL's processor, in a way that numpy 2 regrets.
pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")


@pytest.mark.parametrize("chunk", [1, 7, 64, 4096])
@pytest.mark.parametrize("count", [1, 5, 16])
def test_tokens_equal_generate(any_family: Subject, chunk: int, count: int) -> None:
    config = SchedulerConfig(max_chunk_tokens=chunk, max_num_batched_tokens=max(chunk, 32))
    engine = any_family.engine(config=config, enable_prefix_caching=False)
    check(any_family, Drive(engine, seed=chunk + count), count)
    assert engine.counts.num_steps > 0


def test_the_modules_of_transformers_give_the_same_tokens(any_family: Subject) -> None:
    """They are the twin of our decoder, and compute text models that it does not know."""
    engine = any_family.engine(by_modules=True)
    assert isinstance(engine._runner._decoder, ModulesDecoder)
    assert isinstance(any_family.engine()._runner._decoder, FusedDecoder)
    check(any_family, Drive(engine, seed=5), 5)


@pytest.mark.parametrize("block_size", [1, 5, 16, 64])
def test_any_block_size_gives_the_same_tokens(a_family: Subject, block_size: int) -> None:
    engine = a_family.engine(block_size=block_size, num_kv_tokens=6400, enable_prefix_caching=True)
    check(a_family, Drive(engine, seed=block_size), 10)


def test_prefix_hits_give_the_same_tokens_and_save_work(any_family: Subject) -> None:
    engine = any_family.engine(enable_prefix_caching=True)
    check(any_family, Drive(engine, seed=1), 5)
    first = engine.counts.num_computed_tokens
    check(any_family, Drive(engine, seed=2), 5)

    again = engine.counts.num_computed_tokens - first
    num_generated = sum(len(prompt.expected) for prompt in any_family.prompts)
    assert again == num_generated, "of each prompt, only the last token is computed again"
    assert engine.counts.num_cached_tokens > 0


def test_a_second_question_computes_only_the_question(any_family: Subject) -> None:
    """Canonical order [system][media][question]: the media need not even arrive again."""
    prompt = any_family.prompts[2]
    engine = any_family.engine(enable_prefix_caching=True)
    drive = Drive(engine, seed=0)
    drive.run({"first": prompt})
    other = any_family.adapter.plan_prompt([item.plan for item in prompt.plan.media], "And where is it?")
    before = engine.counts.num_computed_tokens
    engine.add(type(prompt)(other, prompt.mm_hashes, (), ()).request("second"))
    while engine.has_work():
        drive.step()

    computed = engine.counts.num_computed_tokens - before
    shorter = min(len(other), len(prompt.plan))
    differs = other.token_ids[:shorter] != prompt.plan.token_ids[:shorter]
    shared = int(differs.argmax())
    assert shared >= other.prefix_length
    assert computed == len(other) - shared + len(drive.tokens("second")) - 1


@pytest.mark.parametrize("mode", ["recompute", "offload"])
@pytest.mark.parametrize("caching", [False, True], ids=["no prefix cache", "prefix cache"])
def test_preemption_changes_no_token(any_family: Subject, mode: str, caching: bool) -> None:
    longest = max(len(prompt.plan) for prompt in any_family.prompts)
    config = SchedulerConfig(max_chunk_tokens=32, preemption=mode)  # type: ignore[arg-type]
    engine = any_family.engine(
        config=config, block_size=4, num_kv_tokens=2 * longest + 24, enable_prefix_caching=caching
    )
    for seed in range(3):
        check(any_family, Drive(engine, seed), 12)
    assert engine.scheduler.num_preempted > 0, "the pool was meant to be too small"


def test_several_answers_to_one_prompt_share_its_blocks(a_family: Subject) -> None:
    prompt = a_family.prompts[2]
    sampling = SamplingParams(max_tokens=10, temperature=1.0, n=4)
    engine = a_family.engine(block_size=8)
    together = Drive(engine, seed=0).run({"r": prompt}, sampling=sampling, seed=5)["r"]

    alone: tuple[int, ...] = ()
    for seed in range(5, 9):
        single = SamplingParams(max_tokens=10, temperature=1.0)
        alone += Drive(a_family.engine(), seed=1).run({"r": prompt}, sampling=single, seed=seed)["r"]
    assert together == alone
    assert len(set(alone)) > 4, "different seeds should give different answers"
    assert engine.counts.num_computed_tokens < len(prompt.plan) + 4 * 10, "the prompt is computed once"


@pytest.mark.parametrize("count", [2, 16])
def test_seeded_sampling_does_not_depend_on_the_batch(a_family: Subject, count: int) -> None:
    sampling = SamplingParams(max_tokens=12, temperature=0.8, top_p=0.95, top_k=50, repetition_penalty=1.1)
    prompts = a_family.mix(5)
    alone = {
        name: Drive(a_family.engine(), seed=0).run({name: prompt}, sampling=sampling, seed=7)[name]
        for name, prompt in prompts.items()
    }
    together = Drive(a_family.engine(), seed=count).run(a_family.mix(count), sampling=sampling, seed=7)
    for name, tokens in together.items():
        assert tokens == alone[f"r{int(name[1:]) % 5}"]


def test_media_that_come_late_do_not_hold_others_up(a_family: Subject) -> None:
    engine = a_family.engine(enable_prefix_caching=False)
    late, text = a_family.prompts[2], a_family.prompts[0]
    engine.add(late.request("late"))
    drive = Drive(engine, seed=0)
    drive.step()
    engine.add(text.request("text"))
    for _ in range(len(text.expected) + 1):
        drive.step()
    assert drive.tokens("text") == text.expected
    assert drive.tokens("late") == ()
    for group in late.groups:
        engine.add_embeddings("late", group)
    while engine.has_work():
        drive.step()
    assert drive.tokens("late") == late.expected


def test_decodes_ride_along_with_prefill_chunks(a_family: Subject) -> None:
    """A long prefill never stalls a decode: it gains a token in every step."""
    engine = a_family.engine(config=SchedulerConfig(max_num_batched_tokens=4), enable_prefix_caching=False)
    text, long = a_family.prompts[0], a_family.prompts[1]
    drive = Drive(engine, seed=0)
    engine.add(text.request("decode"))
    while not drive.tokens("decode"):
        drive.step()
    engine.add(long.request("prefill"))
    for group in long.groups:
        engine.add_embeddings("prefill", group)
    for _ in range(len(text.expected) - 1):
        before = len(drive.tokens("decode"))
        drive.step()
        assert len(drive.tokens("decode")) == before + 1
    assert not drive.tokens("prefill"), "its chunks should still be going on"


def test_abort_frees_everything_at_any_point(a_family: Subject) -> None:
    for stop_after in range(0, 30, 3):
        engine = a_family.engine(config=SchedulerConfig(max_chunk_tokens=9), num_kv_tokens=1024)
        drive = Drive(engine, seed=stop_after)
        for name, prompt in a_family.mix(6).items():
            engine.add(prompt.request(name, sampling=SamplingParams(max_tokens=12, temperature=1.0, n=2)))
            for group in prompt.groups:
                engine.add_embeddings(name, group)
        for _ in range(stop_after):
            drive.step()
        for name in a_family.mix(6):
            engine.abort(name)
            engine.check_integrity()
        assert not engine.has_work()
        assert engine.kv.usage == 0


def test_a_request_that_can_never_fit_is_refused(a_family: Subject) -> None:
    engine = a_family.engine(num_kv_tokens=64)
    with pytest.raises(InfeasibleError, match="enlarge the cache"):
        engine.add(a_family.prompts[2].request("r"))
    assert not engine.has_work()


def test_a_request_id_is_used_once_at_a_time(a_family: Subject) -> None:
    engine = a_family.engine()
    engine.add(a_family.prompts[0].request("r"))
    with pytest.raises(RequestError, match="in use"):
        engine.add(a_family.prompts[0].request("r"))


def test_groups_out_of_order_are_refused(a_family: Subject) -> None:
    prompt = a_family.prompts[3]
    engine = a_family.engine()
    engine.add(prompt.request("r"))
    assert len(prompt.groups) > 1
    with pytest.raises(ValueError, match="in order"):
        engine.add_embeddings("r", prompt.groups[1])


def test_held_media_serve_questions_without_a_prefix_cache(a_family: Subject) -> None:
    prompt = a_family.prompts[2]
    engine = a_family.engine(enable_prefix_caching=False)
    drive = Drive(engine, seed=0)
    drive.run({"media": prompt}, extent=Extent.MEDIA)
    before = engine.counts.num_computed_tokens
    assert drive.run({"question": prompt}, parent="media")["question"] == prompt.expected
    question = len(prompt.plan) - prompt.plan.prefix_length
    assert engine.counts.num_computed_tokens - before == question + len(prompt.expected) - 1
    engine.scheduler.release("media")
    assert engine.kv.usage == 0
