"""What the encode stage asks of a model family: patches from frames, embeddings from batches of patches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor, nn

from encoders.adapter import Embeddings, MediaPlan, PatchRun


class BatchEncoder(Protocol):
    """The part of an `Adapter` that runs on an encode worker."""

    def preprocess(self, frames: Tensor, plan: MediaPlan) -> Tensor:
        """Turns frames of planned size, uint8 [N, h, w, 3], into what the vision tower takes."""
        ...

    def encode_batch(self, tower: nn.Module, runs: Sequence[PatchRun]) -> list[Embeddings]:
        """Encodes several runs of whole units, of equal grid height and width, in one call of the tower."""
        ...
