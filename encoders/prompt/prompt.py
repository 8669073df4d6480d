"""Lays out the prompt of a checkpoint's chat template, with each placeholder expanded to its visual tokens.

The template is tokenised with one pad token per item and the ids are expanded: the same ids as tokenising
thousands of pads, without doing so.

Positions are M-RoPE's (Qwen2-VL, section 2.1): text advances by one; visual tokens have time, row, column.

text  text | frame 0      frame 1      frame 2      | text
t  0    1  |  2  2  2  2   4  4  4  4   6  6  6  6  |  7 ...      authors: text continues after the largest
h  0    1  |  2  2  3  3   2  2  3  3   2  2  3  3  |  7 ...      position of the span, on any axis
w  0    1  |  2  3  2  3   2  3  2  3   2  3  2  3  |  7 ...
                                                       4 ...      transformers: behind its rows and columns

The two differ where a span takes more positions in time than in height and width: docs/decisions/0009.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from epd.chat import ChatMessage
from epd.encoders.adapter import Adapter
from epd.encoders.checkpoint import Checkpoint
from epd.encoders.plans import MediaItem, MediaPlan, PromptPlan
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


PositionLayout = Literal["authors", "transformers"]
LAYOUTS: tuple[PositionLayout, ...] = get_args(PositionLayout)


@dataclass(frozen=True, slots=True)
class VisualSpan:
    """Describes a run of `frames` x `rows` x `columns` visual tokens.

    frame_span_s: seconds of video from one frame to the next. positions_per_second: of the time axis.
    """

    range: PlaceholderRange
    frames: int
    rows: int
    columns: int
    frame_span_s: float = 1.0
    positions_per_second: float = 1.0

    def __post_init__(self) -> None:
        if self.range.length != self.frames * self.rows * self.columns:
            raise ValueError(f"{self.frames} x {self.rows} x {self.columns} tokens do not fill {self.range}")


def mrope_positions(
    num_tokens: int, spans: Sequence[VisualSpan], layout: PositionLayout = "authors"
) -> tuple[Int64Array, int]:
    """Computes positions int64 [3, num_tokens] of a prompt with these spans, and the next position.

    layout: where text behind a span is placed: as by the authors' code and vLLM, or as transformers does
    from 5.3 on.
    """
    pieces = list(_pieces(num_tokens, spans, layout))
    positions = np.concatenate(pieces, axis=1) if pieces else np.zeros((3, 0), dtype=np.int64)
    return positions, int(positions.max(initial=-1)) + 1


def _pieces(num_tokens: int, spans: Sequence[VisualSpan], layout: PositionLayout) -> Iterator[Int64Array]:
    offset, position = 0, 0
    for span in spans:
        yield _text(span.range.offset - offset, position)
        position += span.range.offset - offset
        visual = _visual(span, position, layout)
        yield visual
        position = int(visual.max()) + 1 if layout == "authors" else position + max(span.rows, span.columns)
        offset = span.range.stop
    yield _text(num_tokens - offset, position)


def _text(length: int, start: int) -> Int64Array:
    return np.broadcast_to(np.arange(start, start + length, dtype=np.int64), (3, length))


def _visual(span: VisualSpan, start: int, layout: PositionLayout) -> Int64Array:
    times = _times(span, layout)
    grid = np.meshgrid(times, np.arange(span.rows), np.arange(span.columns), indexing="ij")
    return np.stack(grid).reshape(3, -1).astype(np.int64) + start


def _times(span: VisualSpan, layout: PositionLayout) -> Int64Array:
    """Computes the position of each frame after the first, int64 [frames].

    float32, multiplied in the reference's order, then cut off: a last bit may decide an integer.
    """
    frames = np.arange(span.frames, dtype=np.float32)
    span_s, per_second = np.float32(span.frame_span_s), np.float32(span.positions_per_second)
    times = frames * span_s * per_second if layout == "authors" else frames * (per_second * span_s)
    return times.astype(np.int64)


def plan_tokens(adapter: Adapter, token_ids: Sequence[int]) -> PromptPlan:
    """Plans a prompt of exactly these tokens, each one position after the last, on every axis."""
    num_tokens, num_rows = len(token_ids), len(adapter.plan_prompt((), "?").positions)
    positions = np.tile(np.arange(num_tokens, dtype=np.int64), (num_rows, 1))
    return PromptPlan(np.asarray(token_ids, dtype=np.int64), positions, num_tokens, ())
