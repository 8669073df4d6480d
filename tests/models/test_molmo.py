"""Molmo 2: tokens of all media of a prompt attend each other; tokens and logits equal transformers'.

`generate` takes no images beside a video, and its processor one video alone: such prompts are compared with
transformers' layers, which get a mask that is written down here.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoProcessor

from epd.encoders import FrameSampling, VideoFacts
from epd.encoders.adapter import concatenated
from epd.encoders.groups import plan_groups, prompt_identity
from epd.encoders.reduction.reading import reduce_prompt
from epd.engine_config import EngineConfig, check_reduction
from epd.errors import ModelError, RequestError, UnsupportedMediaError, UnsupportedModelError
from epd.reduction import SELECTION_METHODS, ReductionPolicy
from epd.serve_app.verification import LayerProbe, segment_of
from epd.stages.decoder.decoder import FusedDecoder, ModulesDecoder, decoder_of
from epd.stages.decoder.rank_cut import check_divisible
from epd.stages.engine.model_runner import kv_bytes_per_token
from epd.stages.engine.setup import largest_prefill
from epd.stages.loading.weight_files import write_weights
from epd.stages.loading.weights import WholeModel, load_role, skeleton
from epd.stages.placement import CPU_FLOAT32
from tests.colocated import ColocatedPipeline, plan_media
from tests.encoders.tiny_molmo import PUBLISHED, build_molmo2
from tests.models.engine_answers import (
    QUESTION,
    Mixes,
    test_answers_move_between_decode_workers,
    test_answers_of_workers_and_from_their_caches,
    test_chunked_and_packed,
    test_epd_verify_says_equal,
    test_preemption_changes_no_token,
    test_several_answers_share_their_prompt,
)
from tests.models.lora import ALL, peft_config, write_adapter
from tests.models.test_published import written
from tests.reference import MAX_TOKENS, generated_as_it_is, processor_inputs
from tests.stages.conftest import Subject, check, make
from tests.stages.prompts import Drive, prompt_of
from tests.stages.test_lora import adapted
from tests.tiny_models import load_reference

__all__ = [
    "test_answers_move_between_decode_workers",
    "test_answers_of_workers_and_from_their_caches",
    "test_chunked_and_packed",
    "test_epd_verify_says_equal",
    "test_preemption_changes_no_token",
    "test_several_answers_share_their_prompt",
]

SAMPLING, FACTS = FrameSampling(num_frames=6), VideoFacts(6, 2.0, 90, 120)
# Of images and videos, and of two of each, what `generate` does not take.
MIXES = (
    ("image", "video"),
    ("image", "wide_image", "video", "tall_video"),
    ("video", "tall_video"),
)
TWO_IMAGES = ("wide_image", "image")
# As Molmo2-O has it: norms over whole projections, behind attention and MLP, and positions that are scaled
# in some layers.
OLMO: dict[str, Any] = {
    "qk_norm_type": "olmo",
    "norm_after": True,
    "rope_scaling_layers": [1],
    "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_molmo2(tmp_path_factory.mktemp("molmo") / "model")


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return load_reference(folder)


@pytest.fixture(scope="module")
def subject(folder: Path, media: dict[str, Path]) -> Subject:
    return make("molmo2", folder, media)


@torch.inference_mode()
def their_prompt(model: Any, folder: Path, paths: list[Path]) -> tuple[Tensor, Tensor]:
    """Token embeddings [T, C] with features of media, and the kinds of tokens [T]: 0 for texts."""
    processor = AutoProcessor.from_pretrained(folder)
    processor.validate_inputs = lambda **_: None  # which allows one video
    inputs = processor_inputs(processor, paths, QUESTION, SAMPLING)
    ids, base, rows = inputs["input_ids"][0], model.model, list[Tensor]()
    found: dict[str, list[Tensor]] = {"image": [], "video": []}
    if "pixel_values" in inputs:
        names = ("pixel_values", "image_token_pooling", "image_grids")
        given = {name: inputs[name] for name in names}
        found["image"] = list(base.get_image_features(**given, return_dict=True).pooler_output)
    if "pixel_values_videos" in inputs:
        names = ("pixel_values_videos", "video_token_pooling", "video_grids")
        given = {name: inputs[name] for name in names}
        found["video"] = list(base.get_video_features(**given, return_dict=True).pooler_output)
    rows = [found["video" if path.suffix == ".mp4" else "image"].pop(0) for path in paths]
    embeds = model.get_input_embeddings()(ids).clone()
    if rows:
        embeds[ids == model.config.image_patch_id] += torch.cat(rows)
    return embeds, inputs["mm_token_type_ids"][0]


@torch.inference_mode()
def their_logits(model: Any, embeds: Tensor, kinds: Tensor) -> Tensor:
    """Of all tokens, [T, V]: one sees those before it, and one of media all others of media."""
    at, is_media = torch.arange(len(embeds)), torch.zeros(len(embeds), dtype=torch.bool)
    is_media[: len(kinds)] = kinds > 0
    is_seen = (at <= at[:, None]) | (is_media & is_media[:, None])
    mask = torch.where(is_seen, 0.0, -torch.inf)[None, None]
    hidden = model.get_decoder()(inputs_embeds=embeds[None], attention_mask=mask, use_cache=False)
    logits: Tensor = model.lm_head(hidden.last_hidden_state)[0]
    return logits


def answered(model: Any, folder: Path, paths: list[Path]) -> tuple[int, ...]:
    """Greedy tokens, each from all tokens before it, computed again."""
    embeds, kinds = their_prompt(model, folder, paths)
    tokens, ends = list[int](), model.generation_config.eos_token_id
    while len(tokens) < MAX_TOKENS and (not tokens or tokens[-1] not in ends):
        tokens.append(int(their_logits(model, embeds, kinds)[-1].argmax()))
        embeds = torch.cat([embeds, model.get_input_embeddings()(torch.tensor(tokens[-1:]))])
    return tuple(tokens)


def test_the_mask_is_that_of_generate(theirs: Any, folder: Path, media: dict[str, Path]) -> None:
    """So that it may stand for `generate` where that takes no such prompt."""
    for names in ((), ("image",), TWO_IMAGES, ("video",)):
        paths = [media[name] for name in names]
        inputs = processor_inputs(AutoProcessor.from_pretrained(folder), paths, QUESTION, SAMPLING)
        assert answered(theirs, folder, paths) == generated_as_it_is(theirs, inputs), names


@pytest.mark.parametrize("names", MIXES, ids="-".join)
def test_several_kinds_and_several_videos(
    theirs: Any, folder: Path, media: dict[str, Path], names: tuple[str, ...]
) -> None:
    paths = [media[name] for name in names]
    pipeline = ColocatedPipeline.load(folder, EngineConfig(group_tokens=1))
    answer = pipeline.ask(paths, QUESTION, num_frames=6, max_tokens=MAX_TOKENS)
    assert answer.token_ids == answered(theirs, folder, paths)


def test_logits_equal_transformers(
    subject: Subject, theirs: Any, folder: Path, media: dict[str, Path]
) -> None:
    """And would not, if media saw only what is before them, or replaced the embeddings of their places."""
    paths = [media[name] for name in MIXES[1]]
    prompt = prompt_of(subject.adapter, subject.model, paths, QUESTION, SAMPLING, group_tokens=1000)
    visual = concatenated([group.embeddings for group in prompt.groups])
    segment = segment_of(prompt.plan, visual, np.empty(0, np.int64))
    embeds, kinds = their_prompt(theirs, folder, paths)
    wanted, length = their_logits(theirs, embeds, kinds), len(prompt.plan)
    probe = LayerProbe.of(subject.model, subject.adapter, length)
    torch.testing.assert_close(probe.logits(segment, length), wanted, rtol=1e-4, atol=1e-4)
    assert (probe.logits(replace(segment, both_ways=None), length) - wanted).abs().max() > 0.1
    probe._adds = False
    assert (probe.logits(segment, length) - wanted).abs().max() > 0.1


@pytest.fixture(scope="module")
def mixes(theirs: Any, folder: Path, media: dict[str, Path]) -> Mixes:
    asked = [[media[name] for name in names] for names in ((), TWO_IMAGES, *MIXES)]
    return [(paths, answered(theirs, folder, paths)) for paths in asked]


# What is known of a token


@pytest.mark.parametrize("block_size", [1, 16])
def test_keys_and_values_are_shared_where_all_media_are_the_same(
    subject: Subject, theirs: Any, folder: Path, media: dict[str, Path], block_size: int
) -> None:
    """Of another last medium, only what is before the first; features are those of each medium alone."""
    of = partial(prompt_of, subject.adapter, subject.model, sampling=SAMPLING, group_tokens=1000)
    paths = [[media["image"], media[last]] for last in ("wide_image", "image")]
    first, other = (of(each, question=QUESTION) for each in paths)
    again = of(paths[0], question="Why?")
    engine = subject.engine(block_size=block_size, enable_prefix_caching=True)
    drive, span = Drive(engine, 0), first.plan.both_ways_range
    tokens = drive.run({"first": first})
    if block_size == 1:
        assert engine.kv.num_cached(again.request("again").identity) >= span.stop
        assert engine.kv.num_cached(other.request("other").identity) == span.start > 0
    tokens |= drive.run({"other": other, "first again": first})
    wanted = [answered(theirs, folder, each)[: len(tokens["first"])] for each in paths]
    assert [tokens["first"], tokens["other"]] == wanted
    assert tokens["first again"] == tokens["first"]
    keys = [
        plan_groups([each.plan.media[0].plan], ["image"], model="", group_tokens=1000)[0].spec.key
        for each in (first, other)
    ]
    assert keys[0] == keys[1]


def test_words_between_media_are_known_by_all_of_them(subject: Subject) -> None:
    """Those are the times of frames."""
    plans = [
        subject.adapter.plan_image(90, 120),
        subject.adapter.plan_video(FACTS, SAMPLING),
    ]
    prompt = subject.adapter.plan_prompt(plans, QUESTION)
    one, two = (prompt_identity(prompt, ["a", last]).rows for last in ("b", "c"))
    assert prompt.both_ways is not None
    is_equal = (one == two).all(1)
    span = prompt.both_ways_range
    between = np.flatnonzero(~prompt.both_ways[span.start : span.stop])
    assert len(between) > 0
    assert not is_equal[span.start : span.stop].any()
    assert is_equal[: span.start].all()
    assert is_equal[span.stop :].all()
    assert prompt.prefix_length == span.stop > prompt.media[-1].units[-1].stop


def test_a_mark_of_media_in_an_answer_is_text(subject: Subject, theirs: Any) -> None:
    prompt = subject.adapter.plan_prompt([], QUESTION)
    assert prompt.both_ways is None
    answer = np.array([theirs.config.image_start_token_id, 65, theirs.config.frame_end_token_id, 66])
    length = len(prompt) + len(answer)
    probe = LayerProbe.of(subject.model, subject.adapter, length)
    ids = torch.from_numpy(np.concatenate([prompt.token_ids, answer]))
    with torch.inference_mode():
        wanted = their_logits(theirs, theirs.get_input_embeddings()(ids), torch.zeros(0))
    torch.testing.assert_close(
        probe.logits(segment_of(prompt, None, answer), length), wanted, rtol=1e-4, atol=1e-4
    )


# Weights


def _as_published(folder: Path) -> None:
    """The embedding's last rows by themselves: 10 of them, where transformers writes half."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    names = [f"model.transformer.wte.{name}" for name in ("embedding", "new_embedding")]
    rows = torch.cat([tensors[name] for name in names])
    tensors |= {names[0]: rows[:-10].clone(), names[1]: rows[-10:].clone()}
    save_file(tensors, path, {"format": "pt"})


