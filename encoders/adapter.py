"""Defines the protocol of model families, what goes in and out of a tower, and what all families do alike.

Shapes: N frames, H x W pixels, P patches, D values of a patch, V visual tokens, C channels of the language
model, T prompt tokens. Units, plans and prompts: `epd.encoders.plans`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from epd.chat import ChatMessage, one_turn
from epd.encoders.checkpoint import Checkpoint
from epd.encoders.device import CPU
from epd.encoders.plans import AudioSpec, Grid, MediaPlan, PromptPlan, VideoFacts
from epd.errors import UnsupportedMediaError
from epd.frame_sampling import FrameSampling
from epd.pixel_limits import OWN_LIMITS, PixelLimits
from epd.reduction import TowerMerge
from epd.types import MediaKind


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Holds visual tokens as the language model takes them.

    rows: [V, C], to replace the token embeddings of the placeholders, or to be added to them (Molmo 2).
    deepstack: one [V, C] for each of the first decoder layers, added to their output (Qwen3-VL); else empty.
    """

    rows: Tensor
    deepstack: tuple[Tensor, ...] = ()

    def __post_init__(self) -> None:
        if any(layer.shape != self.rows.shape for layer in self.deepstack):
            raise ValueError(f"deepstack features must be shaped like the rows, {tuple(self.rows.shape)}")

    def __len__(self) -> int:
        return len(self.rows)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Embeddings:
        """Applies a function to the rows and to those of each deepstack layer."""
        return Embeddings(change(self.rows), tuple(map(change, self.deepstack)))

    def cut(self, start: int, stop: int) -> Embeddings:
        """Returns visual tokens [start, stop)."""
        return self if (start, stop) == (0, len(self)) else self.mapped(lambda rows: rows[start:stop])


def concatenated(parts: Sequence[Embeddings]) -> Embeddings:
    """Concatenates embeddings in order; a single part is returned as it is."""
    if len(parts) == 1:
        return parts[0]
    layers = zip(*(part.deepstack for part in parts), strict=True)
    return Embeddings(torch.cat([part.rows for part in parts]), tuple(torch.cat(layer) for layer in layers))


@dataclass(frozen=True, slots=True)
class PatchRun:
    """Holds whole units of one item, ready for the vision tower.

    kind: of the item.
    values: what `Adapter.preprocess` made of their frames.
    grid: of these units alone.
    """

    kind: MediaKind
    values: Tensor
    grid: Grid


class TowerMerger(Protocol):
    """Merges neighbours that look alike inside of a vision tower: `epd.encoders.reduction.tower_merging`."""

    def during(self, runs: Sequence[PatchRun]) -> AbstractContextManager[None]:
        """Merges in the calls of the tower inside of the context, which are of these runs; one at a time."""
        ...


class MediaPlanner(Protocol):
    """Plans media and prompts of one model family, without the model."""

    @property
    def tokenizer(self) -> Any:
        """Returns the checkpoint's `PreTrainedTokenizer`."""
        ...

    @property
    def limits_line(self) -> str:
        """Returns what media are held to, and by whom, for people."""
        ...

    def check_pixels(self, media: Collection[tuple[MediaKind, PixelLimits]], most: int | None) -> None:
        """Raises RequestError for limits that are too high, or that change nothing for any of the media.

        media: all of a request. most: pixels that may be asked for above the processor's own limit.
        """
        ...

    def plan_image(self, height: int, width: int, pixels: PixelLimits = OWN_LIMITS) -> MediaPlan:
        """Plans an image of `height` x `width` pixels. Raises MediaLimitError for an impossible shape."""
        ...

    def plan_video(
        self, video: VideoFacts, frame_sampling: FrameSampling, pixels: PixelLimits = OWN_LIMITS
    ) -> MediaPlan:
        """Plans a video. Raises RequestError for an invalid sampling, MediaLimitError as above."""
        ...

    @property
    def compresses(self) -> bool:
        """Reports whether the pixels of a video decide which of its tokens are kept: see `compressed`."""
        ...

    def compressed(self, plan: MediaPlan, parts: Iterable[Tensor]) -> MediaPlan:
        """Returns the plan of a video with the tokens that are kept.

        parts: all frames of planned size, in order, uint8 [N, h, w, 3] each; only one part is held at a time.
        """
        ...

    @property
    def audio(self) -> AudioSpec:
        """Returns what sound the model takes. Raises UnsupportedMediaError for a model that hears nothing."""
        ...

    def plan_audio(self, num_samples: int, start_s: float = 0.0) -> MediaPlan:
        """Plans a clip of so many samples at the model's rate. start_s: where it starts in its medium.

        Raises MediaLimitError for one that is too short, UnsupportedMediaError as `audio`.
        """
        ...

    def plan_prompt(self, media: Sequence[MediaPlan], question: str) -> PromptPlan:
        """Lays out one question after the media. Raises RequestError for an unusable question."""
        ...

    def plan_chat(self, media: Sequence[MediaPlan], messages: Sequence[ChatMessage]) -> PromptPlan:
        """Lays out a conversation by the checkpoint's own chat template.

        media: of the places in the messages, in order. Raises RequestError for messages that cannot be used.
        """
        ...

    def resize(self, image: Tensor, plan: MediaPlan) -> Tensor:
        """Brings an image, uint8 [H, W, 3], to the planned size, uint8 [1, h, w, 3]."""
        ...


