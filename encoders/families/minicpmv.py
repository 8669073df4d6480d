"""Adapts MiniCPM-V 4.6 and 4.7: a picture is an overview, and slices of the same picture made larger.

    image 900 x 600    <image> overview </image><slice> 0 </slice><slice> 1 </slice>\\n<slice> 2 </slice> ...
    video              the same for each frame, most often without slices      a unit is a frame

Slices are of one size, the overview of another, and the tower sees each by itself. The pixels of a picture
travel token by token, in the order of the prompt:

    overview | 0 1 |   slices | 4 5 | 6 7 |     bytes | 0 1 2 3 4 5 6 7 ...      one row of squares
             | 2 3 |

A token is 4 x 4 patches, side by side in a batch: the tower joins four windows of 2 x 2 without sorting
them. In mode 4x it is 2 x 2 patches, which the tower does not join. P patches, C channels of the tower.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.vision_utils import get_vision_nearest_position_ids

from epd.chat import ChatMessage
from epd.encoders.adapter import BaseAdapter, Embeddings, PatchRun, TowerMerger
from epd.encoders.checkpoint import Checkpoint
from epd.encoders.device import CPU, to_device
from epd.encoders.families.interfaces import model_class, position_rule
from epd.encoders.families.qwen_tower import attend_alike, attend_runs
from epd.encoders.families.tiles import TileSpec, tile_spec
from epd.encoders.patches import PatchSpec, patchify
from epd.encoders.plans import Grid, MediaItem, MediaPlan, PromptPlan, VideoFacts
from epd.encoders.prompt.text_layout import ItemText, Markers, plan_text_prompt
from epd.encoders.sampling import sample_by_rule, select_frames
from epd.errors import MediaLimitError, UnsupportedModelError
from epd.frame_sampling import FrameSampling
from epd.pixel_limits import OWN_LIMITS, PixelLimits, refuse
from epd.reduction import TowerMerge
from epd.types import MediaKind

_BICUBIC = 3
_MAX_GRIDS = 32
# Attends query, key and value [P, H, D].
_Attend = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class SlicedGrid(Grid):
    """Counts the patches of an overview, h x w, and of rows x columns slices, slice_h x slice_w each."""

    rows: int = 0
    columns: int = 0
    slice_h: int = 0
    slice_w: int = 0

    @property
    def num_patches(self) -> int:
        return self.t * sum(high * wide for high, wide in self.tiles)

    @property
    def num_tiles(self) -> int:
        return 1 + self.rows * self.columns

    @property
    def tiles(self) -> list[tuple[int, int]]:
        """Returns height and width of each tile of a unit, in patches."""
        return [(self.h, self.w), *[(self.slice_h, self.slice_w)] * (self.num_tiles - 1)]


@dataclass(frozen=True, slots=True)
class SlicedPlan(MediaPlan):
    """Adds shown_size, (height, width) of the picture that the slices show, or else the overview, pixels."""

    shown_size: tuple[int, int] = (0, 0)

    @property
    def resized(self) -> tuple[int, int]:
        return self.shown_size


@dataclass(frozen=True, slots=True)
class SliceSpec:
    """Sizes pictures and cuts them as one processor of transformers, image or video, does.

    merge: patches of a visual token's edge.
    """

    processor: Any
    tile: TileSpec
    merge: int

    @classmethod
    def of(cls, processor: Any) -> SliceSpec:
        """Raises UnsupportedModelError for unsupported steps."""
        if processor.resample != _BICUBIC:
            raise UnsupportedModelError(
                f"a processor with resample={processor.resample} is not supported; it must resize (bicubic)"
            )
        merge = 2 if processor.downsample_mode == "4x" else 4
        return cls(processor, tile_spec(processor, int(processor.patch_size)), merge)

    @property
    def factor(self) -> int:
        """Returns the pixels of a visual token's edge."""
        return self.tile.side * self.merge

    def plan(
        self, kind: MediaKind, size: tuple[int, int], num_frames: int, *, is_whole: bool = False
    ) -> SlicedPlan:
        """Plans pictures of `size`, (height, width). is_whole: without slices.

        Raises MediaLimitError for an impossible shape.
        """
        try:
            grid = self._grid(size, num_frames, is_whole=is_whole)
        except (ValueError, ZeroDivisionError) as error:
            raise MediaLimitError(
                f"a picture of {size[1]}x{size[0]} pixels does not suit the model: {error}; crop it first"
            ) from error
        num_tokens = grid.cut(1).num_patches // self.merge**2
        shown, sizes = self._sizes(grid)[-1][0], {"image": (self.factor, self.factor * num_tokens)}
        taken = shown if grid.num_tiles == 1 else sizes.get(kind, size)
        return SlicedPlan(kind, taken, grid, 1, num_tokens, shown_size=shown)

    def _grid(self, size: tuple[int, int], num_frames: int, *, is_whole: bool) -> SlicedGrid:
        by, side, mode = self.processor, self.tile.side, {"downsample_mode": self.processor.downsample_mode}
        slices = None
        if by.slice_mode and not is_whole:
            slices = by.get_sliced_grid(size, by.max_slice_nums, by.scale_resolution)
        own = by.find_best_resize(size, by.scale_resolution, side, allow_upscale=slices is None, **mode)
        if slices is None:
            return SlicedGrid(num_frames, own[0] // side, own[1] // side)
        large = by.get_refine_size(size, slices, by.scale_resolution, side, allow_upscale=True, **mode)
        each = (edge // count // side for edge, count in zip(large, slices, strict=True))
        return SlicedGrid(num_frames, own[0] // side, own[1] // side, *slices, *each)

    def _sizes(self, grid: SlicedGrid) -> list[tuple[tuple[int, int], int, int]]:
        """Returns of the overview, and of the picture that is sliced: its size in pixels, rows, columns."""
        side = self.tile.side
        overview = (grid.h * side, grid.w * side), 1, 1
        large = (grid.rows * grid.slice_h * side, grid.columns * grid.slice_w * side), grid.rows, grid.columns
        return [overview, large] if grid.num_tiles > 1 else [overview]

    def cut(self, pictures: Tensor, grid: SlicedGrid) -> Tensor:
        """Cuts uint8 [N, H, W, 3] to squares of a token each, side by side: uint8 [N, f, f * V, 3]."""
        cut = [
            self._squares(self.tile.resize(pictures, *size), rows, columns)
            for size, rows, columns in self._sizes(grid)
        ]
        return torch.cat(cut, dim=2)

    def _squares(self, pictures: Tensor, rows: int, columns: int) -> Tensor:
        """Cuts pictures of whole slices, uint8 [N, H, W, 3]: those of the first slice come first."""
        count, height, width, _ = pictures.shape
        edge = self.factor
        blocks = pictures.reshape(
            count, rows, height // rows // edge, edge, columns, width // columns // edge, edge, 3
        )
        return blocks.permute(0, 3, 1, 4, 2, 5, 6, 7).reshape(count, edge, -1, 3)

    def patches(self, frames: Tensor) -> Tensor:
        """Cuts uint8 [N, H, W, 3] into patches, float32 [P, 3 * side * side], those of a token together."""
        tile = self.tile
        return patchify(frames, PatchSpec(tile.side, self.merge, 1, tile.mean, tile.std, _BICUBIC))


class MiniCPMVAdapter(BaseAdapter):
    """Adapts `model_type` minicpmv4_6 and minicpmv4_7, whose images are canvases of positions."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        config, processor = checkpoint.config, checkpoint.processor
        self._specs: dict[MediaKind, SliceSpec] = {
            "image": SliceSpec.of(processor.image_processor),
            "video": SliceSpec.of(processor.video_processor),
        }
        _check_supported(config, [each.processor.downsample_mode for each in self._specs.values()])
        tokens: dict[MediaKind, str] = {"image": processor.image_token, "video": processor.video_token}
        self.markers = Markers(tokens, tokens)
        self._positions = position_rule(model_class(config), config)

    def check_pixels(self, media: Collection[tuple[MediaKind, PixelLimits]], most: int | None) -> None:  # noqa: ARG002
        for name in (name for _, pixels in media for name in pixels.all_named):
            raise refuse(name, "none, pictures of this model family have the sizes that its files say")

    def plan_image(self, height: int, width: int, pixels: PixelLimits = OWN_LIMITS) -> MediaPlan:
        return self._specs["image"].plan("image", (height, width), 1, is_whole=pixels.is_low_detail)

    def plan_video(
        self,
        video: VideoFacts,
        frame_sampling: FrameSampling,
        pixels: PixelLimits = OWN_LIMITS,  # noqa: ARG002
    ) -> MediaPlan:
        spec = self._specs["video"]
        frames = select_frames(
            video, frame_sampling, lambda part: sample_by_rule(spec.processor, part, frame_sampling)
        )
        return replace(
            spec.plan("video", (video.height, video.width), len(frames.indices)),
            times_s=frames.times_s,
            frame_indices=frames.indices,
            source_fps=frames.fps,
            unit_span_s=1 / frames.sampled_fps,
        )

    def plan_chat(self, media: Sequence[MediaPlan], messages: Sequence[ChatMessage]) -> PromptPlan:
        texts = self._numbered(media, [self._item_text(plan) for plan in media])
        template = self.checkpoint.chat_template
        plan = plan_text_prompt(self.checkpoint, template, self.markers, media, texts, messages)
        if self._positions is None:
            return replace(plan, positions=np.repeat(plan.positions, 3, axis=0))
        positions = self._positions(_position_inputs(plan))
        return replace(plan, positions=positions, next_position=int(positions.max()) + 1)

    def _item_text(self, plan: MediaPlan) -> ItemText:
        processor, grid, pad = self.checkpoint.processor, _grid_of(plan), self.markers.pads[plan.kind]
        each = f"{processor.slice_start_token}{pad}{processor.slice_end_token}"
        slices = "\n".join([each * grid.columns] * grid.rows)
        picture = f"{processor.image_start_token}{pad}{processor.image_end_token}{slices}"
        merge = self._specs[plan.kind].merge
        lengths = tuple(high * wide // merge**2 for high, wide in grid.tiles)
        return ItemText(picture * plan.num_units, lengths * plan.num_units)

    def _numbered(self, media: Sequence[MediaPlan], texts: list[ItemText]) -> list[ItemText]:
        """Writes before an item how many of its kind came before. 4.7 numbers images alone."""
        processor = self.checkpoint.processor
        is_on = processor.default_use_image_id if processor.use_image_id is None else processor.use_image_id
        for kind, token in self.markers.in_template.items() if is_on else ():
            places = [place for place, plan in enumerate(media) if plan.kind == kind]
            words = [texts[place].text for place in places]
            named = processor._prepend_local_ids([token * len(places)], words, token)
            for place, text in zip(places, named, strict=True):
                texts[place] = replace(texts[place], text=text)
        return texts

    def resize(self, image: Tensor, plan: MediaPlan) -> Tensor:
        spec, grid = self._specs["image"], _grid_of(plan)
        if grid.num_tiles > 1:
            return spec.cut(image[None], grid)
        return spec.tile.resize(image[None], *plan.size)

    def preprocess(self, frames: Tensor, plan: MediaPlan, device: torch.device = CPU) -> Tensor:
        spec, grid = self._specs[plan.kind], _grid_of(plan)
        if plan.kind == "video" and grid.num_tiles > 1:
            # On the host: a GPU's resizing rounds otherwise than the processor's.
            frames = spec.cut(frames, grid)
        return spec.patches(to_device(frames, device))

    def vision_tower(self, model: nn.Module) -> nn.Module:
        return model.get_submodule("model")

    def tower_merger(self, tower: nn.Module, merge: TowerMerge) -> TowerMerger:  # noqa: ARG002
        raise UnsupportedModelError(
            "received tower_share for a MiniCPM-V model, whose tower joins patches by their places; allowed: "
            "families without; leave tower_share out"
        )

    def encode_batch(self, tower: Any, runs: Sequence[PatchRun]) -> list[Embeddings]:
        merge, vision = self._specs[runs[0].kind].merge, tower.vision_tower
        patches = torch.cat([run.values for run in runs]).to(next(tower.parameters()).dtype)
        embedding, places_per_side = vision.embeddings, vision.embeddings.num_patches_per_side
        grid = _grid_of(runs[0]).cut(sum(run.grid.t for run in runs))
        places, ends = _tower_inputs(grid, merge, places_per_side, patches.device)
        projection = embedding.patch_embedding
        hidden = linear(patches, projection.weight.flatten(1), projection.bias)
        hidden = hidden + embedding.position_embedding(places)
        for number, layer in enumerate(vision.encoder.layers):
            hidden = _run_layer(layer, hidden, partial(attend_runs, ends=ends))
            if merge == 4 and number == vision.config.insert_layer_id:
                hidden, ends = _join_windows(vision.vit_merger, hidden), tuple(end // 4 for end in ends)
        rows = tower.merger.mlp[0](vision.post_layernorm(hidden).view(-1, 4 * hidden.shape[1]))
        counts = [run.grid.num_patches // merge**2 for run in runs]
        return list(map(Embeddings, torch.split(rows, counts)))


def _check_supported(config: Any, modes: list[str]) -> None:
    """Raises UnsupportedModelError unless tokens are made of patches as the processors count them."""
    kernels = (*config.merge_kernel_size, *config.vision_config.window_kernel_size)
    is_joined = config.downsample_mode == "4x" or config.insert_layer_id >= 0
    if (
        set(modes) != {config.downsample_mode}
        or set(kernels) != {2}
        or config.merger_times != 1
        or not is_joined
    ):
        raise UnsupportedModelError(
            f"a model with downsample_mode={config.downsample_mode}, processors with {modes}, kernels of "
            f"{kernels}, merger_times={config.merger_times} and insert_layer_id={config.insert_layer_id} is "
            "not supported; allowed: one mode, kernels of 2 x 2 and one merger, as published"
        )


def _grid_of(of: MediaPlan | PatchRun) -> SlicedGrid:
    assert isinstance(of.grid, SlicedGrid)
    return of.grid


def _position_inputs(plan: PromptPlan) -> dict[str, Tensor]:
    """Returns what `get_rope_index` takes: ids, the kind of each token, and the sizes of all tiles."""
    ids = torch.from_numpy(plan.token_ids)[None]
    kinds, found = torch.zeros_like(ids), {"input_ids": ids}
    names: list[tuple[MediaKind, str]] = [("image", "target_sizes"), ("video", "target_sizes_videos")]
    for number, (kind, name) in enumerate(names):
        items = [item for item in plan.media if item.plan.kind == kind]
        for item in items:
            kinds[0, item.token_indices(0, item.plan.num_units)] = number + 1
        if items:
            found[name] = torch.tensor([size for item in items for size in _tile_sizes(item)])
    return found | {"mm_token_type_ids": kinds}


def _tile_sizes(item: MediaItem) -> list[tuple[int, int]]:
    return _grid_of(item.plan).tiles * item.plan.num_units


@lru_cache(_MAX_GRIDS)
@torch.inference_mode(mode=False)
def _tower_inputs(
    grid: SlicedGrid, merge: int, places_per_side: int, device: torch.device
) -> tuple[Tensor, tuple[int, ...]]:
    """Returns the place of each patch in the table, int64 [P], and where tiles end, after a 0."""
    places = [_places(*tile, merge, places_per_side) for tile in grid.tiles]
    ends = accumulate(high * wide for high, wide in grid.tiles * grid.t)
    return to_device(torch.cat(places).repeat(grid.t), device), (0, *ends)


def _places(height: int, width: int, merge: int, places_per_side: int) -> Tensor:
    """Returns the places of a tile's patches, those of a visual token together: int64 [height * width]."""
    raster: Tensor = get_vision_nearest_position_ids(torch.tensor([[height, width]]), places_per_side)
    return raster.view(height // merge, merge, width // merge, merge).transpose(1, 2).flatten()


def _run_layer(layer: Any, hidden: Tensor, attend: _Attend) -> Tensor:
    """Runs a layer of the tower: [P, C]."""
    hidden = hidden + _attended(layer.self_attn, layer.layer_norm1(hidden), attend)
    run: Tensor = hidden + layer.mlp(layer.layer_norm2(hidden))
    return run


def _attended(module: Any, hidden: Tensor, attend: _Attend) -> Tensor:
    projections = module.q_proj, module.k_proj, module.v_proj
    query, key, value = (each(hidden).unflatten(1, (module.num_heads, -1)) for each in projections)
    attended: Tensor = module.out_proj(attend(query, key, value, scale=module.scaling).flatten(1))
    return attended


def _join_windows(module: Any, hidden: Tensor) -> Tensor:
    """Joins windows of 2 x 2 patches, which attend each other: [P, C] to [P / 4, C]."""
    num_channels = hidden.shape[1]
    windows = hidden.view(-1, 2, 2, 2, 2, num_channels).transpose(2, 3).reshape(-1, num_channels)
    windows = windows + _attended(
        module.self_attn, module.layer_norm1(windows), partial(attend_alike, length=4)
    )
    joined = module.act(module.linear_1(module.pre_norm(windows.view(-1, 4 * num_channels))))
    rows: Tensor = module.linear_2(joined) + windows.view(-1, 4, num_channels).mean(dim=1)
    return rows