def _as_transformers_names_it(folder: Path) -> None:
    load_reference(folder).save_pretrained(folder, save_original_format=False)


@pytest.mark.parametrize("change", [None, _as_published, _as_transformers_names_it])
def test_weights_are_those_of_transformers(tmp_path: Path, change: Callable[[Path], None] | None) -> None:
    folder = build_molmo2(tmp_path / "model", num_key_value_heads=1)
    known = load_reference(folder).state_dict()
    if change is not None:
        change(folder)
    read = load_role(folder, "whole", CPU_FLOAT32).model.state_dict()
    assert read.keys() == known.keys()
    assert [name for name in known if not torch.equal(known[name], read[name])] == []
    write_weights(folder, torch.float32, tmp_path / "weights")
    mapped = WholeModel(folder, CPU_FLOAT32, tmp_path / "weights").part("language").state_dict()
    assert [name for name in mapped if not torch.equal(known[name], mapped[name])] == []


def test_an_embedding_that_lacks_rows_is_refused(tmp_path: Path) -> None:
    folder = build_molmo2(tmp_path / "model")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "model.transformer.wte.new_embedding"
    save_file(tensors | {name: tensors[name][:-1].clone()}, path, {"format": "pt"})
    with pytest.raises(ModelError, match=r"has 268 rows in its parts, the model wants 269"):
        load_role(folder, "language", CPU_FLOAT32)


