"""Collects the numbers of one request while it is answered, for its metrics, trace and log line."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from time import perf_counter, time
from typing import TYPE_CHECKING

from epd.serve_app.observability.logs import with_fields
from epd.serve_app.service import AnswerEnd, AnswerItem, StageSpan, TokenDelta
from epd.types import StageTimings

if TYPE_CHECKING:
    from fastapi import Request  # batches keep records without a web server

logger = logging.getLogger(__name__)

CLIENT_GONE = 499
# Stages, and the names of their seconds; `total_s` is none.
_STAGES = tuple(
    (each.name.removesuffix("_s"), each.name) for each in fields(StageTimings) if each.name != "total_s"
)
# The maximum number of spans kept per request: a day of video has 20,000 groups.
MAX_SPANS = 100_000

Attributes = dict[str, str | int | float | bool]


@dataclass(frozen=True, slots=True)
class Amount:
    """A number reported at the end of an answer, with all places that show it.

    name: in the log line, if `is_logged`, and in the answer's `epd` object, if defined there
    metric, help: the counter epd_<metric>_total of all finished requests
    attribute: of the request's span; empty for none
    """

    name: str
    value: Callable[[AnswerEnd], int]
    metric: str
    help: str
    attribute: str = ""
    is_logged: bool = True


AMOUNTS = (
    Amount("frames", lambda end: end.usage.num_frames, "frames", "Sampled frames", "epd.frames"),
    Amount(
        "substituted_frames",
        lambda end: end.usage.num_substituted_frames,
        "substituted_frames",
        "Frames that could not be decoded, replaced by a neighbour",
        is_logged=False,
    ),
    Amount(
        "unseen_frames",
        lambda end: end.usage.num_unseen_frames,
        "unseen_frames",
        "Frames of animated pictures that were taken as images, beyond the first",
        is_logged=False,
    ),
    Amount(
        "visual_tokens",
        lambda end: end.usage.visual_tokens,
        "visual_tokens",
        "Visual tokens in prompts",
        "epd.visual_tokens",
    ),
    Amount(
        "dropped_tokens",
        lambda end: end.usage.visual_tokens_before - end.usage.visual_tokens,
        "visual_tokens_dropped",
        "Visual tokens dropped by reduction",
    ),
    Amount(
        "prompt_tokens",
        lambda end: end.usage.prompt_tokens,
        "prompt_tokens",
        "Prompt tokens",
        "gen_ai.usage.input_tokens",
    ),
    Amount(
        "cached_tokens",
        lambda end: end.cached_tokens,
        "cached_tokens",
        "Prompt tokens found in the prefix cache",
        "epd.cached_tokens",
    ),
    Amount(
        "completion_tokens",
        lambda end: end.usage.completion_tokens,
        "completion_tokens",
        "Generated tokens",
        "gen_ai.usage.output_tokens",
    ),
    Amount(
        "retries",
        lambda end: end.num_retries,
        "request_retries",
        "Repeated request attempts",
        "epd.retries",
    ),
)


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """A finished request, for a trace. Times are Unix time in seconds.

    traceparent: of W3C Trace Context, as the client sent it
    error: as in `RequestRecord`
    attributes: under OpenTelemetry's names
    """

    request_id: str
    start_s: float
    stop_s: float
    first_token_s: float | None
    error: str
    traceparent: str
    attributes: Attributes
    spans: tuple[StageSpan, ...]


def new_request_id(prefix: str = "chatcmpl-") -> str:
    """Returns an id that no other request has. prefix: as OpenAI's ids of the kind of answer begin."""
    return f"{prefix}{uuid.uuid4().hex}"


