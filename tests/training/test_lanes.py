"""The training of a Qwen3-VL-shaped model agrees with transformers: tower, batches, decoder and steps."""

from __future__ import annotations

import dataclasses
import random
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn
from transformers import Qwen3VLForConditionalGeneration

from epd.encoders.registry import load_adapter
from epd.models import model_folder
from epd.shapes import COLOURS, SHAPES, Question, QuestionKind, Scene, SceneObject
from training import clips, lane_language, lane_vision
from training.lane_batches import Batch, Prompts, Thinned, make_batch
from training.lane_decoder import decode
from training.lane_probes import NAME_LAYERS, MentionProbes
from training.lane_scenes import UNTIMED, Events, Imagined, Shown, TowerErrors, draw_shown, questions_about
from training.lanes import EMPTY, HEIGHT, codes, directions, embeddings
from training.qwen3_checkpoint import TIMESTAMP_ENDS, build_model, build_processor, build_tokenizer
from training.rows import NO_TARGET
from training.stories import MOTIONS

RED_STAR = SceneObject("star", "red", 3.0, 13.0, 1, (0.5, 0.3), (0.5, 0.7), 0.4)
BLUE_RING = SceneObject("ring", "blue", 14.0, 20.0, 1, (0.5, 0.5), (0.5, 0.5), 0.4)
SHOWN = Shown(Scene(0, 20.0, (RED_STAR, BLUE_RING)), tuple(float(second) for second in range(20)))


@pytest.fixture(scope="module")
def model() -> Qwen3VLForConditionalGeneration:
    torch.manual_seed(0)
    built = build_model(build_tokenizer()).eval()
    for parameter in built.model.language_model.layers.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.1)
    return built


def test_a_number_is_one_token_and_a_timestamp_is_three() -> None:
    tokenizer = build_tokenizer()
    for number in range(1000):
        assert len(tokenizer(str(number))["input_ids"]) == 1
        assert tokenizer.decode(tokenizer(f"at {number} s")["input_ids"]) == f"at {number} s"
    for end in TIMESTAMP_ENDS:
        assert len(tokenizer(f"<123{end}")["input_ids"]) == 3


def test_words_begin_near_what_they_name() -> None:
    tokenizer, table = build_tokenizer(), build_model(build_tokenizer()).get_input_embeddings().weight
    likeness = torch.nn.functional.normalize(table.detach()) @ directions().T
    for name, row in (("circle", 0), ("star", SHAPES.index("star")), ("red", len(SHAPES))):
        for text in (name, f" {name}"):
            (token,) = tokenizer(text)["input_ids"]
            assert likeness[token, : HEIGHT - 3].argmax() == row


def test_words_and_lanes_begin_about_as_long_and_logits_do_not_grow_with_them() -> None:
    model = build_model(build_tokenizer())
    words = model.get_input_embeddings().weight.detach().norm(dim=1)
    lanes = embeddings(codes(SHOWN.scene, SHOWN.times_s)).norm(dim=-1)
    assert 8 < words.median() < lanes.median() < 16
    assert model.model.language_model.norm.weight.detach().unique().item() * words.median() < 2


def test_codes_say_what_two_frames_show_in_each_lane() -> None:
    seen = codes(SHOWN.scene, SHOWN.times_s)
    names = seen[..., :HEIGHT].argmax(-1)
    shown = [SHAPES[index] if index < len(SHAPES) else None for index in names[:, 1].tolist()]
    assert shown == [None, *["star"] * 6, *["ring"] * 3]
    assert seen[1, 1, HEIGHT].item() == pytest.approx(-1.0)  # the second frame alone shows it, at its highest
    assert seen[4, 1, HEIGHT].item() == pytest.approx((0.5 + 0.04 * 0.5 - 0.5) / 0.2)
    assert not seen[:, [0, 2], : len(SHAPES)].any()
    assert torch.allclose(lane_vision.read_codes(embeddings(seen)), seen, atol=1e-5)


