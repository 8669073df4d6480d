"""Reads workloads from traces: our own access log, or the formats of public ones.

The format is found by looking at the file. CSV has the columns of the public Azure LMM trace:

    TIMESTAMP                    NumImages  ContextTokens  GeneratedTokens
    2024-10-15 00:00:01.250000   2          1743           112

TIMESTAMP is a date and time, or seconds; ContextTokens counts text and images together; NumImages may be
missing (the text traces), and VideoSeconds, a column of ours, adds one video of that length. Names in any
case and with any marks, columns in any order, others ignored, separated by commas, semicolons or tabs.
Source: AzureLMMInferenceDataset2025 of the Azure Public Dataset (ModServe, SoCC 2025). JSON lines are
Mooncake's (FAST 2025). The access log has a line for each request that ended; those that ended without an
answer have no sizes and are left out:

    2026-11-21 12:38:01,250 INFO epd.serve_app.observability.record request_id=... status=200 ... total_s=1.2
    ^ when it ended: it came total_s before
"""

from __future__ import annotations

import codecs
import csv
import gzip
import json
import math
import re
import reprlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, time
from itertools import chain, islice
from pathlib import Path
from typing import Any

from epd.errors import RequestError
from epd.workload.arrivals import TraceArrivals
from epd.workload.requests import RequestShape, TraceShapes, VideoSpec
from epd.workload.trace_media import TracedRequest, TraceMedia

MARK = "request_id="  # in lines of the access log
_LOG_TIME = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)[,.](\d{3,6})")
_LOG_FIELD = re.compile(r"(\w+)=(\S+)")
_REQUIRED = ("timestamp", "contexttokens", "generatedtokens")
_NUM_SNIFFED = 1000
_GZIP = b"\x1f\x8b"
_DATE = re.compile(r"\d{4}-\d\d")
# Numbers with marks between their digits: 1,743 and 0,25 and 1 743 and 1.743,5.
_GROUPED = re.compile(r"[+-]?\d[\d.,'\s\u00a0\u202f_]*")
# Of one request: prompts and images are made from these numbers.
_MAX_TOKENS = 10_000_000
_MAX_IMAGES = 10_000
_MAX_VIDEO_S = 7 * 24 * 3600.0


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
    """Returns the first requests of a file, plain or gzip. Raises RequestError."""
    try:
        opened, encoding = _form_of(path)
        with opened(path, "rt", encoding=encoding) as lines:
            return _parse_any(lines, max_rows)
    except (OSError, EOFError, UnicodeError, zlib.error) as error:
        raise RequestError(
            f"the trace {str(path)!r} cannot be read: {error}; give a CSV file or an access log in UTF-8, or "
            "either with gzip"
        ) from None


def _form_of(path: Path) -> tuple[Callable[..., AbstractContextManager[Iterable[str]]], str]:
    """Returns what opens a file, by its first bytes, and its encoding, by the mark at its start."""
    with path.open("rb") as file:
        opened: Any = gzip.open if file.read(len(_GZIP)) == _GZIP else open
    with opened(path, "rb") as file:
        is_wide = file.read(len(codecs.BOM_UTF16)) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    return opened, "utf-16" if is_wide else "utf-8-sig"


def _parse_any(lines: Iterable[str], max_rows: int | None) -> Sequence[TracedRequest]:
    """Returns a log may begin with lines of others, so its mark is looked for in the first thousand."""
    source = iter(lines)
    head = list(islice(source, _NUM_SNIFFED))
    whole = chain(head, source)
    if any(MARK in line for line in head):
        return parse_log(whole, max_rows)
    first = next((line.lstrip() for line in head if line.strip()), "")
    if first.startswith("{"):
        return parse_mooncake(whole, max_rows)
    if first.startswith("["):
        raise RequestError(
            "the trace holds a JSON array; allowed: JSON with an object on each line, as pandas writes with "
            "orient='records', lines=True; convert it"
        )
    return parse_trace(whole, max_rows)


