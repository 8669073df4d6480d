"""States what is true of each shape that a text names, so that finding it can be taught where it is named.

Every answer about "the star" needs the tokens of the star to be found. Answers alone do not teach it: after
850 steps, of two shapes the right colour was said half of the time. Linear layers that are thrown away read
it wherever a text names a shape, in a description a dozen times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from epd.shapes import COLOURS, SHAPES
from epd.shapes.stories import sightings
from training.lane_scenes import Shown
from training.qwen3_checkpoint import SPACE, places_of
from training.rows import NO_TARGET

_NUM_FACTS = 5


@dataclass(frozen=True, slots=True)
class Mentions:
    """States facts of the shapes that the tokens of questions and answers name, M of them.

    at: int64 [M], which token of the batch, padding left out.
    shown: float32 [M, 2], 1 where the first or the second video shows the shape.
    facts: int64 [M, 5]: colour, lane, motion, and the tokens of when it appears and leaves, or of " end";
        NO_TARGET for what is not so or not certain, like all of them with two videos.
    """

    at: Tensor
    shown: Tensor
    facts: Tensor

    @classmethod
    def of(
        cls,
        tokenizer: PreTrainedTokenizerFast,
        ids: Tensor,
        segments: Tensor,
        padding: int,
        rows: Sequence[Sequence[Shown]],
    ) -> Mentions:
        """Reads rows of ids and segments, [B, S], about one or two videos each."""
        is_token = segments != padding
        table = _shapes_of(tokenizer)
        named = table[ids.clamp(min=0)].masked_fill((segments < 1) | ~is_token, -1)
        number = is_token.flatten().cumsum(0).view(ids.shape) - 1
        at, shown, facts = [], [], []
        for row, clips in enumerate(rows):
            is_named = named[row] >= 0
            shapes = named[row][is_named]
            at.append(number[row][is_named])
            shown.append(_shown_in(clips)[shapes])
            facts.append(_facts_of(tokenizer, clips)[shapes])
        return cls(torch.cat(at), torch.cat(shown), torch.cat(facts))


@cache
def _shapes_of(tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """Returns which shape each token names, -1 for none: int64 [V]."""
    table = torch.full((len(tokenizer),), -1)
    for token, place in places_of(tokenizer, SHAPES):
        table[token] = place
    return table


def _shown_in(clips: Sequence[Shown]) -> Tensor:
    """Returns 1 where a video shows a shape: float32 [6, 2]."""
    shown = torch.zeros(len(SHAPES), 2)
    for number, clip in enumerate(clips):
        shown[[SHAPES.index(item.shape) for item in clip.scene.objects], number] = 1
    return shown


def _facts_of(tokenizer: PreTrainedTokenizerFast, clips: Sequence[Shown]) -> Tensor:
    """Returns the facts of every shape: int64 [6, 5]."""
    facts = torch.full((len(SHAPES), _NUM_FACTS), NO_TARGET)
    for shape, values in _known(tokenizer, clips[0]) if len(clips) == 1 else ():
        facts[shape] = torch.tensor(values)
    return facts


def _known(tokenizer: PreTrainedTokenizerFast, clip: Shown) -> Iterator[tuple[int, list[int]]]:
    """Yields each shape of a clip and its facts."""
    colours = list(COLOURS)
    if clip.is_image:
        for item in clip.scene.objects:
            facts = [colours.index(item.colour), item.lane, *[NO_TARGET] * 3]
            yield SHAPES.index(item.shape), facts
        return
    for each in sightings(clip.scene, clip.times_s):
        seen = (str(each.from_s), f"{SPACE}end" if each.to_s is None else str(each.to_s))
        times = tokenizer.convert_tokens_to_ids(list(seen))
        yield SHAPES.index(each.shape), [colours.index(each.colour), each.place, each.motion, *times]