def test_the_published_one_has_as_many_parameters_as_its_files_say(tmp_path: Path) -> None:
    (published,) = PUBLISHED.values()
    model: Any = skeleton(written(published.config, tmp_path), torch.bfloat16)
    assert sum(each.numel() for each in model.parameters()) == published.num_parameters
    assert kv_bytes_per_token(model) == published.kv_bytes_per_token
    assert isinstance(decoder_of(model, None), FusedDecoder)
    assert largest_prefill(model, 2048) == published.context_tokens, "media are computed at once"


def test_layers_of_another_kind_are_those_of_transformers(media: dict[str, Path], tmp_path: Path) -> None:
    folder = build_molmo2(tmp_path / "olmo", **OLMO)
    subject = make("molmo2", folder, media)
    check(subject, Drive(subject.engine(), 0), 4)
    decoder = decoder_of(load_reference(folder), subject.adapter)
    assert isinstance(decoder, ModulesDecoder)


def test_layers_as_qwen3_has_them_are_ours(folder: Path) -> None:
    assert isinstance(decoder_of(load_reference(folder), None), FusedDecoder)


# What is refused


def test_what_it_cannot_do_is_refused_in_one_line(folder: Path, subject: Subject) -> None:
    with pytest.raises(UnsupportedMediaError, match="hears nothing"):
        _ = subject.adapter.audio
    with pytest.raises(
        RequestError, match=r"fastkv for a 'molmo2' model, whose layers have media that attend"
    ):
        check_reduction(folder, "fastkv")
    check_reduction(folder, "evs")
    image, video = subject.adapter.plan_image(90, 120), subject.adapter.plan_video(FACTS, SAMPLING)
    with pytest.raises(RequestError, match="in another order"):
        subject.adapter.plan_prompt([video, image], QUESTION)
    with pytest.raises(UnsupportedModelError, match="a tensor parallel size of 2 for the language model"):
        check_divisible(load_reference(folder), 2)


