"""The embedded model is read without transformers as with it, and its tower computes the same."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import vision_utils
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as smart_resize_frames
from transformers.utils.chat_template_utils import render_jinja_template

from epd.encoders import load_adapter
from epd.encoders.adapter import PatchRun
from epd.encoders.checkpoint import open_checkpoint, read_config, read_generation_config
from epd.encoders.device import CPU
from epd.encoders.embedded import PlainConfig, PlainTokenizer, is_embedded
from epd.encoders.families.qwen_tower import TableGeometry, tabled_inputs
from epd.encoders.families.qwen_vl import frame_size, image_size
from epd.encoders.plans import Grid
from epd.encoders.sampling import SourceMetadata
from epd.models import embedded_model_path, embedded_models
from epd.stages.engine.generation import GenerationSettings
from epd.stages.loading.weights import load_role
from epd.stages.placement import CPU_FLOAT32

FOLDER = embedded_model_path("shapes-vl-2")
GRIDS = (Grid(2, 6, 10), Grid(1, 2, 16), Grid(3, 8, 8))
TEXTS = [
    "Which shape appears first?",
    "<|im_start|>user\n<|vision_start|><|video_pad|><|vision_end|>Wörter, 数字 12345 and 🟧\n<|im_end|>",
    "",
]


@cache
def theirs() -> Any:
    return transformers.AutoProcessor.from_pretrained(FOLDER, local_files_only=True)


def ours() -> Any:
    return open_checkpoint(FOLDER).processor


def test_only_what_leaves_nothing_to_defaults_is_read_without_transformers(tmp_path: Path) -> None:
    assert [name for name in embedded_models() if is_embedded(embedded_model_path(name))] == ["shapes-vl-2"]
    copied = shutil.copytree(FOLDER, tmp_path / "shapes-vl-2")
    assert not is_embedded(copied)
    assert isinstance(read_config(copied), transformers.Qwen3VLConfig)


def test_the_configuration_is_that_of_transformers() -> None:
    published = transformers.AutoConfig.from_pretrained(FOLDER, local_files_only=True)
    plain = read_config(FOLDER)
    for part in ("text_config", "vision_config"):
        for name, value in vars(getattr(plain, part)).items():
            assert getattr(getattr(published, part), name) == value, f"{part}.{name}"
    assert plain.get_text_config() is plain.text_config
    assert isinstance(plain.text_config.get_text_config(), PlainConfig)
    names = [f"{kind}_token_id" for kind in ("image", "video", "vision_start", "vision_end")]
    assert [getattr(plain, name) for name in names] == [getattr(published, name) for name in names]


def test_generation_is_that_of_transformers() -> None:
    published = transformers.GenerationConfig.from_pretrained(FOLDER, local_files_only=True)
    assert GenerationSettings.of(read_generation_config(FOLDER), None) == GenerationSettings.of(
        published, None
    )


def test_the_tokenizer_is_that_of_transformers() -> None:
    plain, published = ours().tokenizer, theirs().tokenizer
    assert isinstance(plain, PlainTokenizer)
    for text in TEXTS:
        ids = published(text)["input_ids"]
        assert plain(text)["input_ids"] == ids
        assert plain.convert_ids_to_tokens(ids) == published.convert_ids_to_tokens(ids)
        tokens = published.convert_ids_to_tokens(ids)
        assert plain.convert_tokens_to_ids(tokens) == published.convert_tokens_to_ids(tokens)
        for skips in (False, True):
            wanted = published.decode(ids, skip_special_tokens=skips)
            assert plain.decode(ids, skip_special_tokens=skips) == wanted
    assert plain(TEXTS, add_special_tokens=False)["input_ids"] == published(TEXTS)["input_ids"]
    assert (len(plain), plain.get_vocab()) == (len(published), published.get_vocab())
    assert plain.eos_token_id == published.eos_token_id
    assert plain.special_tokens_map == published.special_tokens_map


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "What?"}]}],
        [{"role": "system", "content": "Be kind."}, {"role": "user", "content": [{"type": "image"}]}],
    ],
)
def test_the_template_is_rendered_as_by_transformers(messages: list[dict[str, Any]]) -> None:
    tokenizer = ours().tokenizer
    (wanted,), _ = render_jinja_template(
        [messages], chat_template=tokenizer.chat_template, add_generation_prompt=True
    )
    rendered = tokenizer.apply_chat_template(
        messages,
        chat_template=tokenizer.chat_template,
        tokenize=False,
        add_generation_prompt=True,
        tools=None,
    )
    assert rendered == wanted


@pytest.mark.parametrize("asked", [{}, {"fps": 0.3}, {"fps": 7.0}, {"num_frames": 2}, {"num_frames": 11}])
@pytest.mark.parametrize("video", [(5, 30.0), (97, 24.0), (90_000, 25.0)])
def test_frames_are_sampled_as_by_transformers(video: tuple[int, float], asked: dict[str, Any]) -> None:
    metadata = SourceMetadata(*video, video[0] / video[1])
    wanted = theirs().video_processor.sample_frames(metadata, **asked)
    assert ours().video_processor.sample_frames(metadata, **asked).tolist() == wanted.tolist()


@pytest.mark.parametrize("limits", [(2048, 6144), (65536, 1 << 24), (1, 10_000)])
@pytest.mark.parametrize(
    "size", [(1, 1), (5, 31), (64, 64), (360, 640), (1080, 1920), (10, 2000), (4321, 33)]
)
@pytest.mark.parametrize("num_frames", [2, 3, 64])
def test_sizes_are_those_of_the_processors(
    size: tuple[int, int], num_frames: int, limits: tuple[int, int]
) -> None:
    image = smart_resize(*size, 32, *limits)
    assert image_size(*size, 32, *limits) == image
    frames = smart_resize_frames(num_frames, *size, 2, 32, *limits)
    assert frame_size(num_frames, 2, *size, 32, *limits) == frames


def test_no_shape_is_refused_by_one_alone() -> None:
    for size in ((1, 200), (1, 201), (32, 6433)):
        told = []
        for resize in (smart_resize, image_size):
            try:
                told.append(resize(*size, 32, 2048, 6144))
            except ValueError as error:
                told.append(str(error))
        assert told[0] == told[1]


def test_the_places_of_patches_are_those_of_transformers() -> None:
    found = tabled_inputs(GRIDS, TableGeometry(2, 8), CPU)
    grid = torch.tensor([[each.t, each.h, each.w] for each in GRIDS])
    indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
        grid, 8, align_corners=True, spatial_merge_size=2
    )
    assert torch.equal(found["interp_indices"], indices)
    assert torch.equal(found["interp_weights"], weights)
    assert torch.equal(found["position_ids"], vision_utils.get_vision_position_ids(grid, 2))
    assert torch.equal(found["cu_seqlens"], vision_utils.get_vision_cu_seqlens(grid))
    assert found["cu_seqlens"].dtype == torch.int32


def test_the_modules_are_those_of_transformers_and_the_tower_computes_the_same(tmp_path: Path) -> None:
    """Of a copy of the folder, transformers creates the modules."""
    copied = shutil.copytree(FOLDER, tmp_path / "model")
    plain, published = (load_role(each, "whole", CPU_FLOAT32).model for each in (FOLDER, copied))
    names = [dict(model.named_parameters()).keys() for model in (plain, published)]
    assert names[0] == names[1]
    adapter = load_adapter(FOLDER)
    patches = torch.randn(sum(grid.num_patches for grid in GRIDS), 3 * 2 * 16 * 16)
    parts = patches.split([grid.num_patches for grid in GRIDS])
    runs = [PatchRun("video", part, grid) for part, grid in zip(parts, GRIDS, strict=True)]
    with torch.inference_mode():
        rows = [adapter.encode_batch(adapter.vision_tower(model), runs) for model in (plain, published)]
    for one, other in zip(*rows, strict=True):
        torch.testing.assert_close(one.rows, other.rows)
    rotary = [model.get_decoder().rotary_emb for model in (plain, published)]
    assert torch.equal(rotary[0].inv_freq, rotary[1].inv_freq)
    assert rotary[0].attention_scaling == rotary[1].attention_scaling
    assert list(rotary[0].mrope_section) == list(rotary[1].mrope_section)
