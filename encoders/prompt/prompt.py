"""Lays out the prompt of a checkpoint's chat template, with each placeholder expanded to its visual tokens.

The template is tokenised with one pad token per item and the ids are expanded: the same ids as tokenising
thousands of pads, without doing so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from epd.chat import ChatMessage
from epd.encoders.checkpoint import Checkpoint
from epd.encoders.plans import MediaItem, MediaPlan
from epd.encoders.prompt.chat import Placeholders, check_media, moved_media, render_chat
from epd.types import Int64Array, MediaKind, PlaceholderRange


@dataclass(frozen=True, slots=True)
class Expansion:
    """Holds what replaces one pad token: its ids, and the places of each unit's visual tokens among them."""

    token_ids: Int64Array
    units: tuple[PlaceholderRange, ...]


def lay_out(
    checkpoint: Checkpoint,
    media: Sequence[MediaPlan],
    messages: Sequence[ChatMessage],
    expand: Callable[[MediaPlan], Expansion],
) -> tuple[Int64Array, tuple[MediaItem, ...]]:
    """Renders the messages, tokenises them and expands every pad token: returns ids [T], and items in them.

    media: of the places in the messages, in order; ValueError for others.
    Raises RequestError as `render_chat` does, and where the template moves or drops media.
    """
    check_media(messages, [plan.kind for plan in media])
    pad_ids = [_pad_id(checkpoint, kind) for kind in ("image", "video")]
    reserved = checkpoint.tokenizer.convert_ids_to_tokens(pad_ids)
    placeholders = _placeholders(checkpoint, reserved)
    text = render_chat(checkpoint, checkpoint.chat_template, messages, reserved, placeholders)
    token_ids = np.asarray(checkpoint.tokenizer(text)["input_ids"], dtype=np.int64)
    pads = np.flatnonzero(np.isin(token_ids, pad_ids))
    if [int(token_ids[pad]) for pad in pads] != [_pad_id(checkpoint, plan.kind) for plan in media]:
        raise moved_media(len(pads), len(media))
    expansions = [expand(plan) for plan in media]
    items = tuple(
        MediaItem(
            plan, tuple(PlaceholderRange(offset + unit.offset, unit.length) for unit in expansion.units)
        )
        for plan, expansion, offset in zip(media, expansions, _offsets(pads, expansions), strict=True)
    )
    return _expanded(token_ids, pads, expansions), items


def in_frames(frames: Sequence[Sequence[int]], pad_id: int, num_tokens: int) -> Expansion:
    """Expands the one pad in the ids of each unit, which has words around it, to its `num_tokens`."""
    pads = np.full(num_tokens, pad_id, dtype=np.int64)
    pieces: list[Int64Array] = []
    units: list[PlaceholderRange] = []
    offset = 0
    for frame in frames:
        ids = np.asarray(frame, dtype=np.int64)
        at = int(np.flatnonzero(ids == pad_id)[0])
        units.append(PlaceholderRange(offset + at, num_tokens))
        pieces += [ids[:at], pads, ids[at + 1 :]]
        offset += len(ids) - 1 + num_tokens
    return Expansion(np.concatenate(pieces), tuple(units))


def _pad_id(checkpoint: Checkpoint, kind: str) -> int:
    return int(checkpoint.config.image_token_id if kind == "image" else checkpoint.config.video_token_id)


def _placeholders(checkpoint: Checkpoint, pads: Sequence[str]) -> Placeholders:
    """Returns what stands for an image and a video in a text: its pad between the tokens that enclose it."""
    kinds: tuple[MediaKind, ...] = "image", "video"
    found: dict[MediaKind, str] = {}
    for kind, pad in zip(kinds, pads, strict=True):
        start, end = checkpoint.tokenizer.convert_ids_to_tokens(enclosing_ids(checkpoint.config, kind))
        found[kind] = f"{start}{pad}{end}"
    return found


def enclosing_ids(config: Any, kind: MediaKind) -> list[int]:
    """Returns the tokens before and behind media of a kind, which some families have for all kinds."""
    own = kind if hasattr(config, f"{kind}_start_token_id") else "vision"
    return [int(getattr(config, f"{own}_{edge}_token_id")) for edge in ("start", "end")]


def _offsets(pads: Int64Array, expansions: Sequence[Expansion]) -> Iterator[int]:
    """Computes the start of each expansion in the expanded prompt."""
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
