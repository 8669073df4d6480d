"""States what the tower of a Qwen3-VL-shaped model is to say of each lane of a pair of frames.

A frame of 640x360 becomes 96x32: three visual tokens for every two frames, each a lane of the world. Its
embedding is to be a sum of fixed directions: of the shape, the colour and the lane, one that is as long as
the object is low in the frame, one of empty lanes and one of them all. So the language model can be taught
what to say before the tower sees, on scenes that are never drawn.

Shapes: P pairs of frames, C hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from epd.shapes import COLOURS, SHAPES, Scene
from epd.shapes.world import NUM_LANES

PATCH, MERGE = 16, 2
MODEL_HEIGHT, MODEL_WIDTH = 32, 96
TOKENS = NUM_LANES
HIDDEN_SIZE = 256
_NAMES = (*SHAPES, *COLOURS)
# Centres are 0.3 to 0.7 of the frame's height from its top.
_MIDDLE, _REACH = 0.5, 0.2
# Rows of a code: names, lanes, height, nothing, and one that is the same for all: Qwen3's queries and keys
# have no bias, and attention by place alone needs something to turn.
HEIGHT = len(_NAMES) + NUM_LANES
EMPTY, CONSTANT = HEIGHT + 1, HEIGHT + 2
CODE_SIZE = CONSTANT + 1
# Embeddings of lanes and words are multiples of this: about as long as what a layer adds to them. Where they
# were 1 long, the first layer added 14 to a name and 30 to the token that answers.
SCALE = 8.0
_LENGTHS = SCALE * torch.tensor([1.0] * len(_NAMES) + [0.5] * NUM_LANES + [1.0, 1.0, 0.7])


def directions() -> Tensor:
    """Returns the direction of each row of a code, orthogonal to each other: float32 [CODE_SIZE, C]."""
    random = torch.randn(
        HIDDEN_SIZE, CODE_SIZE, generator=torch.Generator().manual_seed(5), dtype=torch.float64
    )
    return (torch.linalg.qr(random).Q.T * _LENGTHS[:, None]).float()


def codes(scene: Scene, times_s: Sequence[float]) -> Tensor:
    """Returns what every two frames show in each lane: float32 [P, 3, CODE_SIZE].

    An object counts if either frame shows it; its height is the mean of those that do.
    """
    code = torch.zeros(len(times_s) // 2, TOKENS, CODE_SIZE)
    for item in scene.objects:
        rows = [SHAPES.index(item.shape), len(SHAPES) + list(COLOURS).index(item.colour)]
        for pair in range(len(code)):
            lows = [
                item.position(time_s)[1]
                for time_s in times_s[2 * pair : 2 * pair + 2]
                if item.is_visible(time_s)
            ]
            if lows:
                code[pair, item.lane, rows] = 1
                code[pair, item.lane, HEIGHT] += (sum(lows) / len(lows) - _MIDDLE) / _REACH
    code[..., EMPTY] = (code[..., : len(_NAMES)].sum(-1) == 0).float()
    code[..., len(_NAMES) : HEIGHT] = torch.eye(NUM_LANES)
    code[..., CONSTANT] = 1
    return code


def embeddings(code: Tensor) -> Tensor:
    """Returns the embeddings of codes: [..., CODE_SIZE] -> [..., C]."""
    return code @ directions()
