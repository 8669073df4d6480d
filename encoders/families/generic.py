"""Adapts families that keep transformers' interfaces: their processor plans, their own tower encodes.

What an image or a video becomes in the prompt is read off the processor, which is called with pixels that
have a shape and no values. On an encode worker it is called again, with the pixels, and the model's own
`get_image_features` or `get_video_features` takes what it returns.

    plan     (height, width)   processor, meta device   "<image>" -> "<img><pad><pad>\\n<pad><pad></img>"
    encode   uint8 pixels      processor                -> pixel_values, image_sizes ... -> rows [V, C]

An image is encoded whole. Its visual tokens may lie in several runs, with words of the family in between. A
video is cut where the tower attends across no frames, which is measured: `measured_units`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from epd.chat import ChatMessage
from epd.encoders.adapter import BaseAdapter, Embeddings, PatchRun, TowerMerger
from epd.encoders.checkpoint import Checkpoint
from epd.encoders.device import CPU, device_of
from epd.encoders.families.interfaces import (
    FEATURES,
    model_class,
    pad_of,
    position_rule,
    seen_kinds,
    size_rule,
)
from epd.encoders.families.measured_units import frames_per_unit
from epd.encoders.patches import resize_image
from epd.encoders.plans import Grid, MediaPlan, PromptPlan, VideoFacts
from epd.encoders.prompt.text_layout import ItemText, Markers, plan_text_prompt
from epd.encoders.sampling import sample_by_rule, select_frames, shown_metadata
from epd.errors import MediaLimitError, UnsupportedMediaError, UnsupportedModelError
from epd.frame_sampling import FrameSampling
from epd.pixel_limits import CAP_FIELD, OWN_LIMITS, PixelLimits, check_ceiling, refuse
from epd.reduction import TowerMerge
from epd.types import Int64Array, MediaKind, ceil_div

_META = torch.device("meta")
# Values of a processor's output that are kept with a plan: sizes and grids have few, pixels many.
_MOST_FACTS = 4096
# Of processors of videos: tokens do not depend on pixels.
_FIXED: Mapping[str, object] = {"use_token_compression": False}


@dataclass(frozen=True, slots=True)
class WholePlan(MediaPlan):
    """Describes an item that the tower takes whole, in one unit. Its tokens are in one or several runs."""

    @property
    def is_joined_whole(self) -> bool:
        return True


class _Shown(NamedTuple):
    """Names what a processor's text depends on: the shape of the pixels, and the times of frames.

    is_sized: whether the pixels have the size already that the processor gives them.
    """

    kind: MediaKind
    size: tuple[int, int]
    indices: tuple[int, ...] = ()
    fps: float = 0.0
    is_sized: bool = False


@dataclass(frozen=True, slots=True)
class _Expansion:
    """Holds what a processor makes of one item. facts: sizes and grids, by the names of its outputs."""

    text: ItemText
    facts: Mapping[str, Tensor]

    @property
    def num_tokens(self) -> int:
        return sum(self.text.pad_lengths)


class _ItemProcessor:
    """Calls transformers' processor for one item. pads: what stands for a visual token of each kind."""

    def __init__(self, processor: Any, model_type: str, pads: Collection[str]) -> None:
        self.pads = pads
        self._processor = processor
        self._model_type = model_type
        self.expanded = lru_cache(maxsize=256)(self._expand)

    def _expand(self, shown: _Shown) -> _Expansion:
        """Calls the processor with pixels of this shape: without values where it can do without."""
        shape = (len(shown.indices) or 1, *shown.size, 3)
        try:
            outputs, text = self._processed(shown, torch.empty(shape, dtype=torch.uint8, device=_META))
        except Exception:  # noqa: BLE001 # whatever a processor does with pixels that have no values
            outputs, text = self._processed(shown, torch.zeros((), dtype=torch.uint8).expand(shape))
        facts = {name: value for name, value in _tensors(outputs) if value.numel() <= _MOST_FACTS}
        return _Expansion(self._compressed(text), facts)

    def _compressed(self, text: str) -> ItemText:
        """Replaces each run of pads by one of them, and counts it."""
        runs = list(self._pad_pattern.finditer(text))
        lengths = tuple(len(run.group()) // len(run.group(1)) for run in runs)
        return ItemText(self._pad_pattern.sub(r"\1", text), lengths)

    @property
    def _pad_pattern(self) -> re.Pattern[str]:
        pads = "|".join(re.escape(pad) for pad in dict.fromkeys(self.pads))
        return re.compile(rf"({pads})(?:\1)*")

    def _processed(self, shown: _Shown, frames: Tensor) -> tuple[Mapping[str, Any], str]:
        """Returns the processor's outputs for one item, uint8 [N, H, W, 3], and the text in its place."""
        processor, pixels = self._processor, frames.permute(0, 3, 1, 2)
        settings = processor._merge_kwargs(
            tokenizer_init_kwargs=processor.tokenizer.init_kwargs, return_tensors="pt"
        )[f"{shown.kind}s_kwargs"]
        settings |= {"do_resize": False} if shown.is_sized else {}
        if shown.kind == "image":
            outputs, texts = processor._process_images([pixels[0]], **settings)
        else:
            settings |= {"do_sample_frames": False, "return_metadata": True}
            settings |= {
                name: value for name, value in _FIXED.items() if hasattr(processor.video_processor, name)
            }
            outputs, texts = processor._process_videos(
                [pixels], **settings, video_metadata=[shown_metadata(shown.indices, shown.fps)]
            )
        return outputs, texts[0]

    def text(self, expansion: _Expansion, plan: MediaPlan) -> ItemText:
        """Returns the words of an item, with a pad for each run of its tokens, or for each unit."""
        text, each = expansion.text, plan.tokens_per_unit
        if plan.is_joined_whole:
            return text
        counts = iter(length // each for length in text.pad_lengths)
        cut = self._pad_pattern.sub(lambda pad: pad.group() * next(counts), text.text)
        return ItemText(cut, (each,) * plan.num_units)

    def rows_of(
        self, tower: Any, frames: Tensor, kind: MediaKind = "video", *, is_sized: bool = False
    ) -> Tensor:
        """Returns the rows [V, C] of one item, uint8 [N, H, W, 3]."""
        shown = _Shown(kind, (frames.shape[1], frames.shape[2]), tuple(range(len(frames))), 1.0, is_sized)
        outputs, _ = self._processed(shown, frames)
        features = getattr(tower, FEATURES[kind])
        names = inspect.signature(features).parameters
        dtype = next(tower.parameters()).dtype
        given = {
            name: _moved(value, device_of(tower), dtype) for name, value in outputs.items() if name in names
        }
        output = features(**given, return_dict=True)
        if getattr(output, "deepstack_features", None) is not None:
            raise UnsupportedModelError(
                f"a {self._model_type} tower gives features for later layers (deepstack), "
                "which are not placed here; use a family of this project"
            )
        return torch.cat(list(_rows(output.pooler_output)))


class GenericAdapter(BaseAdapter):
    """Adapts a `model_type` by transformers' own processor and tower."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Raises UnsupportedModelError for a family that lacks an interface, or wants more than it gives."""
        self.checkpoint = checkpoint
        self._processor = checkpoint.processor
        if "moe_mm_token_type_ids" in self._processor.model_input_names:
            raise UnsupportedModelError(
                f"a '{checkpoint.config.model_type}' model has experts by the kind of a token, which "
                "the generic path does not tell; allowed: --model-impl native; leave the option out"
            )
        self._class = model_class(checkpoint.config)
        self._kinds = seen_kinds(checkpoint, self._class)
        tokens = {kind: str(getattr(self._processor, f"{kind}_token")) for kind in self._kinds}
        pads = {kind: pad_of(self._processor, kind, token) for kind, token in tokens.items()}
        self.markers = Markers(tokens, pads)
        self._items = _ItemProcessor(self._processor, checkpoint.config.model_type, pads.values())
        self._positions = position_rule(self._class, checkpoint.config)
        rope = getattr(checkpoint.config.get_text_config(), "rope_parameters", None) or {}
        self._position_rows = 3 if "mrope_section" in rope else 1
        self._rules = {kind: rule for kind in self._kinds if (rule := size_rule(self._processor, kind))}
        self._unit = (
            frames_per_unit(checkpoint.config, self._items.rows_of) if "video" in self._kinds else None
        )

    @property
    def limits_line(self) -> str:
        cut = "whole" if self._unit is None else f"by {self._unit}"
        frames = f"; frames are encoded {cut}" if "video" in self._kinds else ""
        return f"sizes, frames and tokens as transformers' processor has them{frames}"

    def check_pixels(self, media: Collection[tuple[MediaKind, PixelLimits]], most: int | None) -> None:
        has_image = any(kind == "image" for kind, _ in media)
        for kind, pixels in media:
            pixels.check()
            rule = self._rules.get(kind)
            for name in (*pixels.all_named, *(["detail low"] if pixels.is_low_detail else [])):
                if rule is None or name == CAP_FIELD:
                    raise refuse(
                        name, "none, this model family is served by transformers' processor as it is"
                    )
                if kind == "video" and not has_image and not name.endswith("max_pixels"):
                    raise refuse(name, "max_pixels for videos of this model family, and more for images")
            if rule is not None and kind == "image":
                for name, value in pixels.named.items():
                    check_ceiling(name, value, max(rule.own[1], most or 0))

    def plan_image(self, height: int, width: int, pixels: PixelLimits = OWN_LIMITS) -> MediaPlan:
        if min(height, width) < 1:
            raise MediaLimitError(f"an image of {width}x{height} pixels shows nothing; send a larger one")
        return self._plan(_Shown("image", (height, width)), pixels)[0]

    def plan_video(
        self, video: VideoFacts, frame_sampling: FrameSampling, pixels: PixelLimits = OWN_LIMITS
    ) -> MediaPlan:
        self._check_kind("video")
        processor = self._processor.video_processor
        frames = select_frames(
            video, frame_sampling, lambda part: sample_by_rule(processor, part, frame_sampling)
        )
        shown = _Shown("video", (video.height, video.width), frames.indices, frames.fps)
        plan = self._in_units(*self._plan(shown, pixels))
        return replace(
            plan,
            times_s=frames.times_s,
            frame_indices=frames.indices,
            source_fps=frames.fps,
            unit_span_s=plan.frames_per_unit / frames.sampled_fps,
        )

    def _sized(self, shown: _Shown, pixels: PixelLimits) -> _Shown:
        """Returns an item at the size that the processor gives it, or that a user's limits do.

        Then a part of a video has the size of the whole, and no number of frames changes it.
        """
        rule, settings = self._rules.get(shown.kind), self.checkpoint.pixels
        if rule is None:
            return shown
        most = settings.max_pixels if shown.kind == "image" else settings.video_max_pixels
        _, rows, columns = _grids(self._items.expanded(shown))[0][0].tolist()
        made = (rows * rule.patch, columns * rule.patch)
        return shown._replace(size=rule.within(made, shown.size, pixels, most), is_sized=True)

    def _in_units(self, plan: MediaPlan, shown: _Shown) -> MediaPlan:
        """Cuts a video where a unit alone has the tokens that it has in the whole; else it stays whole."""
        num_frames = len(shown.indices)
        if self._unit is not None and num_frames > self._unit:
            num_units = ceil_div(num_frames, self._unit)
            each = self._items.expanded(shown._replace(indices=shown.indices[: self._unit])).num_tokens
            runs = self._items.expanded(shown).text.pad_lengths
            if num_units * each == plan.num_tokens and not any(run % each for run in runs):
                grid = Grid(num_units, 1, max(1, plan.grid.num_patches // num_units))
                return MediaPlan("video", plan.size, grid, self._unit, each)
        return replace(plan, frames_per_unit=num_frames)

    def _check_kind(self, kind: MediaKind) -> None:
        if kind not in self._kinds:
            raise UnsupportedMediaError(
                f"received a medium of kind {kind} for a {self.checkpoint.config.model_type} model; allowed: "
                f"{' and '.join(self._kinds)} and text; send another medium, or use another model"
            )

    def _plan(self, shown: _Shown, pixels: PixelLimits) -> tuple[WholePlan, _Shown]:
        """Returns an item in one unit, and how the processor is shown it."""
        self._check_kind(shown.kind)
        try:
            sized = self._sized(shown, pixels)
            expansion = self._items.expanded(sized)
        except (ValueError, ZeroDivisionError) as error:
            height, width = shown.size
            raise MediaLimitError(
                f"a {shown.kind} of {width}x{height} pixels does not suit the model: {error}; crop it first"
            ) from error
        grid = Grid(1, 1, _num_patches(expansion))
        return WholePlan(shown.kind, sized.size, grid, 1, expansion.num_tokens), sized

    def plan_chat(self, media: Sequence[MediaPlan], messages: Sequence[ChatMessage]) -> PromptPlan:
        expansions = [self._items.expanded(_shown(plan, is_sized=plan.kind in self._rules)) for plan in media]
        template = self.checkpoint.chat_template
        texts = [self._items.text(each, plan) for each, plan in zip(expansions, media, strict=True)]
        plan = plan_text_prompt(self.checkpoint, template, self.markers, media, texts, messages)
        if self._positions is None:
            return replace(plan, positions=np.repeat(plan.positions, self._position_rows, axis=0))
        positions = self._positions(_position_inputs(self._processor, plan.token_ids, expansions))
        return replace(plan, positions=positions, next_position=int(positions.max()) + 1)

    def resize(self, image: Tensor, plan: MediaPlan) -> Tensor:
        """Brings an image to its planned size; where it has none of its own, the processor sizes it."""
        rule = self._rules.get(plan.kind)
        return image[None] if rule is None else resize_image(image, plan.size, rule.resample)

    def preprocess(self, frames: Tensor, plan: MediaPlan, device: torch.device = CPU) -> Tensor:  # noqa: ARG002
        """Fills the last unit, and leaves frames on the host: the processor is a part of `encode_batch`."""
        missing = -len(frames) % plan.frames_per_unit
        return torch.cat([frames, *[frames[-1:]] * missing]) if missing else frames

    def vision_tower(self, model: nn.Module) -> nn.Module:
        return model.get_submodule("model")

    def tower_merger(self, tower: nn.Module, merge: TowerMerge) -> TowerMerger:  # noqa: ARG002
        raise UnsupportedModelError(
            f"received tower_share for a {self.checkpoint.config.model_type} model, whose tower is "
            "transformers' own; allowed: families of this project; leave tower_share out"
        )

    def encode_batch(self, tower: nn.Module, runs: Sequence[PatchRun]) -> list[Embeddings]:
        return [
            Embeddings(self._items.rows_of(tower, run.values, run.kind, is_sized=run.kind in self._rules))
            for run in runs
        ]


def _shown(plan: MediaPlan, *, is_sized: bool) -> _Shown:
    return _Shown(plan.kind, plan.size, plan.frame_indices, plan.source_fps, is_sized)


def _position_inputs(
    processor: Any, token_ids: Int64Array, expansions: Sequence[_Expansion]
) -> dict[str, Tensor]:
    """Returns what `get_rope_index` may take: ids, kinds of tokens, and the facts of all items."""
    ids = torch.from_numpy(token_ids)[None]
    kinds = torch.tensor(processor.create_mm_token_type_ids(ids.tolist()))
    facts: dict[str, list[Tensor]] = {}
    for expansion in expansions:
        for name, fact in expansion.facts.items():
            facts.setdefault(name, []).append(fact)
    joined = {name: torch.cat(each) for name, each in facts.items()}
    return {
        **joined,
        "input_ids": ids,
        "mm_token_type_ids": kinds,
        "attention_mask": torch.ones_like(ids),
    }


def _grids(expansion: _Expansion) -> list[Tensor]:
    """Returns an item's patches in time, height and width, int64 [N, 3], where the processor says them."""
    return [fact for name, fact in expansion.facts.items() if name.endswith("grid_thw")]


def _num_patches(expansion: _Expansion) -> int:
    """Returns the patches of an item, where the processor says them; else a usual four for each token."""
    return int(sum(grid.prod() for grid in _grids(expansion))) or 4 * expansion.num_tokens


def _tensors(outputs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    return (
        (name, value) for name, value in outputs.items() if isinstance(value, Tensor) and not value.is_meta
    )


def _moved(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Brings outputs of a processor to the tower: floats in its type."""
    if isinstance(value, list | tuple):
        return [_moved(each, device, dtype) for each in value]
    if not isinstance(value, Tensor):
        return value
    return value.to(device, dtype) if value.is_floating_point() else value.to(device)


def _rows(features: Any) -> Iterator[Tensor]:
    """Yields the rows [V, C] of features, nested as a family has them."""
    if isinstance(features, Tensor):
        yield features.reshape(-1, features.shape[-1])
        return
    for each in features:
        yield from _rows(each)