def test_events_are_those_of_the_scene() -> None:
    events = Events.of([SHOWN])
    pair, shape = (events.appears.view(10, 3, -1)[:, 1]).nonzero(as_tuple=True)
    assert [(SHAPES[s], p) for p, s in zip(pair.tolist(), shape.tolist(), strict=True)] == [
        ("star", 1),
        ("ring", 7),
    ]
    assert events.left.view(10, 3, -1)[:, 1].nonzero().tolist() == [[7, SHAPES.index("star")]]
    assert events.ordinal.view(10, 3)[:, 1].tolist() == [0] * 7 + [1] * 3
    assert events.fallen.view(10, 3)[6, 1].item() == pytest.approx(0.04 * 9)
    assert events.was_one.view(10, 3)[:, 1].tolist() == [False] * 2 + [True] * 8
    before = events.height.view(10, 3)[:, 1]
    assert before[1:].tolist() == codes(SHOWN.scene, SHOWN.times_s)[:-1, 1, HEIGHT].tolist()
    assert before[2].item() == pytest.approx(-1.0)
    assert events.seconds.view(10, 3, 2)[:, 2].tolist() == [
        [0, UNTIMED],
        *([2 * n, 2 * n - 2] for n in range(1, 10)),
    ]


def test_names_come_with_what_is_true_of_their_shapes() -> None:
    questions = [
        Question(QuestionKind.COLOUR, "What colour is the star?", "red"),
        Question(QuestionKind.AFTER, "What came after the ring?", "nothing"),
        Question(QuestionKind.PRESENCE, "Is there a cross?", "no"),
    ]
    batch, tokenizer = _batch((SHOWN,), questions), build_tokenizer()
    named, ids = batch.mentions, batch.ids[batch.is_token]
    assert tokenizer.batch_decode(ids[named.at][:, None]) == [" star", " ring", " cross"]
    assert named.shown.tolist() == [[1, 0], [1, 0], [0, 0]]
    two, twelve, fourteen, end = tokenizer.convert_tokens_to_ids(["2", "12", "14", "Ġend"])
    colours = list(COLOURS)
    assert named.facts.tolist() == [
        [colours.index("red"), 1, MOTIONS.index("moves down"), two, twelve],
        [colours.index("blue"), 1, MOTIONS.index("hardly moves"), fourteen, end],
        [NO_TARGET] * 5,
    ]


def test_answers_that_go_on_about_a_shape_come_with_what_is_true_of_it() -> None:
    questions = [
        Question(QuestionKind.ORDER, "Which shape is first?", "the star is red."),
        Question(QuestionKind.COLOUR, "And the ring?", "blue"),
    ]
    batch, tokenizer = _batch((SHOWN,), questions), build_tokenizer()
    star, ring = (SHAPES.index(each) for each in ("star", "ring"))
    ids = batch.ids[batch.is_token]
    after = tokenizer.batch_decode(ids[batch.subjects.at + 1][:, None])
    assert after == [" is", " red", ".", "<|im_end|>", "blue", "<|im_end|>"][1:]
    assert batch.subjects.shape.tolist() == [star] * 3 + [ring] * 2
    assert batch.subjects.facts[0].tolist() == batch.mentions.facts[0].tolist()


def test_of_two_videos_names_say_which_shows_their_shapes() -> None:
    alone = Shown(dataclasses.replace(SHOWN.scene, objects=(RED_STAR,)), SHOWN.times_s)
    question = Question(QuestionKind.CLIPS, "Which video has a star? And a ring?", "both")
    named = _batch((alone, SHOWN), [question]).mentions
    assert named.shown.tolist() == [[1, 1], [0, 1]]
    assert (named.facts == NO_TARGET).all()


def test_of_an_image_only_colour_and_lane_are_known() -> None:
    image = Shown(dataclasses.replace(SHOWN.scene, objects=(RED_STAR,)), (5.0,), is_image=True)
    named = _batch((image,), [Question(QuestionKind.PRESENCE, "Is there a star?", "yes")]).mentions
    assert named.facts.tolist() == [[list(COLOURS).index("red"), 1, *[NO_TARGET] * 3]]


def test_what_reads_along_learns_from_what_is_certain_alone() -> None:
    batch = _batch((SHOWN,), [Question(QuestionKind.PRESENCE, "Is there a cross?", "no")])
    states = [torch.randn(int(batch.is_token.sum()), 256) for _ in range(7)]
    losses = MentionProbes(256, NAME_LAYERS).losses(batch.mentions, states, torch.randn(2000, 256))
    assert [name for name, loss in losses.items() if loss > 0] == ["shape", "shown"]


def test_the_batched_tower_equals_the_models_own(model: Qwen3VLForConditionalGeneration) -> None:
    patches = lane_vision.patchify(torch.randint(0, 256, (3, 2, 32, 96, 3), dtype=torch.uint8))
    visual = model.model.visual
    with torch.inference_mode():
        batched = lane_vision.encode(visual, patches).flatten(0, 1)
        own = visual(patches.flatten(0, 1), grid_thw=torch.tensor([[3, 2, 6]])).pooler_output
    assert torch.allclose(batched, own, atol=1e-5)


