"""Loads a model for a worker of one rank or of several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from epd.encoders.names import WeightSet
from epd.stages.decoder.rank_cut import cut_model
from epd.stages.loading.weight_files import TensorPart
from epd.stages.loading.weights import OnBytes, load_role
from epd.stages.placement import Placement
from epd.stages.rank import Rank
from epd.stages.ranks.group import ProcessRanks


def load_with_ranks(
    path: Path, role: WeightSet, placement: Placement, size: int, on_progress: OnBytes | None = None
) -> tuple[Any, ProcessRanks | None]:
    """Loads a model, or rank 0's part of it and the other ranks; None with a size of 1.

    The vision tower is rank 0's, whole. Raises as `load_role` does, RequestError for more ranks than GPUs,
    UnsupportedModelError for a language model that so many ranks cannot share, and RankLostError.
    """
    if size == 1:
        return load_role(path, role, placement, on_progress=on_progress).model, None
    started: list[ProcessRanks] = []

    def cut(model: nn.Module) -> dict[str, TensorPart]:
        """Cuts the model, and then starts the others: what cannot be shared is refused before."""
        parts = cut_model(model, Rank(0, size))
        started.append(ProcessRanks(path, placement, size, num_threads=torch.get_num_threads()))
        return parts

    try:
        model = load_role(path, role, placement, on_progress=on_progress, cut=cut).model
        started[0].connect()
    except BaseException:
        for ranks in started:
            ranks.close()
        raise
    return model, started[0]