def parse_trace(lines: Iterable[str], max_rows: int | None = None) -> list[TraceRow]:
    """Returns rows of CSV text with a header line, in order of time. Raises RequestError for nonsense.

    Columns are separated by commas, semicolons or tabs; lines that are blank, or have empty columns alone,
    are left out.
    """
    numbered = enumerate(lines, start=1)
    first, header = next(((number, line) for number, line in numbered if line.strip()), (1, ""))
    separator = max(",;\t", key=header.count)
    reader = csv.reader((line for _, line in chain([(first, header)], numbered)), delimiter=separator)
    try:
        columns = [_bare(name) for name in next(reader, [])]
        missing = [name for name in _REQUIRED if name not in columns]
        if missing:
            shown = _shown(", ".join(columns)) if header else "none"
            raise RequestError(
                f"the trace has the columns {shown}; it needs "
                "TIMESTAMP, ContextTokens and GeneratedTokens, and may have NumImages and VideoSeconds"
            )
        found = (
            (first - 1 + reader.line_num, dict(zip(columns, map(str.strip, cells), strict=False)))
            for cells in reader
            if any(map(str.strip, cells))
        )
        rows = [_row(number, record) for number, record in islice(found, max_rows)]
    except csv.Error as error:
        raise RequestError(
            f"line {first - 1 + reader.line_num} of the trace: {error}; correct or delete it"
        ) from None
    return _from_zero(rows)


def _bare(name: str) -> str:
    """Returns the name of a column without what differs between programs: case, spaces and other marks."""
    return "".join(filter(str.isalnum, name)).lower()


def _row(number: int, record: Mapping[str, Any]) -> TraceRow:
    """Returns a row from its columns, texts or numbers. number: of its line. Raises RequestError."""
    try:
        return TraceRow(
            _seconds(record.get("timestamp", "")),
            _count(record.get("numimages") or "0", _MAX_IMAGES),
            _count(record.get("contexttokens", ""), _MAX_TOKENS),
            _count(record.get("generatedtokens", ""), _MAX_TOKENS),
            _number(record.get("videoseconds") or "0", _MAX_VIDEO_S),
        )
    except (ValueError, OverflowError) as error:
        raise RequestError(f"line {number} of the trace: {error}; correct or delete it") from None


def _count(value: Any, most: int) -> int:
    """Returns a count, which programs write as 1743.0 too. Raises ValueError."""
    number = _number(value, most)
    if number != int(number):
        raise ValueError(f"received {_shown(value)}; allowed: a whole number")
    return int(number)


def _number(value: Any, most: float = math.inf, least: float = 0.0) -> float:
    """Returns a number that is finite. Raises ValueError."""
    try:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError
        number = float(value)
    except (ValueError, OverflowError):
        is_grouped = isinstance(value, str) and _GROUPED.fullmatch(value)
        advice = " without commas, spaces or other marks, as 1743 or 0.25" if is_grouped else ""
        raise ValueError(f"received {_shown(value)}; allowed: a number{advice}") from None
    if not math.isfinite(number) or "_" in str(value):
        raise ValueError(f"received {_shown(value)}; allowed: a number that is finite")
    if not least <= number <= most:
        raise ValueError(f"received {_shown(value)}; allowed: {least:g} to {most:g}")
    return number


def _shown(value: Any) -> str:
    return reprlib.repr(value)


def parse_mooncake(lines: Iterable[str], max_rows: int | None = None) -> list[TraceRow]:
    """Returns rows of Mooncake's JSON lines, which are texts alone. Raises RequestError for nonsense.

    timestamp: milliseconds. input_length, output_length: tokens. hash_ids, of prefixes, are not used.
    """
    rows = []
    numbered = ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
    for number, line in islice(numbered, max_rows):
        try:
            record = json.loads(line)
            given = [record[name] for name in ("timestamp", "input_length", "output_length")]
            time_s, tokens = _number(given[0]) / 1000, [_count(each, _MAX_TOKENS) for each in given[1:]]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise RequestError(
                f"line {number} of the trace: {_reason(error)}; correct or delete it"
            ) from None
        rows.append(TraceRow(time_s, 0, *tokens))
    return _from_zero(rows)


def _reason(error: Exception) -> str:
    match error:
        case KeyError():
            return f"it has no {error}; allowed: timestamp, input_length and output_length"
        case TypeError():
            return "it is no JSON object"
        case RecursionError():
            return "it is nested too deeply"
        case _:
            return str(error)


