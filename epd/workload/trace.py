"""Reads workloads from traces: our own access log, or CSV with the columns of the public Azure LMM trace.

    TIMESTAMP                    NumImages  ContextTokens  GeneratedTokens
    2024-10-15 00:00:01.250000   2          1743           112

TIMESTAMP is a date and time, or seconds; ContextTokens counts text and images together; NumImages may be
missing (the text traces), and VideoSeconds, a column of ours, adds one video of that length. Names in any
case, columns in any order, others ignored. Source: AzureLMMInferenceDataset2025 of the Azure Public Dataset
(ModServe, SoCC 2025). The access log: see `epd.workload.access_log`.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain, islice
from pathlib import Path

from epd.errors import RequestError
from epd.workload.access_log import MARK, LogRow, ModelSight, log_shape, parse_log
from epd.workload.arrivals import TraceArrivals
from epd.workload.requests import RequestShape, Resolution, TraceShapes, VideoSpec

_REQUIRED = ("timestamp", "contexttokens", "generatedtokens")
_NUM_SNIFFED = 1000
_IMAGE_SIZE, _VIDEO_SIZE = Resolution(448, 448), Resolution(640, 360)


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace. time_s: from the first of the trace."""

    time_s: float
    num_images: int
    context_tokens: int
    generated_tokens: int
    video_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TraceMedia:
    """What a trace does not say: sizes of media, and how many tokens of the context an image took.

    max_text_tokens, max_output_tokens: longer texts and answers are cut, for models with a shorter context.
    sight: of the model that wrote an access log.
    """

    image_size: Resolution = _IMAGE_SIZE
    tokens_per_image: int = 256
    video_fps: int = 24
    video_size: Resolution = _VIDEO_SIZE
    max_text_tokens: int | None = None
    max_output_tokens: int | None = None
    sight: ModelSight = field(default_factory=ModelSight)

    def shape(self, row: TraceRow | LogRow) -> RequestShape:
        if isinstance(row, LogRow):
            text, output = row.text_tokens, row.completion_tokens
            most_text, most_output = self.max_text_tokens or text, self.max_output_tokens or output
            return log_shape(row, self.sight, self.video_fps, most_text, most_output)
        text = max(1, row.context_tokens - row.num_images * self.tokens_per_image)
        return RequestShape(
            min(text, self.max_text_tokens or text),
            min(max(1, row.generated_tokens), self.max_output_tokens or row.generated_tokens or 1),
            (self.image_size,) * row.num_images,
            (VideoSpec(row.video_s, self.video_fps, self.video_size),) if row.video_s else (),
        )


def open_trace(path: Path, max_rows: int | None = None) -> Sequence[TraceRow | LogRow]:
    """Returns the first rows of a CSV file or access log, plain or gzip. Raises RequestError."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open() as lines:
            return _parse_any(lines, max_rows)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise RequestError(
            f"the trace {str(path)!r} cannot be read: {error}; give a CSV file or an access log, or either "
            "with gzip"
        ) from None


def _parse_any(lines: Iterable[str], max_rows: int | None) -> Sequence[TraceRow | LogRow]:
    """Returns a log may begin with lines of others, so its mark is looked for in the first thousand."""
    source = iter(lines)
    head = list(islice(source, _NUM_SNIFFED))
    whole = chain(head, source)
    if any(MARK in line for line in head):
        return parse_log(whole, max_rows)
    return parse_trace(whole, max_rows)


def parse_trace(lines: Iterable[str], max_rows: int | None = None) -> list[TraceRow]:
    """Returns rows of CSV text with a header line, in order of time. Raises RequestError for nonsense."""
    reader = csv.DictReader(lines)
    names = {name.strip().lower(): name for name in reader.fieldnames or ()}
    missing = [name for name in _REQUIRED if name not in names]
    if missing:
        raise RequestError(
            f"the trace has the columns {', '.join(names) or 'none'}; it needs TIMESTAMP, ContextTokens and "
            "GeneratedTokens, and may have NumImages and VideoSeconds"
        )
    records = ({key: record.get(name) or "" for key, name in names.items()} for record in reader)
    rows = sorted(_rows(islice(records, max_rows)), key=lambda row: row.time_s)
    if not rows:
        raise RequestError("the trace has a header and no rows; at least 1 is needed")
    start_s = rows[0].time_s
    return [
        TraceRow(row.time_s - start_s, row.num_images, row.context_tokens, row.generated_tokens, row.video_s)
        for row in rows
    ]


def _rows(records: Iterable[Mapping[str, str]]) -> Iterator[TraceRow]:
    for number, record in enumerate(records, start=2):
        try:
            row = TraceRow(
                _seconds(record["timestamp"]),
                int(record.get("numimages") or 0),
                int(record["contexttokens"]),
                int(record["generatedtokens"]),
                float(record.get("videoseconds") or 0),
            )
        except ValueError as error:
            raise RequestError(f"line {number} of the trace: {error}; correct or delete it") from None
        if min(row.num_images, row.context_tokens, row.generated_tokens, row.video_s) < 0:
            raise RequestError(f"line {number} of the trace has a negative number; correct or delete it")
        yield row


def _seconds(text: str) -> float:
    """Reads a number of seconds, or a date and time, which without a zone is UTC."""
    try:
        return float(text)
    except ValueError:
        moment = datetime.fromisoformat(text.strip())
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def trace_arrivals(rows: Iterable[TraceRow | LogRow], rate_per_s: float | None = None) -> TraceArrivals:
    """Returns the times of a trace; with a rate, stretched or pressed so that this is the mean rate."""
    times_s = [row.time_s for row in rows]
    scale = 1.0
    if rate_per_s is not None and len(times_s) > 1 and times_s[-1] > 0:
        scale = (len(times_s) - 1) / rate_per_s / times_s[-1]
    return TraceArrivals(tuple(time_s * scale for time_s in times_s))


def trace_shapes(rows: Iterable[TraceRow | LogRow], media: TraceMedia) -> TraceShapes:
    """Returns the shapes of a trace."""
    return TraceShapes(tuple(media.shape(row) for row in rows))
