"""The frames of single groups, read from files only when a group has to be encoded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from epd import video
from epd.encoders.adapter import Adapter
from epd.encoders.groups import MediaGroup

FramesOf = Callable[[MediaGroup], Tensor]


def frames_from(adapter: Adapter, sources: Sequence[str | Path]) -> FramesOf:
    """What `ShardedEncoding.encode` asks for frames. sources: of the request's items, in order.

    Raises MediaError when asked for a group that cannot be read.
    """

    def frames_of(group: MediaGroup) -> Tensor:
        source = sources[group.item]
        if group.plan.kind == "image":
            tiles = adapter.resize(torch.from_numpy(video.load_image(source)), group.plan)
            return tiles if group.stop - group.start == len(tiles) else tiles[group.start : group.stop]
        frames = video.decode(source, times_s=group.plan.times_s, size=group.plan.size)
        return torch.from_numpy(frames.data)

    return frames_of
