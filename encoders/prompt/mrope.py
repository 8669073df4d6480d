"""Computes M-RoPE (Qwen2-VL, section 2.1): text advances by one; visual tokens have time, row, column.

text  text | frame 0      frame 1      frame 2      | text
t  0    1  |  2  2  2  2   4  4  4  4   6  6  6  6  |  7 ...      authors: text continues after the largest
h  0    1  |  2  2  3  3   2  2  3  3   2  2  3  3  |  7 ...      position of the span, on any axis
w  0    1  |  2  3  2  3   2  3  2  3   2  3  2  3  |  7 ...
                                                       4 ...      transformers: behind its rows and columns

The two differ where a span takes more positions in time than in height and width: docs/decisions/0009.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from epd.types import Int64Array, PlaceholderRange

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