@pytest.mark.parametrize("method", ["quickprefill", "fastkv", "funnel", "mustdrop"])
def test_methods_inside_of_the_language_model_are_refused(
    folder: Path, media: dict[str, Path], method: str
) -> None:
    pipeline = ColocatedPipeline.load(folder, EngineConfig(group_tokens=1))
    with pytest.raises(RequestError, match=f"{method} for a model whose media attend each other"):
        pipeline.ask(
            [media["video"]], QUESTION, num_frames=6, max_tokens=4, reduction=ReductionPolicy(method, 0.5)
        )


@pytest.mark.parametrize("method", SELECTION_METHODS)
def test_those_before_it_keep_what_attends_each_other(
    folder: Path, media: dict[str, Path], subject: Subject, method: str
) -> None:
    half = ReductionPolicy(method, 0.5)
    plans = [plan_media(subject.adapter, media[name], SAMPLING).plan for name in ("image", "video")]
    prompt = reduce_prompt(subject.adapter.plan_prompt(plans, QUESTION), half)
    marks = AutoProcessor.from_pretrained(folder).image_token_ids
    assert prompt.both_ways is not None
    assert prompt.both_ways.tolist() == np.isin(prompt.token_ids, marks).tolist()
    pipeline = ColocatedPipeline.load(folder, EngineConfig(group_tokens=1))
    answer = pipeline.ask([media["video"]], QUESTION, num_frames=6, max_tokens=4, reduction=half)
    assert 0 < answer.usage.visual_tokens < answer.usage.visual_tokens_before
    assert len(answer.token_ids) == 4


def test_a_lora_adapter_is_served_as_its_merged_model(
    folder: Path, subject: Subject, media: dict[str, Path], tmp_path: Path
) -> None:
    """Its names are those of transformers' modules, whose matrices are merged in the model's files."""
    merged, tensors, draw = load_reference(folder), dict[str, Tensor](), torch.Generator().manual_seed(0)
    for name, module in merged.named_modules():
        if isinstance(module, torch.nn.Linear) and ".language_model.layers." in name:
            rows, columns = module.weight.shape
            a = torch.randn(4, columns, generator=draw) * columns**-0.5
            b = torch.randn(rows, 4, generator=draw) * module.weight.detach().std()
            module.weight.data += 2 * b @ a
            start = f"base_model.model.{name}"
            tensors |= {f"{start}.lora_A.weight": a, f"{start}.lora_B.weight": b}
    merged.save_pretrained(shutil.copytree(folder, tmp_path / "merged"))
    adapter = write_adapter(tmp_path / "adapter", peft_config(ALL, 4, 8), tensors)
    theirs = make("molmo2", tmp_path / "merged", media).prompts
    prompts = {str(number): adapted(prompt, "all") for number, prompt in enumerate(theirs)}
    tokens = Drive(subject.engine(lora_modules=frozenset({f"all={adapter}"})), 0).run(prompts)
    assert tokens == {name: prompt.expected for name, prompt in prompts.items()}
    assert tokens != {str(number): prompt.expected for number, prompt in enumerate(subject.prompts)}
