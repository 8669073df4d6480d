"""What is known of one request while it is answered: for its report, the metrics and the line in the log."""

from __future__ import annotations

import logging
import uuid
from dataclasses import asdict, dataclass, field
from time import perf_counter, time

from epd.types import StageTimings
from serve_app.protocol import EpdReport, PromptTokensDetails, SpanReport, UsageReport
from serve_app.service import AnswerEnd, AnswerItem, StageSpan, TokenDelta

logger = logging.getLogger(__name__)

CLIENT_GONE = 499


@dataclass(slots=True)
class RequestRecord:
    """Times are seconds of `perf_counter`, but arrival_s, which is Unix time. status: of HTTP, None before.

    is_answer: whether a question is answered, and not a page or a status shown. held_bytes: of its body, as
    taken from the budget. error: the class of what ended it, or what else did.
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

    def note(self, item: AnswerItem) -> None:
        if isinstance(item, TokenDelta):
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

    def log(self) -> None:
        """One line for a finished request: no prompt, no media, no URL, no key."""
        usage = self.end.usage if self.end else None
        logger.info(
            "request_id=%s status=%s error=%s model=%s stream=%s media=%d frames=%s prompt_tokens=%s "
            "cached_tokens=%s completion_tokens=%s ttft_s=%s total_s=%.3f",
            self.request_id,
            self.status,
            self.error or "-",
            self.model or "-",
            self.is_stream,
            self.num_media,
            usage.num_frames if usage else "-",
            usage.prompt_tokens if usage else "-",
            self.end.cached_tokens if self.end else "-",
            usage.completion_tokens if usage else "-",
            "-" if self.ttft_s is None else f"{self.ttft_s:.3f}",
            self.total_s,
        )


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
        visual_tokens=end.usage.visual_tokens,
        visual_tokens_before_reduction=max(end.visual_tokens_before, end.usage.visual_tokens),
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
