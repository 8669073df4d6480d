"""Tokens of the colocated pipeline equal those of `model.generate`, however it is cut and used.

`generate` is given the positions that a checkpoint was trained with; its own it has under the switch.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoProcessor, GenerationConfig

from epd import LLM, video
from epd.encoders import FrameSampling, MediaPlan, load_adapter
from epd.engine_config import EngineConfig
from epd.errors import InfeasibleError, RequestError
from epd.sampling_params import SamplingParams
from epd.stages.engine.generation import GenerationSettings
from epd.stages.engine.setup import BLOCK_SIZE
from tests.colocated import ColocatedPipeline
from tests.positions import (
    adapter_like_transformers,
    authors_positions,
    positions_in_transformers,
    skip_where_seconds_are_cut,
)
from tests.reference import MAX_TOKENS, Subject, generated, generated_as_it_is, processor_inputs
from tests.tiny_models import load_reference

QUESTIONS = ("What is shown?", "Which colour is the shape? Ä 漢 🙂", "how many")
CASES = {
    "text": (),
    "image": ("image",),
    "images": ("image", "wide_image", "image"),
    "video": ("video",),
    "video and image": ("video", "image"),
    "image, videos": ("wide_image", "tall_video", "video"),
}


def with_settings(subject: Subject, **settings: object) -> ColocatedPipeline:
    """The pipeline of the checkpoint as if its generation configuration said something else."""
    config = GenerationConfig(**{**subject.model.generation_config.to_diff_dict(), **settings})
    return ColocatedPipeline(
        load_reference(subject.path),  # a pipeline changes the attention of its model
        subject.pipeline.adapter,
        settings=GenerationSettings.of(config, subject.processor.tokenizer.eos_token_id),
    )


def held_blocks(subject: Subject) -> float:
    return subject.pipeline.engine.kv.usage


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("names", CASES.values(), ids=CASES)
def test_tokens_equal_generate(
    subject: Subject, media: dict[str, Path], names: tuple[str, ...], question: str
) -> None:
    paths = [media[name] for name in names]
    expected = generated(subject.model, processor_inputs(subject.processor, paths, question))

    answer = subject.pipeline.ask(paths, question, max_tokens=MAX_TOKENS)

    assert answer.token_ids == expected


def test_handed_over_in_chunks(subject: Subject, media: dict[str, Path]) -> None:
    asked = [[media[name] for name in names] for names in CASES.values()]
    with LLM(subject.path, topology="1e1p1d", max_chunk_tokens=16, num_kv_tokens=4096) as llm:
        answers = [llm.ask(paths, QUESTIONS[0], max_tokens=MAX_TOKENS).text for paths in asked]
    inputs = [processor_inputs(subject.processor, paths, QUESTIONS[0]) for paths in asked]
    tokens = [generated(subject.model, each) for each in inputs]
    assert answers == [subject.processor.decode(each, skip_special_tokens=True) for each in tokens]


@pytest.mark.parametrize(
    "sampling", [FrameSampling(fps=5.0), FrameSampling(num_frames=10)], ids=["5 fps", "10 frames"]
)
def test_tokens_equal_generate_for_any_sampling(
    subject: Subject, media: dict[str, Path], sampling: FrameSampling
) -> None:
    paths = [media["video"], media["tall_video"]]
    inputs = processor_inputs(subject.processor, paths, QUESTIONS[0], sampling)

    answer = subject.pipeline.ask(
        paths, QUESTIONS[0], fps=sampling.fps, num_frames=sampling.num_frames, max_tokens=MAX_TOKENS
    )

    assert answer.token_ids == generated(subject.model, inputs)


@pytest.mark.parametrize("names", [("video",), ("image", "tall_video", "video")], ids=["video", "media"])
@pytest.mark.parametrize("name", ["qwen2_5_vl", "shapes-vl"])
def test_tokens_equal_forward_passes_at_the_authors_positions(
    checkpoints: dict[str, Path], media: dict[str, Path], name: str, names: tuple[str, ...]
) -> None:
    """Without a cache and without `generate`: each token is one further than the largest position so far."""
    paths, path = [media[each] for each in names], checkpoints[name]
    model, processor = load_reference(path), AutoProcessor.from_pretrained(path, local_files_only=True)
    inputs = processor_inputs(processor, paths, QUESTIONS[0], FrameSampling(num_frames=10))
    positions = authors_positions(model.config, inputs)
    settings = GenerationSettings.of(model.generation_config, processor.tokenizer.eos_token_id)
    adapter = load_adapter(path, positions="authors")
    answer = ColocatedPipeline(load_reference(path), adapter, settings=settings).ask(
        paths, QUESTIONS[0], num_frames=10, max_tokens=8
    )

    expected = greedy(model, dict(inputs), positions, len(answer.token_ids))

    assert list(answer.token_ids) == expected
    assert len(expected) > 1
    assert positions.tolist() != positions_in_transformers(model, inputs)[0]


@torch.inference_mode()
def greedy(model: Any, inputs: dict[str, Any], positions: Tensor, count: int) -> list[int]:
    """`count` tokens, each from a pass over the whole sequence at `positions`, int64 [3, T], and after."""
    tokens: list[int] = []
    for number in range(count):
        after = int(positions.max()) + 1 + torch.arange(number)
        logits = model(
            **{name: value for name, value in inputs.items() if name != "input_ids" and "mask" not in name},
            input_ids=torch.cat([inputs["input_ids"], torch.tensor([tokens], dtype=torch.long)], dim=1),
            position_ids=torch.cat([positions, after.expand(3, -1)], dim=1)[:, None],
            use_cache=False,
        ).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens


@pytest.mark.parametrize("names", [CASES[case] for case in ("video", "video and image", "image, videos")])
@pytest.mark.parametrize(
    "sampling", [FrameSampling(), FrameSampling(num_frames=10)], ids=["default", "10 frames"]
)
@pytest.mark.parametrize("name", ["qwen2_5_vl", "shapes-vl"])
def test_tokens_equal_generates_own_under_the_switch(
    checkpoints: dict[str, Path],
    media: dict[str, Path],
    name: str,
    sampling: FrameSampling,
    names: tuple[str, ...],
) -> None:
    paths, path = [media[each] for each in names], checkpoints[name]
    model, processor = load_reference(path), AutoProcessor.from_pretrained(path, local_files_only=True)
    inputs = processor_inputs(processor, paths, QUESTIONS[0], sampling)
    skip_where_seconds_are_cut(model, inputs)
    expected = generated_as_it_is(model, inputs)
    settings = GenerationSettings.of(model.generation_config, processor.tokenizer.eos_token_id)
    pipeline = ColocatedPipeline(model, adapter_like_transformers(path), settings=settings)

    answer = pipeline.ask(paths, QUESTIONS[0], num_frames=sampling.num_frames, max_tokens=MAX_TOKENS)

    assert answer.token_ids == expected


@pytest.mark.parametrize("penalty", [0.8, 1.3])
def test_tokens_equal_generate_with_a_repetition_penalty(
    subject: Subject, media: dict[str, Path], penalty: float
) -> None:
    paths = [media["video"]]
    inputs = processor_inputs(subject.processor, paths, QUESTIONS[0])
    plain = generated(subject.model, inputs)
    expected = generated(subject.model, inputs, repetition_penalty=penalty)

    answer = with_settings(subject, repetition_penalty=penalty).ask(
        paths, QUESTIONS[0], max_tokens=MAX_TOKENS
    )

    assert answer.token_ids == expected
    assert subject.name == "shapes-vl" or expected != plain, "a random model should mind the penalty"


def test_the_settings_of_the_checkpoint_count(subject: Subject, media: dict[str, Path]) -> None:
    told = with_settings(subject, max_new_tokens=1).ask([media["image"]], QUESTIONS[0])
    silent = GenerationSettings.of(GenerationConfig(), tokenizer_eos_id=7)

    assert told.usage.completion_tokens == 1
    assert (silent.eos_ids, silent.max_tokens, silent.sampling) == (frozenset([7]), None, SamplingParams())


def test_tokens_that_the_checkpoint_suppresses_do_not_come(subject: Subject, media: dict[str, Path]) -> None:
    """As published Gemma 4 suppresses the ends of media."""
    paths = [media["image"]]
    inputs = processor_inputs(subject.processor, paths, QUESTIONS[0])
    suppressed = list(generated(subject.model, inputs)[:3])
    expected = generated(subject.model, inputs, suppress_tokens=suppressed)
    answer = with_settings(subject, suppress_tokens=suppressed).ask(
        paths, QUESTIONS[0], max_tokens=MAX_TOKENS
    )
    assert answer.token_ids == expected
    assert not set(expected) & set(suppressed)


def test_a_server_draws_as_the_checkpoint_says() -> None:
    """As in vLLM, whose temperature is 1 where a checkpoint that samples names none."""
    values: dict[str, Any] = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}

    def sampling(**values: Any) -> SamplingParams:
        return GenerationSettings.of(GenerationConfig(**values), tokenizer_eos_id=7).sampling

    assert sampling(do_sample=True, **values) == SamplingParams(**values)
    assert sampling(do_sample=True) == SamplingParams(temperature=1.0)
    assert sampling(do_sample=False, repetition_penalty=1.05) == SamplingParams(repetition_penalty=1.05)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_tiny_models_tell_media_and_questions_apart(
    checkpoints: dict[str, Path], media: dict[str, Path], name: str
) -> None:
    """Else the equalities above would prove little: random models like to say one thing for ever."""
    pipeline = ColocatedPipeline.load(checkpoints[name])
    answers = [
        pipeline.ask([media[path] for path in names], question, max_tokens=MAX_TOKENS).token_ids
        for names in CASES.values()
        for question in QUESTIONS
    ]
    assert len(set(answers)) == len(answers)
    assert sum(len(set(answer)) for answer in answers) / len(answers) > 5


@pytest.mark.parametrize("group_tokens", [1, 20, 100_000], ids=["one unit", "a few units", "all at once"])
def test_size_of_groups_does_not_change_tokens(
    subject: Subject, media: dict[str, Path], group_tokens: int
) -> None:
    paths = [media["video"], media["image"], media["tall_video"]]
    whole = subject.pipeline.ask(paths, QUESTIONS[0], fps=4, max_tokens=MAX_TOKENS)

    pipeline = ColocatedPipeline.load(subject.path, EngineConfig(group_tokens=group_tokens))
    cut = pipeline.ask(paths, QUESTIONS[0], fps=4, max_tokens=MAX_TOKENS)

    assert cut.token_ids == whole.token_ids
    assert cut.usage == whole.usage


@pytest.mark.parametrize("names", [(), ("video", "image")], ids=["no media", "media"])
def test_many_questions_on_one_context_equal_separate_asks(
    subject: Subject, media: dict[str, Path], names: tuple[str, ...]
) -> None:
    paths = [media[name] for name in names]
    context = subject.pipeline.prefill_media(paths)
    subject.pipeline.answer(context, QUESTIONS[0], max_tokens=1)
    length = held_blocks(subject)

    for question in (*QUESTIONS, *reversed(QUESTIONS)):
        separate = subject.pipeline.ask(paths, question, max_tokens=MAX_TOKENS)
        answer = subject.pipeline.answer(context, question, max_tokens=MAX_TOKENS)
        assert (answer.token_ids, answer.usage) == (separate.token_ids, separate.usage)
        assert held_blocks(subject) == length


def test_a_consumer_that_fails_leaves_the_context_as_it_was(subject: Subject, media: dict[str, Path]) -> None:
    context = subject.pipeline.prefill_media([media["video"]])
    before = subject.pipeline.answer(context, QUESTIONS[0], max_tokens=MAX_TOKENS)

    def go_away(piece: str) -> None:
        raise ConnectionError(piece)

    with pytest.raises(ConnectionError):
        subject.pipeline.answer(context, QUESTIONS[1], max_tokens=MAX_TOKENS, on_text=go_away)

    assert subject.pipeline.answer(context, QUESTIONS[0], max_tokens=MAX_TOKENS).token_ids == before.token_ids


def test_decoding_is_stopped_when_the_work_fails(
    subject: Subject, media: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[bool] = []
    close = video.GroupStream.close
    monkeypatch.setattr(video.GroupStream, "close", lambda stream: (closed.append(True), close(stream)))

    def fail(num_done: int, num_frames: int) -> None:
        assert not closed
        raise ConnectionError(f"{num_done} of {num_frames}")

    pipeline = ColocatedPipeline.load(subject.path, EngineConfig(group_tokens=1))
    with pytest.raises(ConnectionError, match="2 of 8") as failure:
        pipeline.prefill_media([media["video"]], num_frames=8, progress=fail)
    assert closed, "by the pipeline itself, not when the error and all it refers to are forgotten"
    del failure


def test_streamed_text_is_the_text_of_the_tokens(subject: Subject, media: dict[str, Path]) -> None:
    pieces: list[str] = []
    answer = subject.pipeline.ask(
        [media["image"]], QUESTIONS[1], max_tokens=MAX_TOKENS, on_text=pieces.append
    )

    assert "".join(pieces) == answer.text
    assert answer.text == subject.processor.tokenizer.decode(
        answer.token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


def test_stops_at_the_end_token_and_at_the_cap(subject: Subject, media: dict[str, Path]) -> None:
    free = subject.pipeline.ask([media["image"]], QUESTIONS[0], max_tokens=MAX_TOKENS)
    last = free.token_ids[-1]
    stopping = with_settings(subject, eos_token_id=last)

    capped = subject.pipeline.ask([media["image"]], QUESTIONS[0], max_tokens=3)
    stopped = stopping.ask([media["image"]], QUESTIONS[0], max_tokens=MAX_TOKENS)

    assert capped.token_ids == free.token_ids[:3]
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(last) + 1]
    assert stopped.finish_reason == "stop"


def test_usage_and_timings_account_for_the_request(subject: Subject, media: dict[str, Path]) -> None:
    seen: list[tuple[int, int]] = []
    answer = subject.pipeline.ask(
        [media["video"], media["image"]],
        QUESTIONS[0],
        num_frames=8,
        max_tokens=2,
        progress=lambda num_done, num_frames: seen.append((num_done, num_frames)),
    )
    inputs = processor_inputs(
        subject.processor, [media["video"], media["image"]], QUESTIONS[0], FrameSampling(num_frames=8)
    )
    visual = int(inputs["mm_token_type_ids"].bool().sum())

    assert (answer.usage.num_frames, answer.usage.visual_tokens) == (9, visual)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (inputs["input_ids"].shape[1], 2)
    assert seen[-1] == (9, 9)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    spent = answer.timings
    assert 0 < answer.ttft_s < spent.total_s
    assert min(spent.probe_s, spent.preprocess_s, spent.encode_s, spent.prefill_s, spent.decode_s) > 0
    assert spent.preprocess_s + spent.encode_s + spent.prefill_s + spent.decode_s <= spent.total_s


def test_no_more_than_a_group_of_frames_is_preprocessed_at_a_time(
    subject: Subject, media: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = ColocatedPipeline.load(subject.path, EngineConfig(group_tokens=10))
    sizes: list[int] = []
    preprocess = pipeline.adapter.preprocess

    def watched(frames: Tensor, plan: MediaPlan, device: torch.device) -> Tensor:
        sizes.append(len(frames))
        return preprocess(frames, plan, device)

    monkeypatch.setattr(pipeline.adapter, "preprocess", watched)
    context = pipeline.prefill_media([media["video"]], num_frames=40)
    (plan,) = context.plans

    assert sum(sizes) == 40
    assert max(sizes) == plan.frames_per_unit * max(1, 10 // plan.tokens_per_unit) < 40


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fps": 1.0, "num_frames": 4}, "one of the two"),
        ({"fps": 0.0}, "positive"),
        ({"fps": float("nan")}, "positive"),
        ({"num_frames": 0}, "at least 1"),
        ({"max_tokens": 0}, "at least 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    subject: Subject, media: dict[str, Path], options: dict[str, float], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        subject.pipeline.ask([media["video"]], QUESTIONS[0], **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("token", ["<|image_pad|>", "<|video_pad|>"])
def test_a_question_cannot_smuggle_in_media_tokens(
    subject: Subject, media: dict[str, Path], token: str
) -> None:
    with pytest.raises(RequestError, match="stands for media"):
        subject.pipeline.ask([media["image"]], f"what {token} is this", max_tokens=2)


@pytest.mark.parametrize("at_once", [False, True])
def test_a_question_without_room_beside_held_contexts_is_refused(
    checkpoints: dict[str, Path], media: dict[str, Path], at_once: bool
) -> None:
    """It would wait for ever: what holds the room is the caller's."""
    probe = ColocatedPipeline.load(checkpoints["shapes-vl"], EngineConfig(num_kv_tokens=4096)).prefill_media(
        [media["video"]]
    )
    pipeline = ColocatedPipeline.load(
        checkpoints["shapes-vl"], EngineConfig(num_kv_tokens=2 * len(probe.prefix_ids) + 3 * BLOCK_SIZE)
    )
    contexts = [pipeline.prefill_media([media["video"]]) for _ in range(2)]
    question = "How many shapes are there? " * 4
    ask = partial(pipeline.answer_all, contexts[0], [question])
    ask_one = partial(pipeline.answer, contexts[0], question)
    with pytest.raises(InfeasibleError, match="let go of some"):
        (ask if at_once else ask_one)(max_tokens=4)
