"""The prompt of a checkpoint's own chat template, with each placeholder expanded to its visual tokens.

The template is tokenised with one pad token per item and the ids are expanded: the same ids as tokenising
thousands of pads, without doing so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from encoders.adapter import Int64Array, MediaItem, MediaPlan
from encoders.checkpoint import Checkpoint
from epd.errors import RequestError
from epd.types import MediaKind, PlaceholderRange


@dataclass(frozen=True, slots=True)
class Expansion:
    """What replaces one pad token: its ids, and where in them the visual tokens of each unit stand."""

    token_ids: Int64Array
    units: tuple[PlaceholderRange, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """An expanded prompt: ids int64 [T] and the items placed in it."""

    token_ids: Int64Array
    media: tuple[MediaItem, ...]


def check_question(question: str) -> None:
    """Raises RequestError for a question with nothing in it."""
    if not question.strip():
        raise RequestError("the question is empty; ask something about the media")


def lay_out(
    checkpoint: Checkpoint,
    media: Sequence[MediaPlan],
    question: str,
    expand: Callable[[MediaPlan], Expansion],
) -> Layout:
    """Renders [system][media][question], tokenises it and expands every pad token.

    Raises RequestError for an empty question, or one that contains a pad token itself.
    """
    check_question(question)
    token_ids = _tokenise(checkpoint, [plan.kind for plan in media], question)
    pads = np.flatnonzero(np.isin(token_ids, [_pad_id(checkpoint, kind) for kind in ("image", "video")]))
    if [int(token_ids[pad]) for pad in pads] != [_pad_id(checkpoint, plan.kind) for plan in media]:
        raise RequestError(
            "the question contains a token reserved for media, such as <|image_pad|>; remove it"
        )
    expansions = [expand(plan) for plan in media]
    items = tuple(
        MediaItem(
            plan, tuple(PlaceholderRange(offset + unit.offset, unit.length) for unit in expansion.units)
        )
        for plan, expansion, offset in zip(media, expansions, _offsets(pads, expansions), strict=True)
    )
    return Layout(_expanded(token_ids, pads, expansions), items)


def _tokenise(checkpoint: Checkpoint, kinds: Sequence[MediaKind], question: str) -> Int64Array:
    content = [*({"type": kind} for kind in kinds), {"type": "text", "text": question}]
    text = checkpoint.tokenizer.apply_chat_template(
        [{"role": "user", "content": content}],
        chat_template=checkpoint.chat_template,
        tokenize=False,
        add_generation_prompt=True,
    )
    return np.asarray(checkpoint.tokenizer(text)["input_ids"], dtype=np.int64)


def _pad_id(checkpoint: Checkpoint, kind: str) -> int:
    return int(checkpoint.config.image_token_id if kind == "image" else checkpoint.config.video_token_id)


def _offsets(pads: Int64Array, expansions: Sequence[Expansion]) -> Iterator[int]:
    """Where each expansion starts in the expanded prompt."""
    grown = 0
    for pad, expansion in zip(pads, expansions, strict=True):
        yield int(pad) + grown
        grown += len(expansion.token_ids) - 1


def _expanded(token_ids: Int64Array, pads: Int64Array, expansions: Sequence[Expansion]) -> Int64Array:
    pieces, start = [], 0
    for pad, expansion in zip(pads, expansions, strict=True):
        pieces += [token_ids[start:pad], expansion.token_ids]
        start = int(pad) + 1
    return np.concatenate([*pieces, token_ids[start:]])
