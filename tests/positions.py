"""The M-RoPE positions that Qwen2-VL and Qwen2.5-VL were trained with, token by token and apart.

The rule of the authors' code (transformers 4.49 to 5.2) and of vLLM: each run of text begins one behind the
largest position before it, on any axis. transformers from 5.3 on begins it behind rows and columns alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from epd.encoders import Adapter, load_adapter

GRID_INPUTS = (
    "image_grid_thw",
    "video_grid_thw",
    "second_per_grid_ts",
    "target_sizes",
    "target_sizes_videos",
)


def authors_positions(config: Any, inputs: Any) -> Tensor:
    """Positions int64 [3, T] of the one prompt in a processor's `inputs`; Qwen2-VL's tell no seconds."""
    (ids,) = inputs["input_ids"].tolist()
    images = iter(_rows(inputs, "image_grid_thw"))
    grids = _rows(inputs, "video_grid_thw")
    videos = iter(zip(grids, _rows(inputs, "second_per_grid_ts") or [1.0] * len(grids), strict=True))
    found: list[tuple[int, int, int]] = []
    while len(found) < len(ids):
        start = 1 + max((max(each) for each in found), default=-1)
        if ids[len(found)] == config.image_token_id:
            found += _visual(config, next(images), 0.0, start)
        elif ids[len(found)] == config.video_token_id:
            found += _visual(config, *next(videos), start)
        else:
            found.append((start, start, start))
    return torch.tensor(found).T


def _rows(inputs: Any, name: str) -> Sequence[Any]:
    return torch.as_tensor(inputs[name]).tolist() if inputs.get(name) is not None else ()


def _visual(config: Any, grid: Sequence[int], seconds: float, start: int) -> Iterator[tuple[int, int, int]]:
    frames, rows, columns = grid[0], *(size // config.vision_config.spatial_merge_size for size in grid[1:])
    for frame, row, column in product(range(frames), range(rows), range(columns)):
        time = torch.tensor(float(frame)) * seconds * getattr(config.vision_config, "tokens_per_second", 1)
        yield start + int(time), start + row, start + column


def has_authors_layout(model: Any) -> bool:
    """Whether the checkpoint was trained with positions that the installed transformers has no more."""
    is_of_them = model.config.model_type in ("qwen2_vl", "qwen2_5_vl")
    return is_of_them and not hasattr(model.config, "position_layout")


def trained_positions_in(model: Any) -> AbstractContextManager[Any]:
    """While open, forward and `generate` use the positions that the checkpoint was trained with."""
    return authors_positions_in(model) if has_authors_layout(model) else nullcontext()


def authors_positions_in(model: Any) -> AbstractContextManager[Any]:
    """While open, forward and `generate` of a Qwen2.5-VL model use the authors' positions."""

    def get_rope_index(input_ids: Tensor, *_: Any, **inputs: Any) -> tuple[Tensor, Tensor]:
        positions = authors_positions(model.config, {**inputs, "input_ids": input_ids})
        return positions[:, None], torch.tensor([[int(positions.max()) + 1 - positions.shape[1]]])

    return mock.patch.object(model.model, "get_rope_index", get_rope_index)


def expected_positions(model: Any, inputs: Any) -> tuple[list[list[int]], int]:
    """(positions, the one that comes next) as the checkpoint was trained."""
    if not has_authors_layout(model):
        return positions_in_transformers(model, inputs)
    positions = authors_positions(model.config, inputs)
    return positions.tolist(), int(positions.max()) + 1


def positions_in_transformers(model: Any, inputs: Any) -> tuple[list[list[int]], int]:
    """The same as the installed transformers has it. Skips the test where that cuts seconds."""
    skip_where_seconds_are_cut(model, inputs)
    names = ("input_ids", "mm_token_type_ids", *GRID_INPUTS)
    positions, delta = model.model.get_rope_index(**{name: inputs[name] for name in names if name in inputs})
    return positions[:, 0].tolist(), inputs["input_ids"].shape[1] + int(delta)


def skip_where_seconds_are_cut(model: Any, inputs: Any) -> None:
    """Skips a comparison that the installed transformers would get wrong.

    Releases near 5.17 cut `second_per_grid_ts` to whole seconds (`int(...)` in Qwen2.5-VL's get_rope_index);
    later ones, like the authors' code, do not. Where it is whole already, all agree and nothing is skipped.
    """
    seconds = inputs.get("second_per_grid_ts")
    if seconds is not None and not torch.equal(seconds, seconds.trunc()) and _cuts_seconds(model):
        pytest.skip("this release of transformers cuts the seconds between temporal patches to whole numbers")


def _cuts_seconds(model: Any) -> bool:
    side = model.config.vision_config.spatial_merge_size
    half_a_second = torch.tensor([0.5])
    positions, _ = model.model.get_rope_index(
        torch.zeros(1, 2, dtype=torch.long),
        torch.full((1, 2), 2),
        video_grid_thw=torch.tensor([[2, side, side]]),
        second_per_grid_ts=half_a_second,
    )
    return int(positions[0, 0, 1]) == 0


@cache
def adapter_like_transformers(path: Path) -> Adapter:
    """An adapter under the switch: text stands where the installed transformers places it."""
    return load_adapter(path, positions="transformers")
