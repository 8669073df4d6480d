"""Serves the families that look at fixed squares: images cut into tiles, videos as one square a frame.

A unit is one tile or one frame; the tower sees each by itself, so it may be cut anywhere:

    image 900 x 600    tile 0 | tile 1 | tile 2          units [0, 1, 2, ...), the whole image as one
                       tile 3 | tile 4 | tile 5          more tile before or behind them

Shapes: N tiles or frames, S x S pixels, V tokens of a tile, C channels of the language model.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms.v2 import functional as tvf
from transformers.utils.import_utils import is_torchvision_greater_or_equal

from epd.chat import ChatMessage
from epd.encoders.adapter import BaseAdapter, Embeddings, PatchRun, TowerMerger
from epd.encoders.checkpoint import Checkpoint
from epd.encoders.device import CPU, constants, to_device
from epd.encoders.patches import PatchSpec, patchify
from epd.encoders.plans import Grid, MediaPlan, PromptPlan, VideoFacts
from epd.encoders.prompt.text_layout import ItemText, Markers, plan_text_prompt
from epd.encoders.reduction.tower_merging import TileMerger
from epd.encoders.sampling import DEFAULT_FPS, check_wanted, select_frames, source_metadata
from epd.errors import MediaLimitError, UnsupportedModelError
from epd.frame_sampling import FrameSampling
from epd.pixel_limits import OWN_LIMITS, PixelLimits, refuse
from epd.pixel_settings import authors_limits
from epd.reduction import TowerMerge
from epd.types import MediaKind

# Pillow's number of a filter: torchvision's name. As in transformers, an older torchvision takes bicubic for
# Lanczos, which it lacks; transformers' processors of images are those of Pillow then.
_HAS_LANCZOS = is_torchvision_greater_or_equal("0.27")
_INTERPOLATION = {
    1: tvf.InterpolationMode.LANCZOS if _HAS_LANCZOS else tvf.InterpolationMode.BICUBIC,
    2: tvf.InterpolationMode.BILINEAR,
    3: tvf.InterpolationMode.BICUBIC,
}


@dataclass(frozen=True, slots=True)
class TilePlan(MediaPlan):
    """Describes a `MediaPlan` in tiles.

    rows, columns: of an image's tiles, without the one that shows all of it; 1 and 1 for a video.
    source_size: (height, width) of the image or video, pixels.
    source_duration_s: of the video, seconds.
    """

    rows: int = 1
    columns: int = 1
    source_size: tuple[int, int] = (0, 0)
    source_duration_s: float = 0.0

    @property
    def resized(self) -> tuple[int, int]:
        return self.rows * self.size[0], self.columns * self.size[1]


@dataclass(frozen=True, slots=True)
class TileSpec:
    """Describes the geometry and normalisation of one processor, image or video.

    side: pixels of a tile's edge.
    mean, std: of the channels, on the 0..255 scale.
    resample: Pillow's number of the filter.
    is_pillow: whether the processor resizes with Pillow, which rounds otherwise than torchvision.
    """

    side: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resample: int
    is_pillow: bool = False

    def resize(self, pixels: Tensor, height: int, width: int) -> Tensor:
        """Resizes uint8 [N, H, W, 3] to uint8 [N, height, width, 3] by the processor's filter."""
        if self.is_pillow:
            images = (
                Image.fromarray(each.numpy()).resize((width, height), Image.Resampling(self.resample))
                for each in pixels
            )
            return torch.from_numpy(np.stack([np.asarray(image) for image in images]))
        resized: Tensor = tvf.resize(
            pixels.permute(0, 3, 1, 2),
            [height, width],
            interpolation=_INTERPOLATION[self.resample],
            antialias=True,
        )
        return resized.permute(0, 2, 3, 1)

    def normalise(self, tiles: Tensor) -> Tensor:
        """Normalises uint8 [N, S, S, 3] to float32 [N, 3, S, S]; on a GPU, each tile is a kernel patch."""
        if tiles.is_cuda:
            spec = PatchSpec(tiles.shape[1], 1, 1, self.mean, self.std, self.resample)
            return patchify(tiles, spec).reshape(-1, 3, *tiles.shape[1:3])
        values = tiles.permute(0, 3, 1, 2).contiguous().to(torch.float32)
        mean, std = (constants(each, CPU)[:, None, None] for each in (self.mean, self.std))
        return values.sub_(mean).div_(std)


