"""Writes a checkpoint of published size and layout, with random weights made on the device."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig

from epd.stages.loading.weights import skeleton
from epd.stages.placement import Placement
from tests.models import shrunk
from tests.models.files import name_in_files
from tests.models.published import PUBLISHED, Config

_FILE_BYTES = 4 * 10**9
_SCALE = 0.02  # of the initial weights of these models
_MAX_TILES = 12  # of an image, without the one that shows all of it, as InternVL's processor has it


def write_full(checkpoint: str, folder: Path, frame_size: tuple[int, int], placement: Placement) -> Path:
    """Writes config, processor and weights in the placement's type; frames are decoded at `frame_size`."""
    write_config(checkpoint, folder, frame_size)
    _write_weights(checkpoint, folder, placement)
    return folder


def write_config(checkpoint: str, folder: Path, frame_size: tuple[int, int]) -> None:
    """Writes config and processor.

    Its tokenizer is one of bytes, so its special tokens have other numbers than the published ones.
    InternVL's tiles have the published size, whatever frame_size is.
    """
    published = PUBLISHED[checkpoint].config
    processor = shrunk.processor_of(published)
    if published["model_type"] == "internvl":
        _set_tiles(processor, published)
    else:
        for part in (processor.image_processor, processor.video_processor):
            part.size = {"shortest_edge": 56 * 56, "longest_edge": frame_size[0] * frame_size[1]}
    processor.save_pretrained(folder)
    config = published | shrunk.special_ids(published, processor.tokenizer)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _set_tiles(processor: Any, published: Config) -> None:
    """Sets what the published processor of InternVL says of tiles."""
    height, width = published["vision_config"]["image_size"]
    for part in (processor.image_processor, processor.video_processor):
        part.size = {"height": height, "width": width}
    processor.image_processor.max_patches = _MAX_TILES
    processor.image_seq_length = published["image_seq_length"]


def _write_weights(checkpoint: str, folder: Path, placement: Placement) -> None:
    model = skeleton(AutoConfig.from_pretrained(folder, local_files_only=True), placement.dtype)
    places, weight_map = model.state_dict(), {}
    if not PUBLISHED[checkpoint].has_head:
        places.pop("lm_head.weight")
    for number, names in enumerate(_files(places)):
        file = f"model-{number + 1:05d}.safetensors"
        tensors = {name_in_files(checkpoint, name): _random(places[name], placement) for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    index: dict[str, Any] = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _files(places: dict[str, Tensor]) -> Iterator[list[str]]:
    """The names of tensors that share a file."""
    names: list[str] = []
    size = 0
    for name, tensor in places.items():
        if names and size + tensor.nbytes > _FILE_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensor.nbytes
    yield names


def _random(place: Tensor, placement: Placement) -> Tensor:
    """Weights of a matrix, or the ones of a norm and the zeros of a bias: on the CPU, made on the device."""
    made = torch.empty(place.shape, dtype=placement.dtype, device=placement.device)
    return (made.fill_(1.0) if place.ndim == 1 else made.normal_(std=_SCALE)).cpu()
