"""Reads workloads from the access log of `epd serve`, which has a line for each request that ended.

    2026-11-21 12:38:01,250 INFO serve_app.observability.record request_id=... status=200 ... total_s=1.2
    ^ when it ended: it came total_s before

The log gives the number of visual tokens of the media, not their size: sizes are chosen that give the same
number. Requests that ended without an answer have no sizes and are left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from epd.errors import RequestError
from epd.workload.requests import RequestShape, Resolution, VideoSpec

MARK = "request_id="
_TIME = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)[,.](\d{3,6})")
_FIELD = re.compile(r"(\w+)=(\S+)")
_LEAST_SIDE, _LARGEST_SIDE = 32, 8192


@dataclass(frozen=True, slots=True)
class LogRow:
    """One answered request.

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


@dataclass(frozen=True, slots=True)
class ModelSight:
    """How the model that wrote the log looks at media, to find sizes that give the same number of tokens.

    token_side: pixels, of the square that becomes one visual token.
    frames_per_token: how many frames of a video share a token.
    frames_per_s: how many frames of a video are sampled per second.
    """

    token_side: int = 28
    frames_per_token: int = 2
    frames_per_s: float = 2.0

    def size(self, num_tokens: float) -> Resolution:
        """Returns a nearly square size that gives `num_tokens` tokens."""
        wide = max(1, round(math.sqrt(num_tokens)))
        high = max(1, round(num_tokens / wide))
        return Resolution(self._pixels(wide), self._pixels(high))

    def _pixels(self, num_tokens: int) -> int:
        """Returns an even number of pixels that a `Resolution` allows."""
        return min(_LARGEST_SIDE, max(_LEAST_SIDE, num_tokens * self.token_side)) // 2 * 2


def parse_log(lines: Iterable[str], max_rows: int | None = None) -> list[LogRow]:
    """Returns rows in order of arrival, the first at 0 s. Raises RequestError for nonsense."""
    rows = sorted(_rows(lines), key=lambda row: row.time_s)[:max_rows]
    if not rows:
        raise RequestError("the access log has no answered request; at least 1 is needed")
    start_s = rows[0].time_s
    return [
        LogRow(
            row.time_s - start_s,
            row.num_media,
            row.num_frames,
            row.visual_tokens,
            row.text_tokens,
            row.completion_tokens,
        )
        for row in rows
    ]


def _rows(lines: Iterable[str]) -> Iterator[LogRow]:
    for number, line in enumerate(lines, start=1):
        head, mark, tail = line.partition(MARK)
        if not mark:
            continue
        fields = dict(_FIELD.findall(mark + tail))
        if fields.get("status") != "200" or fields.get("prompt_tokens", "-") == "-":
            continue
        try:
            yield _row(head, fields)
        except (KeyError, ValueError) as error:
            raise RequestError(
                f"line {number} of the access log: {error}; it must have the time and fields of epd serve"
            ) from None


def _row(head: str, fields: Mapping[str, str]) -> LogRow:
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
    found = _TIME.search(head)
    if not found:
        raise ValueError(f"no time such as 2026-11-21 12:38:01,250 in {head.strip()[:40]!r}")
    moment = datetime.fromisoformat(found[1]).replace(tzinfo=UTC)
    return moment.timestamp() + float(f"0.{found[2]}")


def log_shape(row: LogRow, sight: ModelSight, video_fps: int, max_text: int, max_output: int) -> RequestShape:
    """Returns a request of that size; longer texts and answers are cut."""
    text, output = min(row.text_tokens, max_text), min(row.completion_tokens, max_output)
    if not row.num_media:
        return RequestShape(text, output)
    if not row.has_videos:
        return RequestShape(text, output, (sight.size(row.visual_tokens / row.num_media),) * row.num_media)
    frames = row.num_frames / row.num_media
    pictures = row.num_media * math.ceil(frames / sight.frames_per_token)
    video = VideoSpec(frames / sight.frames_per_s, video_fps, sight.size(row.visual_tokens / pictures))
    return RequestShape(text, output, videos=(video,) * row.num_media)