class TowerCalls(Protocol):
    """Calls the model of one family. Holds no weights: the model is passed in."""

    def preprocess(self, frames: Tensor, plan: MediaPlan, device: torch.device = CPU) -> Tensor:
        """Turns frames of planned size, uint8 [N, h, w, 3] on the host, into patches, float32 [P, D].

        Of a clip of sound, `frames` are the bytes of its float32 samples, uint8 [1, B].

        Only the last run of a video may have a number of frames that does not fill its last unit.
        device: of the patches; frames go there as bytes, and become patches there.
        """
        ...

    def vision_tower(self, model: nn.Module) -> nn.Module:
        """Returns the part of the whole model that `encode_batch` needs."""
        ...

    def encode_batch(self, tower: nn.Module, runs: Sequence[PatchRun]) -> list[Embeddings]:
        """Encodes runs of one kind and one grid height and width, of any items, in one call of the tower."""
        ...

    def join(self, embeddings: Embeddings, plan: MediaPlan, start: int, stop: int) -> Embeddings:
        """Converts the encoded units [start, stop) to the rows at their places in the prompt.

        Most families return them unchanged. An item that is joined whole can be joined only from all its
        units.
        """
        ...

    def tower_merger(self, tower: nn.Module, merge: TowerMerge) -> TowerMerger:
        """Returns what merges neighbours inside of the tower.

        Raises UnsupportedModelError for a tower where it cannot, RequestError for a layer that it lacks.
        """
        ...

    def prepare_decoder(self, decoder: nn.Module) -> None:
        """Changes the family's decoder, where needed, to take what `decoder_kwargs` returns."""
        ...

    def decoder_kwargs(self, visual_rows: Tensor, embeddings: Embeddings) -> dict[str, Any]:
        """Returns the arguments that the prepared decoder takes besides embeddings and positions.

        visual_rows: int64 [V], the rows of the pass that those of `embeddings` belong to; on its device.
        """
        ...

    def prompt_kwargs(self, prompt_ids: Tensor) -> dict[str, Any]:
        """Returns the arguments that the decoder takes for tokens of prompts.

        prompt_ids: int64 [T], of all tokens of a pass, -1 for those of answers; on its device.
        """
        ...


class Adapter(MediaPlanner, TowerCalls, Protocol):
    """Adapts one model family."""


def num_deepstack(config: Any) -> int:
    """Counts the decoder layers that get features of visual tokens, by a transformers configuration."""
    tower = getattr(config, "vision_config", None)
    return len(getattr(tower, "deepstack_visual_indexes", None) or ())


def place(
    token_embeddings: Tensor, visual_rows: Tensor, embeddings: Embeddings, *, adds: bool = False
) -> Tensor:
    """Puts the rows of `embeddings` at `visual_rows`, int64 [V], of token embeddings: [1, T, C].

    adds: adds them to what is there.
    """
    rows = embeddings.rows.to(token_embeddings.dtype)
    if adds:
        return token_embeddings.index_add(1, visual_rows, rows[None])
    return token_embeddings.index_copy(1, visual_rows, rows[None])


class BaseAdapter(ABC):
    """Implements the part of `Adapter` that needs no knowledge of a family."""

    checkpoint: Checkpoint

    @property
    def tokenizer(self) -> Any:
        return self.checkpoint.tokenizer

    @property
    def limits_line(self) -> str:
        return self.checkpoint.pixels.line(self.checkpoint.config.model_type)

    @property
    def compresses(self) -> bool:
        return False

    def compressed(self, plan: MediaPlan, parts: Iterable[Tensor]) -> MediaPlan:  # noqa: ARG002
        return plan

    @property
    def audio(self) -> AudioSpec:
        raise UnsupportedMediaError(
            f"received audio for a model that hears nothing ({self.checkpoint.config.model_type}); allowed: "
            "images, videos and text; use a model that hears, such as Qwen2-Audio"
        )

    def plan_audio(self, num_samples: int, start_s: float = 0.0) -> MediaPlan:
        raise NotImplementedError("there is no audio to plan: `audio` refuses it")

    @abstractmethod
    def plan_chat(self, media: Sequence[MediaPlan], messages: Sequence[ChatMessage]) -> PromptPlan:
        """Lays out a conversation, see `Adapter`."""

    def plan_prompt(self, media: Sequence[MediaPlan], question: str) -> PromptPlan:
        return self.plan_chat(media, one_turn([plan.kind for plan in media], question))

    def join(self, embeddings: Embeddings, plan: MediaPlan, start: int, stop: int) -> Embeddings:  # noqa: ARG002
        return embeddings

    def prepare_decoder(self, decoder: nn.Module) -> None:  # noqa: B027 # for a family's use
        pass

    def decoder_kwargs(self, visual_rows: Tensor, embeddings: Embeddings) -> dict[str, Any]:  # noqa: ARG002
        return {}

    def prompt_kwargs(self, prompt_ids: Tensor) -> dict[str, Any]:  # noqa: ARG002
        return {}
