"""States what is true of each shape that a text names, so that finding it can be taught where it is named.

Every answer about "the star" needs the tokens of the star to be found. Answers alone do not teach it: after
850 steps, of two shapes the right colour was said half of the time. Linear layers that are thrown away read
it wherever a text names a shape, in a description a dozen times. Names alone did not do it either: at step
1,781 colours were known at 0.98 of the names and said in 0.29 of the answers, since the token that answers
did not look at the name. So it is read wherever the next token is part of an answer, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from epd.shapes import COLOURS, SHAPES
from training.lane_scenes import Shown
from training.qwen3_checkpoint import SPACE, places_of
from training.rows import NO_TARGET
from training.stories import sightings

_NUM_FACTS = 5


@dataclass(frozen=True, slots=True)
class Mentions:
    """States facts of shapes at M tokens of questions and answers.

    at: int64 [M], which token of the batch, padding left out.
    shape: int64 [M], which shape.
    shown: float32 [M, 2], 1 where the first or the second video shows the shape.
    facts: int64 [M, 5]: colour, lane, motion, and the tokens of when it appears and leaves, or of " end";
        NO_TARGET for what is not so or not certain, like all of them with two videos.
    """

    at: Tensor
    shape: Tensor
    shown: Tensor
    facts: Tensor


def mentions_of(
    tokenizer: PreTrainedTokenizerFast,
    ids: Tensor,
    segments: Tensor,
    targets: Tensor,
    padding: int,
    rows: Sequence[Sequence[Shown]],
) -> tuple[Mentions, Mentions]:
    """Returns where shapes are named, and where answers go on about the shape named last.

    ids, segments, targets: int64 [B, S]; `rows` has the one or two videos of each.
    """
    is_token = segments != padding
    named = _shapes_of(tokenizer)[ids.clamp(min=0)].masked_fill((segments < 1) | ~is_token, -1)
    place = torch.arange(ids.shape[1]).expand_as(ids)
    last = torch.where(named >= 0, place, 0).cummax(1).values
    subject = torch.where(segments.gather(1, last) == segments, named.gather(1, last), -1)
    goes_on = subject.masked_fill((targets == NO_TARGET) | (named >= 0), -1)
    number = is_token.flatten().cumsum(0).view(ids.shape) - 1
    shown = torch.stack([_shown_in(clips) for clips in rows])
    facts = torch.stack([_facts_of(tokenizer, clips) for clips in rows])
    return _mentions(named, number, shown, facts), _mentions(goes_on, number, shown, facts)


def _mentions(shapes: Tensor, number: Tensor, shown: Tensor, facts: Tensor) -> Mentions:
    """Looks up the facts of shapes [B, S], -1 for none. shown: [B, 6, 2]; facts: [B, 6, 5]."""
    row, column = (shapes >= 0).nonzero(as_tuple=True)
    shape = shapes[row, column]
    return Mentions(number[row, column], shape, shown[row, shape], facts[row, shape])


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
