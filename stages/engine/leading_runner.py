"""Runs the passes of rank 0, which the other ranks of a worker repeat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from epd.encoders import Embeddings
from epd.encoders.device import to_device
from epd.errors import RequestError
from epd.stages.engine.kv_pool import KVPools
from epd.stages.engine.model_runner import ModelRunner
from epd.stages.engine.packed_pass import Segment, visual_of
from epd.stages.rank import RankGroup


class LeadingRunner(ModelRunner):
    """Tells the other ranks each pass before it computes its own part."""

    def __init__(self, model: Any, pools: KVPools, ranks: RankGroup) -> None:
        """Takes rank 0's part of a model, see `cut_model`."""
        super().__init__(model, None, pools, ranks=ranks)
        self._group = ranks

    def run(self, segments: Sequence[Segment]) -> Tensor:
        """Computes all segments as `ModelRunner.run` does.

        Raises RequestError for segments that do not keep or read everything, since each rank would choose
        by its own heads, and RankLostError.
        """
        if not all(segment.is_whole for segment in segments):
            raise RequestError(
                "received a reduction that the language model chooses by its heads, which several ranks "
                "share; allowed: a method that chooses before it; choose another --reduction"
            )
        packed, visual = self.packed(segments), visual_of(segments)
        if visual is not None:
            visual = visual.mapped(lambda rows: to_device(rows, self._device).to(self._dtype))
        self._group.tell(packed)
        with self._group.computing():
            share_visual(self._group, visual)
            return self.run_packed(packed, visual)


def share_visual(ranks: RankGroup, visual: Embeddings | None) -> None:
    for rows in () if visual is None else (visual.rows, *visual.deepstack):
        ranks.share(rows.contiguous())
