"""What is known of one request while it is answered: for its report, the metrics and the line in the log."""

from __future__ import annotations

import logging
import uuid
from dataclasses import asdict, dataclass, field
from time import perf_counter, time
from typing import TYPE_CHECKING

from epd.types import StageTimings
from serve_app.http.protocol import EpdReport, PromptTokensDetails, SpanReport, UsageReport
from serve_app.service import AnswerEnd, AnswerItem, StageSpan, TokenDelta

if TYPE_CHECKING:
    from fastapi import Request  # batches keep records without a web server

logger = logging.getLogger(__name__)

CLIENT_GONE = 499
# More spans of one request are not kept: a day of video has 20,000 groups.
MAX_SPANS = 100_000

Attributes = dict[str, str | int | float | bool]


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """A finished request for a trace. Times are Unix time in seconds.

    traceparent: of W3C Trace Context, as the client sent it. error: as in `RequestRecord`.
    attributes: under OpenTelemetry's names.
    """

    request_id: str
    start_s: float
    stop_s: float
    first_token_s: float | None
    error: str
    traceparent: str
    attributes: Attributes
    spans: tuple[StageSpan, ...]


@dataclass(slots=True)
class RequestRecord:
    """Times are seconds of `perf_counter`, but arrival_s, which is Unix time. status: of HTTP, None before.

    is_answer: whether a question is answered, and not a page or a status shown. held_bytes: of its body, as
    taken from the budget of `BodyReader`. error: the class of what ended it, or what else did.
    """

    request_id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    arrival_s: float = field(default_factory=time)
    start: float = field(default_factory=perf_counter)
    is_answer: bool = False
    model: str = ""
    held_bytes: int = 0
    is_stream: bool = False
    num_media: int = 0
    num_pieces: int = 0
    first: float | None = None
    last: float | None = None
    end: AnswerEnd | None = None
    status: int | None = None
    error: str = ""
    traceparent: str = ""
    spans: list[StageSpan] = field(default_factory=list)

    def note(self, item: AnswerItem) -> None:
        if isinstance(item, StageSpan):
            if len(self.spans) < MAX_SPANS:
                self.spans.append(item)
        elif isinstance(item, TokenDelta):
            self.last = perf_counter()
            self.first = self.first or self.last
            self.num_pieces += 1
        elif isinstance(item, AnswerEnd):
            self.end = item

    @property
    def total_s(self) -> float:
        return perf_counter() - self.start

    @property
    def ttft_s(self) -> float | None:
        """Seconds from arrival to the first piece of text, None before it."""
        return None if self.first is None else self.first - self.start

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds between tokens of a choice after its first, None where there is no second."""
        if self.end is None or self.first is None or self.last is None:
            return None
        gaps = self.end.usage.completion_tokens - 1
        return (self.last - self.first) / gaps if gaps > 0 else None

    def trace(self) -> RequestTrace:
        """Of a finished request: no prompt, no media, no URL, no key."""
        return RequestTrace(
            request_id=self.request_id,
            start_s=self.arrival_s,
            stop_s=self.arrival_s + self.total_s,
            first_token_s=None if self.ttft_s is None else self.arrival_s + self.ttft_s,
            error=self.error,
            traceparent=self.traceparent,
            attributes=self._attributes(),
            spans=tuple(self.spans),
        )

    def _attributes(self) -> Attributes:
        known: dict[str, str | int | float | bool | None] = {
            "epd.request_id": self.request_id,
            "http.response.status_code": self.status,
            "error.type": self.error or None,
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": self.model or None,
            "epd.ttft_s": self.ttft_s,
            "epd.stream": self.is_stream,
            "epd.media": self.num_media,
        }
        if self.end is not None:
            known |= {
                "gen_ai.usage.input_tokens": self.end.usage.prompt_tokens,
                "gen_ai.usage.output_tokens": self.end.usage.completion_tokens,
                "epd.frames": self.end.usage.num_frames,
                "epd.visual_tokens": self.end.usage.visual_tokens,
                "epd.cached_tokens": self.end.cached_tokens,
                "epd.retries": self.end.num_retries,
            }
        return {name: value for name, value in known.items() if value is not None}

    def log(self) -> None:
        """One line for a finished request: no prompt, no media, no URL, no key."""
        fields: dict[str, object] = {
            "request_id": self.request_id,
            "status": self.status,
            "error": self.error or None,
            "model": self.model or None,
            "stream": self.is_stream,
            "media": self.num_media,
            **_amounts(self.end),
            "ttft_s": _rounded(self.ttft_s),
            "tpot_s": _rounded(self.tpot_s),
            "total_s": _rounded(self.total_s),
            "stages_s": _shown_seconds(self.end.timings) if self.end else None,
            "queued_s": _shown_seconds(self.end.queued) if self.end else None,
        }
        logger.info(
            "%s", " ".join(f"{name}={'-' if value is None else value}" for name, value in fields.items())
        )


def record_of(request: Request) -> RequestRecord:
    record = request.state.record
    assert isinstance(record, RequestRecord)
    return record


def _amounts(end: AnswerEnd | None) -> dict[str, int | None]:
    """Names are there without an end too, so that every line has the same."""
    if end is None:
        return dict.fromkeys(_AMOUNTS)
    usage = end.usage
    values = (
        usage.num_frames,
        usage.visual_tokens,
        usage.visual_tokens_before - usage.visual_tokens,
        usage.prompt_tokens,
        end.cached_tokens,
        usage.completion_tokens,
        end.num_retries,
    )
    return dict(zip(_AMOUNTS, values, strict=True))


_AMOUNTS = (
    "frames",
    "visual_tokens",
    "dropped_tokens",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "retries",
)


def _rounded(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds:.4f}"


def _shown_seconds(timings: StageTimings) -> str | None:
    """As in probe:0.010,encode:0.300: the stages that took time."""
    parts = [f"{name}:{seconds:.3f}" for name, seconds in seconds_by_stage(timings).items() if seconds > 0]
    return ",".join(parts) or None


def seconds_by_stage(timings: StageTimings) -> dict[str, float]:
    """Without `total`, which is no stage."""
    return {name.removesuffix("_s"): value for name, value in asdict(timings).items() if name != "total_s"}


def usage_report(end: AnswerEnd) -> UsageReport:
    usage = end.usage
    return UsageReport(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=end.cached_tokens),
    )


def epd_report(record: RequestRecord, end: AnswerEnd) -> EpdReport:
    return EpdReport(
        frames=end.usage.num_frames,
        substituted_frames=end.usage.num_substituted_frames,
        visual_tokens=end.usage.visual_tokens,
        visual_tokens_before_reduction=end.usage.visual_tokens_before,
        retention=end.retention,
        cached_tokens=end.cached_tokens,
        ttft_s=record.ttft_s or 0.0,
        total_s=record.total_s,
        stages_s=seconds_by_stage(end.timings),
        queued_s=seconds_by_stage(end.queued),
        retries=end.num_retries,
    )


def span_report(span: StageSpan, record: RequestRecord) -> SpanReport:
    return SpanReport(
        stage=span.stage,
        worker=span.worker,
        start_s=span.start_s - record.arrival_s,
        stop_s=span.stop_s - record.arrival_s,
        item=span.item,
        group=span.group,
    )


def server_timing(end: AnswerEnd) -> str:
    """The value of the standard header Server-Timing: milliseconds of each stage that did something."""
    stages = seconds_by_stage(end.timings).items()
    return ", ".join(f"{name};dur={seconds * 1000:.1f}" for name, seconds in stages if seconds > 0)