def tile_spec(processor: Any, side: int) -> TileSpec:
    """Reads a transformers image or video processor. Raises UnsupportedModelError for unsupported steps."""
    settings = {name: getattr(processor, name, None) for name in ("do_resize", "do_rescale", "do_normalize")}
    resample = int(processor.resample)
    if not all(settings.values()) or resample not in _INTERPOLATION or processor.do_center_crop:
        raise UnsupportedModelError(
            f"a processor with {settings}, resample={resample} and "
            f"do_center_crop={processor.do_center_crop} is not supported; "
            "it must resize, rescale and normalise"
        )
    scale = 1.0 / float(processor.rescale_factor)
    return TileSpec(
        side=side,
        mean=tuple((torch.tensor(processor.image_mean) * scale).tolist()),
        std=tuple((torch.tensor(processor.image_std) * scale).tolist()),
        resample=resample,
        is_pillow="image_processing_pil" in type(processor).__module__,
    )


def check_last_layer(config: Any) -> None:
    """Raises UnsupportedModelError unless the output of the tower's last layer is what becomes embeddings."""
    if config.vision_feature_layer != -1:
        raise UnsupportedModelError(
            f"received tower_share for a {config.model_type} model with vision_feature_layer="
            f"{config.vision_feature_layer}; allowed: Qwen2.5-VL, Qwen3-VL and SmolVLM, and LLaVA-OneVision "
            "and InternVL with -1; leave tower_share out"
        )


def cut_tiles(canvas: Tensor, side: int) -> Tensor:
    """Cuts uint8 [1, rows * S, columns * S, 3] into tiles uint8 [rows * columns, S, S, 3], row by row."""
    rows, columns = canvas.shape[1] // side, canvas.shape[2] // side
    blocks = canvas.reshape(rows, side, columns, side, 3)
    return blocks.permute(0, 2, 1, 3, 4).reshape(rows * columns, side, side, 3)


