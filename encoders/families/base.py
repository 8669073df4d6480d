"""Implements what all model families have in common: prompts of one turn, and no wish for the decoder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from epd.chat import ChatMessage, one_turn
from epd.encoders.adapter import Embeddings
from epd.encoders.checkpoint import Checkpoint
from epd.encoders.plans import AudioSpec, MediaPlan, PromptPlan
from epd.errors import UnsupportedMediaError


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