def _from_zero(rows: list[TraceRow]) -> list[TraceRow]:
    """Returns the rows in order of time, the first at 0 s. Raises RequestError for none."""
    if not rows:
        raise RequestError("the trace has no rows; at least 1 is needed")
    rows.sort(key=lambda row: row.time_s)
    return [replace(row, time_s=row.time_s - rows[0].time_s) for row in rows]


def _seconds(text: str) -> float:
    """Reads a number of seconds, a date and time, which without a zone is UTC, or a time of the day.

    Raises ValueError.
    """
    if not any(mark in text for mark in ":/") and not _DATE.match(text):
        return _number(text, least=-math.inf)
    with suppress(ValueError):
        found = datetime.fromisoformat(text)
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    try:
        moment = time.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"received {_shown(text)}; allowed: seconds, or a date and time as 2024-10-15 00:00:01.25"
        ) from None
    return moment.hour * 3600 + moment.minute * 60 + moment.second + moment.microsecond / 1e6


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


@dataclass(frozen=True, slots=True)
class LogRow:
    """One answered request of an access log. Sizes of media are chosen that give its number of visual tokens.

    time_s: of its arrival.
    num_frames: of all media, an image is one.
    visual_tokens: of all media, before any were dropped.
    """

    time_s: float
    num_media: int
    num_frames: int
    visual_tokens: int
    text_tokens: int
    completion_tokens: int

    @property
    def has_videos(self) -> bool:
        """Whether its media are videos; a request with images beside videos counts as videos."""
        return self.num_frames > self.num_media

    def shape(self, media: TraceMedia) -> RequestShape:
        """Returns a request of that size; longer texts and answers are cut."""
        text, output = media.text_tokens(self.text_tokens), media.output_tokens(self.completion_tokens)
        if not self.num_media:
            return RequestShape(text, output)
        sight = media.sight
        if not self.has_videos:
            return RequestShape(
                text, output, (sight.size(self.visual_tokens / self.num_media),) * self.num_media
            )
        frames = self.num_frames / self.num_media
        pictures = self.num_media * math.ceil(frames / sight.frames_per_token)
        size = sight.size(self.visual_tokens / pictures)
        video = VideoSpec(frames / sight.frames_per_s, media.video_fps, size)
        return RequestShape(text, output, videos=(video,) * self.num_media)


def parse_log(lines: Iterable[str], max_rows: int | None = None) -> list[LogRow]:
    """Returns rows in order of arrival, the first at 0 s. Raises RequestError for nonsense."""
    rows = sorted(_log_rows(lines), key=lambda row: row.time_s)[:max_rows]
    if not rows:
        raise RequestError("the access log has no answered request; at least 1 is needed")
    start_s = rows[0].time_s
    return [replace(row, time_s=row.time_s - start_s) for row in rows]


def _log_rows(lines: Iterable[str]) -> Iterator[LogRow]:
    for number, line in enumerate(lines, start=1):
        head, mark, tail = line.partition(MARK)
        if not mark:
            continue
        fields = dict(_LOG_FIELD.findall(mark + tail))
        if fields.get("status") != "200" or fields.get("prompt_tokens", "-") == "-":
            continue
        try:
            yield _log_row(head, fields)
        except (KeyError, ValueError) as error:
            raise RequestError(
                f"line {number} of the access log: {error}; it must have the time and fields of epd serve"
            ) from None


def _log_row(head: str, fields: Mapping[str, str]) -> LogRow:
    visual = int(fields["visual_tokens"])
    return LogRow(
        _ended_s(head) - float(fields["total_s"]),
        int(fields["media"]),
        int(fields["frames"]),
        visual + int(fields.get("dropped_tokens", "0")),
        max(1, int(fields["prompt_tokens"]) - visual),
        max(1, int(fields["completion_tokens"])),
    )


def _ended_s(head: str) -> float:
    """Reads the time at the start of a line. The zone is unknown, and only differences count."""
    found = _LOG_TIME.search(head)
    if not found:
        raise ValueError(f"no time such as 2026-11-21 12:38:01,250 in {head.strip()[:40]!r}")
    moment = datetime.fromisoformat(found[1]).replace(tzinfo=UTC)
    return moment.timestamp() + float(f"0.{found[2]}")