class TilePlanner(BaseAdapter):
    """Plans images in tiles. A family defines their number and the text between them.

    tokens_per_tile: embeddings that one tile of an image gives. tokens_per_frame: the same of a video.
    has_low_detail: whether the processor can leave an image whole, as its only tile.
    """

    markers: Markers
    image_spec: TileSpec
    video_spec: TileSpec
    patches_per_side: int
    tokens_per_tile: int
    tokens_per_frame: int
    has_low_detail = True

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    @abstractmethod
    def canvas(self, height: int, width: int) -> tuple[int, int]:
        """Returns the rows and columns of tiles that an image of `height` x `width` pixels is cut into."""

    def num_tiles(self, rows: int, columns: int) -> int:
        """Counts all tiles, including one that shows the whole image, unless the only tile does."""
        return rows * columns + (rows * columns > 1)

    @abstractmethod
    def item_text(self, plan: TilePlan) -> ItemText:
        """Returns the words around the item's units."""

    def video_size(self, height: int, width: int) -> tuple[int, int]:  # noqa: ARG002 # for a family's use
        """Returns (height, width) that frames are decoded at, pixels."""
        return self.video_spec.side, self.video_spec.side

    def frame_indices(
        self, processor: Any, video: VideoFacts, frame_sampling: FrameSampling
    ) -> tuple[int, ...]:
        """Applies the processor's rule for a number of frames, at least one and no more than there are."""
        rate = frame_sampling.fps or processor.fps or DEFAULT_FPS
        at_rate = int(min(video.num_frames / video.fps * rate, video.num_frames))
        default = processor.num_frames if frame_sampling.fps is None else None
        wanted = frame_sampling.num_frames or min(default or at_rate, self.most_frames(frame_sampling))
        num_frames = int(min(max(wanted, 1), video.num_frames))
        check_wanted(frame_sampling, num_frames)
        indices = processor.sample_frames(source_metadata(video), num_frames=num_frames)
        return tuple(int(index) for index in indices)

    def most_frames(self, frame_sampling: FrameSampling) -> float:
        """Returns how many frames a video has at most where the request does not say: infinite for any."""
        settings, authors = self.checkpoint.pixels, authors_limits(self.checkpoint.config.model_type)
        if frame_sampling.fps is not None or frame_sampling.num_frames is not None:
            return math.inf
        of_file = self.checkpoint.processor.video_processor.num_frames
        most = None if settings.bare_processor or of_file else authors.max_frames
        if settings.video_max_tokens is not None:
            most = min(most or settings.video_max_tokens, settings.video_max_tokens // self.tokens_per_frame)
        return math.inf if most is None else max(1, most)

    def chat_template(self, media: Sequence[MediaPlan]) -> str:  # noqa: ARG002 # for a family's use
        return self.checkpoint.chat_template

    def check_pixels(self, media: Collection[tuple[MediaKind, PixelLimits]], most: int | None) -> None:  # noqa: ARG002
        for name in (name for _, pixels in media for name in pixels.all_named):
            raise refuse(name, "none, this model family has tiles of one size and no limits of pixels")
        if not self.has_low_detail and any(pixels.is_low_detail for _, pixels in media):
            raise refuse("detail low", "auto and high, this model family always cuts images into tiles")

    def plan_image(self, height: int, width: int, pixels: PixelLimits = OWN_LIMITS) -> TilePlan:
        if min(height, width) < 1:
            raise MediaLimitError(f"an image of {width}x{height} pixels shows nothing; send a larger one")
        side, patches = self.image_spec.side, self.patches_per_side
        rows, columns = (1, 1) if pixels.is_low_detail else self.canvas(height, width)
        return TilePlan(
            kind="image",
            size=(side, side),
            grid=Grid(self.num_tiles(rows, columns), patches, patches),
            frames_per_unit=1,
            tokens_per_unit=self.tokens_per_tile,
            rows=rows,
            columns=columns,
            source_size=(height, width),
        )

    def plan_video(
        self,
        video: VideoFacts,
        frame_sampling: FrameSampling,
        pixels: PixelLimits = OWN_LIMITS,  # noqa: ARG002
    ) -> TilePlan:
        processor = self.checkpoint.processor.video_processor
        frames = select_frames(
            video, frame_sampling, lambda part: self.frame_indices(processor, part, frame_sampling)
        )
        patches = self.patches_per_side
        return TilePlan(
            kind="video",
            size=self.video_size(video.height, video.width),
            grid=Grid(len(frames.indices), patches, patches),
            frames_per_unit=1,
            tokens_per_unit=self.tokens_per_frame,
            times_s=frames.times_s,
            frame_indices=frames.indices,
            source_fps=frames.fps,
            unit_span_s=1 / frames.sampled_fps,
            source_size=(video.height, video.width),
            source_duration_s=frames.duration_s,
        )

    def plan_chat(self, media: Sequence[MediaPlan], messages: Sequence[ChatMessage]) -> PromptPlan:
        texts = [self.item_text(plan) for plan in media if isinstance(plan, TilePlan)]
        template = self.chat_template(media)
        return plan_text_prompt(self.checkpoint, template, self.markers, media, texts, messages)


class TileAdapter(TilePlanner):
    """Implements `Adapter`; besides, a family defines how tiles are cut, and the tower's call."""

    @abstractmethod
    def tiles(self, image: Tensor, rows: int, columns: int) -> Tensor:
        """Cuts an image, uint8 [1, H, W, 3], into tiles uint8 [N, S, S, 3]. rows, columns: see `canvas`."""

    @abstractmethod
    def encode_tiles(self, tower: Any, pixels: Tensor, kind: MediaKind) -> Tensor:
        """Encodes tiles or frames [N, 3, S, S] to [N, tokens_per_tile or tokens_per_frame, C]."""

    def resize(self, image: Tensor, plan: MediaPlan) -> Tensor:
        assert isinstance(plan, TilePlan)
        tiles = self.tiles(image[None], plan.rows, plan.columns)
        if len(tiles) != plan.num_units:
            raise ValueError(f"an image of {tuple(image.shape)} has {len(tiles)} tiles, not {plan.num_units}")
        return tiles

    def preprocess(self, frames: Tensor, plan: MediaPlan, device: torch.device = CPU) -> Tensor:
        spec = self.image_spec if plan.kind == "image" else self.video_spec
        return spec.normalise(to_device(frames, device))

    def vision_tower(self, model: nn.Module) -> nn.Module:
        return model.get_submodule("model")

    @abstractmethod
    def tower_layers(self, tower: Any) -> Sequence[nn.Module]:
        """Returns the layers of the tower, of which the last one's output becomes the embeddings.

        Raises UnsupportedModelError if that is the output of an earlier one.
        """

    def tower_merger(self, tower: nn.Module, merge: TowerMerge) -> TowerMerger:
        return TileMerger(self.tower_layers(tower), self.patches_per_side, merge)

    def encode_batch(self, tower: nn.Module, runs: Sequence[PatchRun]) -> list[Embeddings]:
        pixels = torch.cat([run.values for run in runs]).to(next(tower.parameters()).dtype)
        rows = self.encode_tiles(tower, pixels, runs[0].kind)
        return [Embeddings(part.flatten(0, 1)) for part in torch.split(rows, [run.grid.t for run in runs])]