def test_patches_are_the_processors() -> None:
    frames = torch.randint(0, 256, (1, 2, 32, 96, 3), dtype=torch.uint8)
    processor = build_processor(build_tokenizer()).video_processor
    theirs = processor(frames[0].permute(0, 3, 1, 2), do_sample_frames=False, return_tensors="pt")
    assert torch.allclose(lane_vision.patchify(frames)[0], theirs["pixel_values_videos"], atol=1e-5)


def _batch(shown: tuple[Shown, ...], questions: list[Question]) -> Batch:
    torch.manual_seed(1)
    return make_batch(Prompts(build_tokenizer()), [shown], [questions], Imagined())


def _logits(model: Qwen3VLForConditionalGeneration, batch: Batch) -> torch.Tensor:
    with torch.inference_mode():
        return lane_language.answer_logits(model, batch)[0]


def test_a_question_among_others_gets_the_logits_it_gets_alone(
    model: Qwen3VLForConditionalGeneration,
) -> None:
    shown = (SHOWN, draw_shown(random.Random(0), 2))
    questions = questions_about(SHOWN, random.Random(0), 1, 1)
    together = _batch(shown, questions)
    logits, segments = _logits(model, together), together.segments[together.targets != NO_TARGET]
    for number in (1, len(questions)):
        alone = _logits(model, _batch(shown, [questions[number - 1]]))
        assert torch.allclose(logits[segments == number], alone, atol=0.1)


def test_the_decoder_and_its_positions_are_those_of_transformers(
    model: Qwen3VLForConditionalGeneration,
) -> None:
    earlier = (("Which shape appears first?", "star"),)
    question = Question(QuestionKind.FOLLOW_UP, "What colour is it?", "red", earlier)
    other = draw_shown(random.Random(0), 2)
    batch = _batch((SHOWN, other), [question])
    ids = torch.where(batch.visual, model.config.video_token_id, batch.ids)
    positions, delta = model.model.get_rope_index(
        ids, batch.visual.int() * 2, video_grid_thw=torch.tensor([[len(SHOWN), 2, 6], [len(other), 2, 6]])
    )
    assert torch.equal(positions, batch.positions)
    assert delta.item() == 0  # `generate` counts on from the tokens
    inputs = model.get_input_embeddings()(batch.ids)
    inputs = inputs.masked_scatter(batch.visual[..., None], batch.embeddings)
    language = model.model.language_model
    with torch.inference_mode():
        ours = decode(language, inputs, batch.positions, batch.segments)[-1]
        theirs = language(inputs_embeds=inputs, position_ids=positions, use_cache=False).last_hidden_state[0]
    assert (ours - theirs).norm() < 0.03 * theirs.norm()  # ours is in bfloat16


def test_a_thinned_video_is_what_transformers_computes_of_the_tokens_kept(
    model: Qwen3VLForConditionalGeneration,
) -> None:
    """A kept token has the place that it has among all of them, and so has the question."""
    clip, kept = draw_shown(random.Random(0), 8), torch.rand(8, 3) > 0.5
    question = Question(QuestionKind.COUNT, "How many shapes are there?", "2")
    rows = ([(clip,)], [[question]], Imagined())
    torch.manual_seed(0)
    whole = make_batch(Prompts(build_tokenizer()), *rows)
    torch.manual_seed(0)
    batch = make_batch(Prompts(build_tokenizer()), *rows, keep=lambda _: kept)
    assert torch.equal(batch.embeddings, whole.embeddings[kept.flatten()])
    assert torch.equal(batch.events.ordinal, whole.events.ordinal[kept.flatten()])
    assert torch.equal(batch.positions, whole.positions)
    assert batch.is_token.sum() == whole.is_token.sum() - (~kept).sum()
    inputs = model.get_input_embeddings()(batch.ids)
    inputs = inputs.masked_scatter(batch.visual[..., None], batch.embeddings)
    language, is_token = model.model.language_model, batch.is_token[0]
    with torch.inference_mode():
        ours = decode(language, inputs, batch.positions, batch.segments)[-1]
        theirs = language(
            inputs_embeds=inputs[:, is_token], position_ids=batch.positions[:, :, is_token], use_cache=False
        ).last_hidden_state[0]
    assert (ours - theirs).norm() < 0.03 * theirs.norm()  # ours is in bfloat16


