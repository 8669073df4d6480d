"""Reads workloads from the access log of `epd serve`, which has a line for each request that ended.

    2026-11-21 12:38:01,250 INFO epd.serve_app.observability.record request_id=... status=200 ... total_s=1.2
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
from epd.workload.requests import RequestShape, VideoSpec
from epd.workload.trace_media import TraceMedia

MARK = "request_id="
_TIME = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)[,.](\d{3,6})")
_FIELD = re.compile(r"(\w+)=(\S+)")


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
