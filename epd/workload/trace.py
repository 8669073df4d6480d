"""Reads workloads from traces: our own access log, or the formats of public ones.

The format is found by looking at the file. CSV has the columns of the public Azure LMM trace:

    TIMESTAMP                    NumImages  ContextTokens  GeneratedTokens
    2024-10-15 00:00:01.250000   2          1743           112

TIMESTAMP is a date and time, or seconds; ContextTokens counts text and images together; NumImages may be
missing (the text traces), and VideoSeconds, a column of ours, adds one video of that length. Names in any
case, columns in any order, others ignored. Source: AzureLMMInferenceDataset2025 of the Azure Public Dataset
(ModServe, SoCC 2025). JSON lines are Mooncake's (FAST 2025), a folder holds ServeGen's clients
(`epd.workload.servegen`). The access log: see `epd.workload.access_log`.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain, islice
from pathlib import Path

from epd.errors import RequestError
from epd.workload.access_log import MARK, parse_log
from epd.workload.arrivals import TraceArrivals
from epd.workload.requests import RequestShape, TraceShapes, VideoSpec
from epd.workload.servegen import draw_day
from epd.workload.trace_media import TracedRequest, TraceMedia

_REQUIRED = ("timestamp", "contexttokens", "generatedtokens")
_NUM_SNIFFED = 1000


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace. time_s: from the first of the trace."""

    time_s: float
    num_images: int
    context_tokens: int
    generated_tokens: int
    video_s: float = 0.0

    def shape(self, media: TraceMedia) -> RequestShape:
        """Returns a request of its size. The context counts images too, of which the size is not known."""
        text = max(1, self.context_tokens - self.num_images * media.tokens_per_image)
        return RequestShape(
            media.text_tokens(text),
            media.output_tokens(self.generated_tokens),
            (media.image_size,) * self.num_images,
            (VideoSpec(self.video_s, media.video_fps, media.video_size),) if self.video_s else (),
        )


def open_trace(path: Path, max_rows: int | None = None) -> Sequence[TracedRequest]:
    """Returns the first requests of a file, plain or gzip, or of a folder of ServeGen.

    Raises RequestError.
    """
    if path.is_dir():
        return draw_day(path, max_rows)
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open() as lines:
            return _parse_any(lines, max_rows)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise RequestError(
            f"the trace {str(path)!r} cannot be read: {error}; give a CSV file or an access log, or either "
            "with gzip"
        ) from None


def _parse_any(lines: Iterable[str], max_rows: int | None) -> Sequence[TracedRequest]:
    """Returns a log may begin with lines of others, so its mark is looked for in the first thousand."""
    source = iter(lines)
    head = list(islice(source, _NUM_SNIFFED))
    whole = chain(head, source)
    if any(MARK in line for line in head):
        return parse_log(whole, max_rows)
    if head and head[0].lstrip().startswith("{"):
        return parse_mooncake(whole, max_rows)
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
    rows = list(_rows(islice(records, max_rows)))
    if not rows:
        raise RequestError("the trace has a header and no rows; at least 1 is needed")
    return _from_zero(rows)


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


def parse_mooncake(lines: Iterable[str], max_rows: int | None = None) -> list[TraceRow]:
    """Returns rows of Mooncake's JSON lines, which are texts alone. Raises RequestError for nonsense.

    timestamp: milliseconds. input_length, output_length: tokens. hash_ids, of prefixes, are not used.
    """
    rows = []
    for number, line in enumerate(islice((line for line in lines if line.strip()), max_rows), start=1):
        try:
            record = json.loads(line)
            time_s, tokens = record["timestamp"] / 1000, (record["input_length"], record["output_length"])
            rows.append(TraceRow(time_s, 0, int(tokens[0]), int(tokens[1])))
        except (ValueError, TypeError, KeyError) as error:
            raise RequestError(
                f"line {number} of the trace: {error}; it must have timestamp, input_length and "
                "output_length, as Mooncake's traces have; correct or delete it"
            ) from None
        if min(time_s, *tokens) < 0:
            raise RequestError(f"line {number} of the trace has a negative number; correct or delete it")
    return _from_zero(rows)


def _from_zero(rows: list[TraceRow]) -> list[TraceRow]:
    """Returns the rows, of which there is one at least, in order of time, the first at 0 s."""
    rows.sort(key=lambda row: row.time_s)
    return [replace(row, time_s=row.time_s - rows[0].time_s) for row in rows]


def _seconds(text: str) -> float:
    """Reads a number of seconds, or a date and time, which without a zone is UTC."""
    try:
        return float(text)
    except ValueError:
        moment = datetime.fromisoformat(text.strip())
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def trace_arrivals(rows: Iterable[TracedRequest], rate_per_s: float | None = None) -> TraceArrivals:
    """Returns the times of a trace; with a rate, stretched or pressed so that this is the mean rate."""
    times_s = [row.time_s for row in rows]
    scale = 1.0
    if rate_per_s is not None and len(times_s) > 1 and times_s[-1] > 0:
        scale = (len(times_s) - 1) / rate_per_s / times_s[-1]
    return TraceArrivals(tuple(time_s * scale for time_s in times_s))


def trace_shapes(rows: Iterable[TracedRequest], media: TraceMedia) -> TraceShapes:
    """Returns the shapes of a trace."""
    return TraceShapes(tuple(row.shape(media) for row in rows))