def test_thinning_keeps_one_of_every_two_frames_at_least() -> None:
    thinned, seen = Thinned(random.Random(0)), set()
    for _ in range(40):
        kept = thinned(embeddings(SHOWN.codes()))
        assert kept.any(1).all()
        seen.add(kept.sum().item())
    assert seen == {10, 15, 20}  # a third, a half and two thirds of 30


@pytest.mark.parametrize("num_frames", [2, 33, 512])
def test_two_frames_are_three_tokens_whatever_the_length(num_frames: int) -> None:
    processor = build_processor(build_tokenizer()).video_processor
    frames = torch.zeros(num_frames, 3, 90, 160, dtype=torch.uint8)
    grid = processor(frames, do_sample_frames=False, return_tensors="pt")["video_grid_thw"][0].tolist()
    assert grid == [(num_frames + 1) // 2, 2, 6]


def test_both_steps_run_resume_and_leave_a_checkpoint_that_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.colocated import ColocatedPipeline

    clips.write_shard(tmp_path, 0, 4, shard_frames=32, size=(32, 96))
    monkeypatch.setattr(lane_language, "VALIDATED", ((4, 1),))
    tower, state = tmp_path / "tower.pt", tmp_path / "state.pt"
    monkeypatch.setattr(lane_vision, "_HELD_OUT", 2)
    monkeypatch.setattr(lane_vision, "_NUM_JUDGED", 8)
    for steps in ("1", "2"):
        seen = ("--clips", tmp_path, "--out", state, "--final", tower, "--batch", "4", "--steps", steps)
        _run(lane_vision, monkeypatch, *seen)
        taught = (
            "--vision",
            tower,
            "--clips",
            tmp_path,
            "--out",
            tmp_path / "language.pt",
            "--checkpoint",
            tmp_path / "model",
        )
        _run(lane_language, monkeypatch, *taught, "--budget", "100", "--steps", steps)
    assert torch.load(state)["step"] == torch.load(tmp_path / "language.pt")["step"] == 2
    pipeline = ColocatedPipeline.load(tmp_path / "model")
    assert pipeline.ask([], "Is there a circle?", max_tokens=2).usage.completion_tokens in (1, 2)
    adapter = load_adapter(tmp_path / "model")
    assert adapter.checkpoint.config.model_type == "qwen3_vl"


def test_a_checkpoint_is_taught_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a rate of nothing it stays what it was; the tower is its own."""
    monkeypatch.setattr(lane_language, "VALIDATED", ((4, 1),))
    taught = ("--model", "shapes-vl-2", "--lr", "0", "--steps", "1", "--budget", "100", "--thinned", "1")
    _run(
        lane_language, monkeypatch, *taught, "--out", tmp_path / "state.pt", "--checkpoint", tmp_path / "more"
    )
    before, after = (
        safetensors.torch.load_file(folder / "model.safetensors")
        for folder in (model_folder("shapes-vl-2"), tmp_path / "more")
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_tower_is_taught_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a rate of nothing it stays what it was."""
    clips.write_shard(tmp_path, 0, 4, shard_frames=32, size=(32, 96))
    monkeypatch.setattr(lane_vision, "_HELD_OUT", 2)
    monkeypatch.setattr(lane_vision, "_NUM_JUDGED", 8)
    files = ("--clips", tmp_path, "--out", tmp_path / "state.pt", "--final", tmp_path / "tower.pt")
    taught = ("--model", "shapes-vl-2", "--lr", "0", "--steps", "1", "--batch", "4")
    _run(lane_vision, monkeypatch, *files, *taught)
    before = safetensors.torch.load_file(model_folder("shapes-vl-2") / "model.safetensors")
    after = torch.load(tmp_path / "tower.pt")["visual"]
    assert all(torch.equal(before[f"model.visual.{name}"].float(), after[name]) for name in after)


def test_what_shows_nothing_is_off_by_what_a_tower_is_there() -> None:
    imagined = Imagined(TowerErrors(empty=torch.full((2, 256), 0.25), shown=torch.full((3, 256), 7.0)))
    exact, is_empty = embeddings(SHOWN.codes()), SHOWN.codes()[..., EMPTY] > 0
    off = (imagined(SHOWN) - exact).mean(-1)
    assert is_empty.any()
    assert torch.equal(off.round(decimals=3), torch.where(is_empty, 0.25, 7.0))


def _run(module: object, monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> None:
    monkeypatch.setattr(sys, "argv", ["training", *map(str, arguments)])
    module.main()  # type: ignore[attr-defined]