@dataclass(slots=True)
class RequestRecord:
    """Collects one request. Times are seconds of `perf_counter`, except arrival_s, which is Unix time.

    status: HTTP status, None before the response
    client: its name, where the server has a file of keys
    is_answer: whether it wants an answer of the model, and not a page or a status
    model_revision: a name of its model's weights and settings
    held_bytes: bytes of its body, taken from the budget of `BodyReader`
    error: the class of the error that ended it, or another reason
    """

    request_id: str = field(default_factory=new_request_id)
    arrival_s: float = field(default_factory=time)
    start: float = field(default_factory=perf_counter)
    client: str = ""
    is_answer: bool = False
    model: str = ""
    model_revision: str = ""
    held_bytes: int = 0
    is_stream: bool = False
    num_media: int = 0
    num_pieces: int = 0
    num_choices: int = 0
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
            self.num_choices = max(self.num_choices, item.index + 1)
        elif isinstance(item, AnswerEnd):
            self.end = item

    @property
    def num_tokens(self) -> int:
        """Returns the tokens of prompt and answer, 0 without an end."""
        return 0 if self.end is None else self.end.usage.prompt_tokens + self.end.usage.completion_tokens

    @property
    def total_s(self) -> float:
        return perf_counter() - self.start

    @property
    def ttft_s(self) -> float | None:
        """Returns seconds from arrival to the first piece of text, None before it."""
        return None if self.first is None else self.first - self.start

    @property
    def tpot_s(self) -> float | None:
        """Returns mean seconds between tokens of a choice after its first, None without a second token.

        Choices grow beside each other: there are as many gaps as an average one has.
        """
        if self.end is None or self.first is None or self.last is None:
            return None
        gaps = self.end.usage.completion_tokens / self.num_choices - 1
        return (self.last - self.first) / gaps if gaps > 0 else None

    def trace(self) -> RequestTrace:
        """Returns the trace of a finished request: no prompt, no media, no URL, no key."""
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
            known |= {each.attribute: each.value(self.end) for each in AMOUNTS if each.attribute}
        return {name: value for name, value in known.items() if value is not None}

    def log(self) -> None:
        """Logs one line for a finished request: no prompt, no media, no URL, no key."""
        if not logger.isEnabledFor(logging.INFO):
            return
        fields: dict[str, object] = {
            "request_id": self.request_id,
            "status": self.status,
            "error": self.error or None,
            **({"client": self.client} if self.client else {}),
            "model": self.model or None,
            "stream": self.is_stream,
            "media": self.num_media,
            **{each.name: self.end and each.value(self.end) for each in AMOUNTS if each.is_logged},
            "ttft_s": self.ttft_s,
            "tpot_s": self.tpot_s,
            "total_s": self.total_s,
            "stages_s": self.end and _seconds_taken(self.end.timings),
            "queued_s": self.end and _seconds_taken(self.end.queued),
        }
        line = " ".join(f"{name}={_shown(value)}" for name, value in fields.items())
        logger.info("%s", line, extra=with_fields("request", fields))


def record_of(request: Request) -> RequestRecord:
    record = request.state.record
    assert isinstance(record, RequestRecord)
    return record


def _shown(value: object) -> str:
    """Formats a field of the log line; seconds of stages as in probe:0.010,encode:0.300."""
    if isinstance(value, Mapping):
        return ",".join(f"{name}:{seconds:.3f}" for name, seconds in value.items()) or "-"
    if isinstance(value, float):
        return f"{value:.4f}"
    return "-" if value is None else str(value)


def _seconds_taken(timings: StageTimings) -> dict[str, float]:
    """Returns the seconds of the stages that took time."""
    return {stage: seconds for stage, seconds in seconds_by_stage(timings).items() if seconds > 0}


def seconds_by_stage(timings: StageTimings) -> dict[str, float]:
    """Returns the seconds of each stage, without `total`, which is not a stage."""
    return {stage: getattr(timings, name) for stage, name in _STAGES}


def server_timing(end: AnswerEnd) -> str:
    """Returns the value of the Server-Timing header: milliseconds of each stage that took time."""
    stages = _seconds_taken(end.timings).items()
    return ", ".join(f"{name};dur={seconds * 1000:.1f}" for name, seconds in stages)
