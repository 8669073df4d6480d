"""Adapts Gemma 4: an image or a frame is as large as its tokens allow, and the tower pools 3 x 3 patches.

    image    <boi> pad ... pad <eoi>                                     70 to 1,120 tokens at most
    video    00:00 <boi> pad ... <eoi> 00:01 <boi> pad ... <eoi> ...     a unit is a frame, of 70 or so

The tower sees each frame by itself. transformers' processor fills patches up to the most that there may be,
which its tower masks; here all patches are of the picture.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.gemma4.image_processing_gemma4 import get_aspect_ratio_preserving_size

from epd.chat import ChatMessage
from epd.encoders.adapter import BaseAdapter, Embeddings, PatchRun, TowerMerger
from epd.encoders.checkpoint import Checkpoint
from epd.encoders.device import CPU, to_device
from epd.encoders.patches import INTERPOLATION, resize_image
from epd.encoders.plans import Grid, MediaPlan, PromptPlan, VideoFacts
from epd.encoders.prompt.text_layout import ItemText, Markers, plan_text_prompt
from epd.encoders.sampling import sample_by_rule, select_frames
from epd.errors import MediaLimitError, RequestError, UnsupportedModelError
from epd.frame_sampling import FrameSampling
from epd.pixel_limits import OWN_LIMITS, PixelLimits, check_ceiling, refuse
from epd.reduction import TowerMerge
from epd.types import MediaKind


@dataclass(frozen=True, slots=True)
class PooledSpec:
    """Describes the geometry of one processor, image or video.

    side: pixels of a patch's edge. pool: patches of a token's edge. most_tokens: of a picture.
    scale: of the bytes. is_divided: whether they are divided by its inverse, which rounds otherwise.
    """

    side: int
    pool: int
    most_tokens: int
    resample: int
    scale: float
    is_divided: bool

    @classmethod
    def of(cls, processor: Any) -> PooledSpec:
        """Reads a transformers processor. Raises UnsupportedModelError for unsupported steps."""
        settings = {name: getattr(processor, name) for name in ("do_resize", "do_rescale", "resample")}
        is_plain = not processor.do_normalize or (
            not any(processor.image_mean) and set(processor.image_std) == {1.0}
        )
        if not all(settings.values()) or settings["resample"] not in INTERPOLATION or not is_plain:
            raise UnsupportedModelError(
                f"a processor with {settings}, image_mean={processor.image_mean} and image_std="
                f"{processor.image_std} is not supported; it must resize (bilinear or bicubic) and rescale"
            )
        return cls(
            side=int(processor.patch_size),
            pool=int(processor.pooling_kernel_size),
            most_tokens=int(processor.max_soft_tokens),
            resample=int(processor.resample),
            scale=float(processor.rescale_factor),
            is_divided=bool(processor.do_normalize),
        )

    @property
    def token_pixels(self) -> int:
        """Returns the pixels of a token."""
        return (self.side * self.pool) ** 2

    def plan(self, kind: MediaKind, size: tuple[int, int], num_frames: int, most_pixels: int) -> MediaPlan:
        """Plans an item of pictures of a size, (height, width). Raises MediaLimitError for a shape."""
        height, width = size
        try:
            most = most_pixels // self.token_pixels * self.pool**2
            rows, columns = get_aspect_ratio_preserving_size(height, width, self.side, most, self.pool)
        except (ValueError, ZeroDivisionError) as error:
            raise MediaLimitError(
                f"a picture of {width}x{height} pixels does not suit the model: {error}; crop it first"
            ) from error
        grid = Grid(num_frames, rows // self.side, columns // self.side)
        return MediaPlan(kind, (rows, columns), grid, 1, grid.h * grid.w // self.pool**2)

    def patches(self, frames: Tensor) -> Tensor:
        """Cuts uint8 [N, H, W, 3] into patches, float32 [P, side * side * 3], row by row."""
        num_frames, height, width, _ = frames.shape
        side = self.side
        blocks = frames.reshape(num_frames, height // side, side, width // side, side, 3)
        values = blocks.transpose(2, 3).reshape(-1, side * side * 3).to(torch.float32)
        return values.div_(1.0 / self.scale) if self.is_divided else values.mul_(self.scale)


# Tokens that a picture of any of these models may have at most.
_MOST_TOKENS = (70, 140, 280, 560, 1120)


class Gemma4Adapter(BaseAdapter):
    """Adapts `model_type` gemma4, whose language model may let the tokens of an image attend each other."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        processor = checkpoint.processor
        self._specs: dict[MediaKind, PooledSpec] = {
            "image": PooledSpec.of(processor.image_processor),
            "video": PooledSpec.of(processor.video_processor),
        }
        tokens: dict[MediaKind, str] = {"image": processor.image_token, "video": processor.video_token}
        self.markers = Markers(tokens, tokens)
        for kind in self._specs:
            self._most_pixels(kind, OWN_LIMITS)

    def check_pixels(self, media: Collection[tuple[MediaKind, PixelLimits]], most: int | None) -> None:
        for kind, pixels in media:
            for name in pixels.all_named:
                if not name.endswith(".max_pixels"):
                    raise refuse(name, "max_pixels, pictures are enlarged to as many as there may be")
            for name, value in pixels.named.items():
                check_ceiling(name, value, max(self._most_pixels(kind, OWN_LIMITS), most or 0))
            self._most_pixels(kind, pixels)

    def _most_pixels(self, kind: MediaKind, pixels: PixelLimits) -> int:
        """Returns the pixels of the most tokens that lie within a limit. Raises RequestError for none."""
        spec, settings = self._specs[kind], self.checkpoint.pixels
        given = settings.max_pixels if kind == "image" else settings.video_max_pixels
        _, most = pixels.within((0, given or spec.most_tokens * spec.token_pixels))
        known = [each * spec.token_pixels for each in _MOST_TOKENS]
        if most < known[0]:
            raise RequestError(
                f"received {most:,} pixels at most for a picture; allowed: at least {known[0]:,}, which are "
                f"{_MOST_TOKENS[0]} tokens; raise max_pixels"
            )
        return max(each for each in known if each <= most)

    def plan_image(self, height: int, width: int, pixels: PixelLimits = OWN_LIMITS) -> MediaPlan:
        return self._specs["image"].plan("image", (height, width), 1, self._most_pixels("image", pixels))

    def plan_video(
        self,
        video: VideoFacts,
        frame_sampling: FrameSampling,
        pixels: PixelLimits = OWN_LIMITS,
    ) -> MediaPlan:
        processor = self.checkpoint.processor.video_processor
        frames = select_frames(
            video, frame_sampling, lambda part: sample_by_rule(processor, part, frame_sampling)
        )
        return replace(
            self._specs["video"].plan(
                "video",
                (video.height, video.width),
                len(frames.indices),
                self._most_pixels("video", pixels),
            ),
            times_s=frames.times_s,
            frame_indices=frames.indices,
            source_fps=frames.fps,
            unit_span_s=1 / frames.sampled_fps,
        )

    def plan_chat(self, media: Sequence[MediaPlan], messages: Sequence[ChatMessage]) -> PromptPlan:
        texts = [self._item_text(plan) for plan in media]
        template = self.checkpoint.chat_template
        return plan_text_prompt(self.checkpoint, template, self.markers, media, texts, messages)

    def _item_text(self, plan: MediaPlan) -> ItemText:
        """Writes a picture between marks, each frame behind its time in whole seconds."""
        processor = self.checkpoint.processor
        picture = f"{processor.boi_token}{self.markers.pads[plan.kind]}{processor.eoi_token}"
        times = (int(index / plan.source_fps) for index in plan.frame_indices)
        frames = " ".join(f"{each // 60:02d}:{each % 60:02d} {picture}" for each in times)
        return ItemText(frames or picture, (plan.tokens_per_unit,) * plan.num_units)

    def resize(self, image: Tensor, plan: MediaPlan) -> Tensor:
        return resize_image(image, plan.size, self._specs["image"].resample)

    def preprocess(self, frames: Tensor, plan: MediaPlan, device: torch.device = CPU) -> Tensor:
        return self._specs[plan.kind].patches(to_device(frames, device))

    def vision_tower(self, model: nn.Module) -> nn.Module:
        return model.get_submodule("model")

    def tower_merger(self, tower: nn.Module, merge: TowerMerge) -> TowerMerger:  # noqa: ARG002
        raise UnsupportedModelError(
            "received tower_share for a gemma4 model, whose tower pools patches by their places; allowed: "
            "families without; leave tower_share out"
        )

    def encode_batch(self, tower: Any, runs: Sequence[PatchRun]) -> list[Embeddings]:
        grid, values = runs[0].grid, torch.cat([run.values for run in runs])
        patches = values.view(-1, grid.h * grid.w, values.shape[1])
        place = torch.arange(grid.h * grid.w, device=values.device)
        places = torch.stack([place % grid.w, place // grid.w], -1)[None]
        output = tower.get_image_features(patches, places.expand(len(patches), -1, -1), return_dict=True)
        lengths = [run.grid.num_patches // self._specs[run.kind].pool ** 2 for run in runs]
        return [Embeddings(each) for each in torch.split(torch.cat(list(output.pooler_output)), lengths)]
