"""InternVL in its authors' layout gives the answers of the same checkpoint in transformers' layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from epd.encoders import load_adapter
from epd.engine_config import EngineConfig
from epd.errors import ModelError, UnsupportedModelError
from epd.stages.loading.weight_files import num_weight_bytes, write_weights
from epd.stages.loading.weights import WholeModel, load_role
from epd.stages.placement import CPU_FLOAT32
from tests.colocated import ColocatedPipeline
from tests.encoders.tiny_tiles import build_internvl
from tests.models import authors_internvl

QUESTION = "What is shown?"
CONFIG = EngineConfig(device="cpu", dtype="float32")
# What the published template writes, in short.
TEMPLATE = (
    "{% for each in messages %}{{ '<|im_start|>' + each.role + '\\n' }}{% for part in each.content %}"
    "{{ {'image': '<IMG_CONTEXT>\\n', 'video': '<video>\\n'}.get(part.type) or part.text }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{{ '<|im_start|>assistant\\n' if add_generation_prompt else '' }}"
)


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """transformers' layout, with the settings of pictures that the published files have, and the authors'."""
    folder = tmp_path_factory.mktemp("internvl")
    theirs = build_internvl(folder / "hf")
    processor = json.loads((theirs / "processor_config.json").read_text(encoding="utf-8"))
    imagenet = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225], "resample": 3}
    for kind in ("image_processor", "video_processor"):
        processor[kind] |= imagenet
    (theirs / "processor_config.json").write_text(json.dumps(processor), encoding="utf-8")
    (theirs / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return theirs, authors_internvl.write(theirs, folder / "authors")


def test_answers_are_those_of_the_other_layout(layouts: tuple[Path, Path], media: dict[str, Path]) -> None:
    theirs, authors = (ColocatedPipeline.load(path, CONFIG) for path in layouts)
    for names in ([], ["image"], ["wide_image", "image"], ["video"], ["video", "image"]):
        paths = [media[name] for name in names]
        expected = theirs.ask(paths, QUESTION, max_tokens=12)
        assert authors.ask(paths, QUESTION, max_tokens=12).token_ids == expected.token_ids


@pytest.mark.parametrize("role", ["encode", "language", "whole"])
def test_weights_are_those_of_the_other_layout(layouts: tuple[Path, Path], role: str, tmp_path: Path) -> None:
    theirs, authors = (load_role(path, role, CPU_FLOAT32).model.state_dict() for path in layouts)  # type: ignore[arg-type]
    assert authors.keys() == theirs.keys()
    assert all(torch.equal(authors[name], theirs[name]) for name in theirs)
    assert num_weight_bytes(layouts[1], torch.float32) == num_weight_bytes(layouts[0], torch.float32)


def test_workers_may_map_them(layouts: tuple[Path, Path], tmp_path: Path) -> None:
    write_weights(layouts[1], torch.float32, tmp_path / "weights")
    mapped = WholeModel(layouts[1], CPU_FLOAT32, tmp_path / "weights").part("encode").state_dict()
    read = load_role(layouts[0], "encode", CPU_FLOAT32).model.state_dict()
    assert all(torch.equal(mapped[name], read[name]) for name in read)


def test_the_prompt_and_the_pictures_are_those_of_the_other_layout(layouts: tuple[Path, Path]) -> None:
    adapters = [load_adapter(path) for path in layouts]
    plans = [each.plan_prompt([each.plan_image(60, 90)], QUESTION) for each in adapters]
    assert plans[0].token_ids.tolist() == plans[1].token_ids.tolist()
    for kind in ("image_processor", "video_processor"):
        theirs, ours = (getattr(each.checkpoint.processor, kind).to_dict() for each in adapters)
        assert {name: ours[name] for name in theirs} == theirs


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ps_version": "v1"}, "ps_version 'v1'; allowed: 'v2'"),
        ({"select_layer": -2}, "select_layer -2; allowed: -1"),
        ({"force_image_size": 448}, "force_image_size 448; allowed: 28"),
        ({"llm_config": {"model_type": "internlm2"}}, "the language model 'internlm2'; allowed: qwen2"),
    ],
)
def test_what_transformers_does_not_compute_is_refused(
    layouts: tuple[Path, Path], tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    folder = authors_internvl.write(layouts[0], tmp_path / "other", **changes)
    with pytest.raises(UnsupportedModelError, match=f"is an 'internvl_chat' model with {said}.*ends in -hf"):
        load_adapter(folder)


def test_a_tokenizer_without_the_token_of_embeddings_is_refused(
    layouts: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = authors_internvl.write(layouts[0], tmp_path / "other")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / name).read_text(encoding="utf-8").replace("<IMG_CONTEXT>", "<CONTEXT>")
        (folder / name).write_text(text, encoding="utf-8")
    with pytest.raises(ModelError, match="has no <IMG_CONTEXT>; get its files again"):
        load_adapter(folder)
