"""One family under test: our adapter, transformers' processor and model, and how to ask both the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoProcessor
from transformers.video_utils import VideoMetadata

from epd.encoders import Adapter, FrameSampling, MediaPlan, PromptPlan, VideoFacts, load_adapter
from epd.encoders.adapter import Embeddings, PatchRun
from epd.types import MediaKind
from tests.tiny_models import load_reference

QUESTION = "What is shown? Ä, 漢"


@dataclass(frozen=True, slots=True)
class Picture:
    """An image as it is sent: uint8 [H, W, 3]."""

    pixels: Tensor
    kind: MediaKind = "image"


@dataclass(frozen=True, slots=True)
class Clip:
    """A video as it is sent: every frame, uint8 [T, H, W, 3], at a rate."""

    frames: Tensor
    fps: float
    kind: MediaKind = "video"

    @property
    def facts(self) -> VideoFacts:
        return VideoFacts(len(self.frames), self.fps, self.frames.shape[1], self.frames.shape[2])

    @property
    def metadata(self) -> VideoMetadata:
        facts = self.facts
        return VideoMetadata(
            total_num_frames=facts.num_frames,
            fps=facts.fps,
            duration=facts.num_frames / facts.fps,
            height=facts.height,
            width=facts.width,
        )


Media = Picture | Clip


@dataclass(frozen=True, slots=True)
class Family:
    """A checkpoint opened by us and by transformers."""

    name: str
    path: Path
    adapter: Adapter
    model: Any
    processor: Any

    @classmethod
    def load(cls, name: str, path: Path) -> Family:
        processor = AutoProcessor.from_pretrained(path, local_files_only=True)
        return cls(name, path, load_adapter(path), load_reference(path), processor)

    @property
    def tower(self) -> nn.Module:
        return self.adapter.vision_tower(self.model)

    @property
    def can_mix(self) -> bool:
        """Whether the processor takes images and videos in one prompt (SmolVLM's drops the images)."""
        return self.name != "smolvlm"

    def plan(self, item: Media, sampling: FrameSampling) -> MediaPlan:
        if isinstance(item, Picture):
            return self.adapter.plan_image(item.pixels.shape[0], item.pixels.shape[1])
        return self.adapter.plan_video(item.facts, sampling)

    def frames(self, item: Media, plan: MediaPlan) -> Tensor:
        """uint8 [N, h, w, 3] of planned size, as stages hand them to `preprocess`."""
        if isinstance(item, Picture):
            return self.adapter.resize(item.pixels, plan)
        return item.frames[list(plan.frame_indices)]

    def patches(self, item: Media, plan: MediaPlan) -> Tensor:
        return self.adapter.preprocess(self.frames(item, plan), plan)

    @torch.inference_mode()
    def encode(self, item: Media, plan: MediaPlan) -> Embeddings:
        """The whole item in one call of the tower, joined."""
        runs = [PatchRun(plan.kind, self.patches(item, plan), plan.grid)]
        return self.adapter.join(self.adapter.encode_batch(self.tower, runs)[0], plan, 0, plan.num_units)

    def prompt(self, media: Sequence[Media], sampling: FrameSampling) -> PromptPlan:
        return self.adapter.plan_prompt([self.plan(item, sampling) for item in media], QUESTION)

    def their_inputs(
        self, media: Sequence[Media], sampling: FrameSampling, question: str = QUESTION, **call: Any
    ) -> Any:
        """What the processor makes of the same media; it samples, resizes and lays out by itself.

        call: more arguments of its call.
        """
        pictures = [item.pixels.permute(2, 0, 1) for item in media if isinstance(item, Picture)]
        clips = [item for item in media if isinstance(item, Clip)]
        options: dict[str, Any] = {}
        if pictures:
            options["images"] = [pictures] if self.name == "smolvlm" else pictures
        if clips:
            options |= self._video_options(clips, sampling)
        return self.processor(text=[self._text(media, question)], return_tensors="pt", **options, **call)

    def _video_options(self, clips: Sequence[Clip], sampling: FrameSampling) -> dict[str, Any]:
        videos = [clip.frames.permute(0, 3, 1, 2) for clip in clips]
        nested = self.name == "smolvlm"
        options: dict[str, Any] = {
            "videos": [videos] if nested else videos,
            "video_metadata": [[clip.metadata for clip in clips]] if nested else [c.metadata for c in clips],
            "do_sample_frames": True,
        }
        if self.name.startswith("minicpm"):  # whose rule knows a most
            return options | {"max_num_frames": sampling.num_frames}
        if sampling.num_frames:
            return options | {"num_frames": sampling.num_frames, "fps": 1 if nested else None}
        return options | {"fps": sampling.fps, "num_frames": 64 if nested else None}

    def _text(self, media: Sequence[Media], question: str) -> str:
        content = [*({"type": item.kind} for item in media), {"type": "text", "text": question}]
        render = self.processor.apply_chat_template
        text: str = render([{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True)
        return text

    @torch.inference_mode()
    def their_features(self, inputs: Any, kind: MediaKind) -> tuple[Tensor, list[Tensor]]:
        """Rows [V, C] of all items of a kind, in order, and deepstack layers like them."""
        output = self._feature_call(inputs, kind)()
        rows = list(output.pooler_output)
        if self.name == "llava_onevision" and kind == "video":
            rows = [self._with_newline(each) for each in rows]
        layers = getattr(output, "deepstack_features", None) or []
        return torch.cat(rows), [x if isinstance(x, Tensor) else torch.cat(list(x)) for x in layers]

    def _with_newline(self, rows: Tensor) -> Tensor:
        """A video ends with the newline; releases near 5.17 add it later than the rows."""
        newline = self.model.model.image_newline
        return rows if torch.equal(rows[-1], newline) else torch.cat([rows, newline[None]])

    def _feature_call(self, inputs: Any, kind: MediaKind) -> Any:
        if self.name.startswith("qwen") or self.name == "video_llama_3":
            suffix = "" if kind == "image" else "_videos"
            call = self.model.get_image_features if kind == "image" else self.model.get_video_features
            names = (f"pixel_values{suffix}", f"{kind}_grid_thw", f"{kind}_merge_sizes")
            given = {name: inputs[name] for name in names if name in inputs}
            return partial(call, **given, return_dict=True)
        if self.name == "llava_onevision" and kind == "video":
            return partial(self.model.get_video_features, inputs["pixel_values_videos"], return_dict=True)
        if self.name.startswith("minicpm"):
            suffix = "" if kind == "image" else "_videos"
            call = getattr(self.model, f"get_{kind}_features")
            given = [inputs[name + suffix] for name in ("pixel_values", "target_sizes")]
            return partial(call, *given, return_dict=True)
        if self.name == "gemma4" and kind == "video":
            video = ("pixel_values_videos", "video_position_ids", "num_frames_per_video")
            given = [torch.as_tensor(inputs[name]) for name in video]
            return partial(self.model.model.get_video_features, *given, return_dict=True)
        names = ("pixel_values", "image_sizes", "batch_num_images", "pixel_attention_mask")
        names = (*names, "image_position_ids")
        named = {name: inputs[name] for name in names if name in inputs}
        return partial(self.model.get_image_features, **named, return_dict=True)
