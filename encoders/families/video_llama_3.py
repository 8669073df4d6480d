"""Adapts VideoLLaMA 3: images and frames of any size; each frame of a video follows its time in words.

Time 0.0s:<pads>,Time 0.5s:<pads>,Time 1.0s:<pads>
          [unit )           [unit )           [unit )      positions count all tokens

With `use_token_compression` in the processor's file, as published, a token whose pixels are nearly those of
the frame before is left out: frames are looked at once before the prompt is laid out.

frame 0  | a b c d |        all tokens
frame 1  | a b C d |   C    those that differ, or the first one
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from epd.chat import ChatMessage
from epd.encoders.adapter import Embeddings, PatchRun, TowerMerger
from epd.encoders.checkpoint import Checkpoint
from epd.encoders.device import to_device
from epd.encoders.families.qwen_tower import attend_runs, framed_inputs, rotate
from epd.encoders.families.qwen_vl import QwenVLAdapter, image_size
from epd.encoders.patches import patchify
from epd.encoders.plans import Grid, MediaItem, MediaPlan, PromptPlan
from epd.encoders.prompt.prompt import VisualSpan
from epd.encoders.prompt.text_layout import ItemText, Markers, plan_text_prompt
from epd.encoders.reduction.tower_merging import RunMerger
from epd.pixel_limits import CAP_FIELD, NO_CAPS, FrameCaps, PixelLimits, refuse
from epd.reduction import TowerMerge
from epd.types import MediaKind

# Of the pixels of a token, normalised, times 255: the mean difference up to which frames are taken as alike.
_ALIKE = 0.1


@dataclass(frozen=True, slots=True)
class _MergerByKind:
    """Merges by the size of a cell, which differs between images and frames."""

    mergers: Mapping[MediaKind, TowerMerger]

    def during(self, runs: Sequence[PatchRun]) -> AbstractContextManager[None]:
        return self.mergers[runs[0].kind].during(runs)


class VideoLlama3Adapter(QwenVLAdapter):
    """Adapts `model_type` video_llama_3."""

    video_takes_size_alone = True

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        pads: dict[MediaKind, str] = {
            "image": checkpoint.processor.image_token,
            "video": checkpoint.processor.video_token,
        }
        self.markers = Markers(pads, pads)

    def check_pixels(self, media: Collection[tuple[MediaKind, PixelLimits]], most: int | None) -> None:
        if any(pixels.cap_pixels_per_frame is not None for _, pixels in media):
            raise refuse(CAP_FIELD, "none, the authors of this model have no such limit")
        super().check_pixels(media, most)

    def video_size(
        self, num_frames: int, height: int, width: int, limits: tuple[int, int], caps: FrameCaps
    ) -> tuple[int, int]:
        """See `QwenVLAdapter`; the least pixels are of each frame, the most of all together."""
        most = int(min(limits[1] // num_frames, caps.share(num_frames)))
        return image_size(height, width, self.video_spec.factor, limits[0], most)

    def processor_caps(self) -> FrameCaps:
        return NO_CAPS

    def spans(self, item: MediaItem) -> Sequence[VisualSpan]:  # noqa: ARG002 # positions count all tokens
        return ()

    def plan_chat(self, media: Sequence[MediaPlan], messages: Sequence[ChatMessage]) -> PromptPlan:
        texts = [self._item_text(plan) for plan in media]
        template = self.checkpoint.chat_template
        return plan_text_prompt(self.checkpoint, template, self.markers, media, texts, messages)

    def _item_text(self, plan: MediaPlan) -> ItemText:
        pad = self.markers.pads[plan.kind]
        if plan.kind == "image":
            return ItemText(pad, plan.unit_lengths)
        times_s = (index / plan.source_fps for index in plan.frame_indices)
        return ItemText(",".join(f"Time {time_s:.1f}s:{pad}" for time_s in times_s), plan.unit_lengths)

    @property
    def compresses(self) -> bool:
        return bool(self.checkpoint.processor.video_processor.use_token_compression)

    def compressed(self, plan: MediaPlan, parts: Iterable[Tensor]) -> MediaPlan:
        if not self.compresses:
            return plan
        kept, before = list[bytes](), torch.empty(0)
        for frames in parts:
            patches = patchify(frames, self.video_spec).view(len(frames), plan.tokens_per_unit, -1)
            is_kept = _differs(torch.cat([before, patches]) if len(before) else patches)
            kept += [each.numpy().tobytes() for each in is_kept[-len(frames) :]]
            before = patches[-1:]
        return replace(plan, kept=tuple(kept))

    def join(self, embeddings: Embeddings, plan: MediaPlan, start: int, stop: int) -> Embeddings:
        if not plan.kept:
            return embeddings
        kept = np.flatnonzero(np.frombuffer(b"".join(plan.kept[start:stop]), dtype=bool))
        places = to_device(torch.from_numpy(kept), embeddings.rows.device)
        return embeddings.mapped(lambda rows: rows.index_select(0, places))

    def vision_tower(self, model: nn.Module) -> nn.Module:
        tower: Any = model.get_submodule("model")
        for layer in tower.vision_model.encoder.layers:
            layer.self_attn.forward = MethodType(_attend, layer.self_attn)
        return cast(nn.Module, tower)

    def tower_merger(self, tower: Any, merge: TowerMerge) -> TowerMerger:
        vision = tower.vision_model
        sides: dict[MediaKind, int] = {"image": self.image_spec.merge, "video": self.video_spec.merge}
        return _MergerByKind(
            {
                kind: RunMerger(vision.encoder.layers, [vision.post_layernorm], side, merge)
                for kind, side in sides.items()
            }
        )

    def tower_inputs(self, grids: tuple[Grid, ...], device: torch.device) -> dict[str, Tensor]:
        return framed_inputs(grids, self.video_spec.merge, device)

    def encode_batch(self, tower: Any, runs: Sequence[PatchRun]) -> list[Embeddings]:
        patches = torch.cat([run.values for run in runs]).to(next(tower.parameters()).dtype)
        merge = (self.image_spec if runs[0].kind == "image" else self.video_spec).merge
        inputs = framed_inputs(tuple(run.grid for run in runs), merge, patches.device)
        merges = torch.full((len(inputs["grid_thw"]),), merge)
        output = tower.vision_model(pixel_values=patches, merge_sizes=merges, return_dict=True, **inputs)
        counts = [run.grid.num_patches // merge**2 for run in runs]
        return list(map(Embeddings, torch.split(tower.projector(output.last_hidden_state), counts)))


def _attend(
    module: Any,
    hidden_states: Tensor,
    cu_seqlens: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attends within images and frames, all of one size at once; transformers does one after the other.

    hidden_states: [P, C]. cu_seqlens: int32 [runs + 1], on the host.
    """
    if torch.is_grad_enabled():
        found: tuple[Tensor, None] = type(module).forward(
            module, hidden_states, cu_seqlens, position_embeddings, **kwargs
        )
        return found
    projections = module.q_proj, module.k_proj, module.v_proj
    heads = [each(hidden_states).unflatten(1, (module.num_heads, -1)) for each in projections]
    pairs = torch.stack(heads[:2], dim=1)
    rotate(pairs, *position_embeddings)
    out = attend_runs(pairs[:, 0], pairs[:, 1], heads[2], tuple(cu_seqlens.tolist()), module.scaling)
    return module.out_proj(out.flatten(1)), None


def _differs(patches: Tensor) -> Tensor:
    """Reports which tokens differ from those of the frame before, one of each frame at least: bool [N, S].

    patches: float32 [N, S, values of a token]. Of the first frame, which has none before it, all do.
    """
    change = (patches[1:] - patches[:-1]).abs().mean(dim=-1) * 255
    is_kept = torch.cat([torch.ones_like(patches[:1, :, 0], dtype=torch.bool), change > _ALIKE])
    is_kept[~is_kept.any(dim=1), 0] = True
    return is_kept
