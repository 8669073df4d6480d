"""Converts the items of an answer to OpenAI's JSON: one completion, or the chunks of a stream."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from json.encoder import encode_basestring  # json.dumps of one text, not in ASCII
from typing import Literal

from epd.answer_parsers import AnswerParsing
from epd.errors import EPDError
from epd.reduction import KeptCells
from epd.serve_app.http.answers.answer_reader import AnswerReader, delta_of, reader_of, reply_of
from epd.serve_app.http.protocol import (
    CacheReport,
    ChatChunk,
    ChatCompletion,
    Choice,
    ChoiceLogprobs,
    ChunkChoice,
    ContentLogprob,
    Delta,
    EpdEvents,
    EpdReport,
    ErrorReply,
    KeptReport,
    PromptTokensDetails,
    ReplyMessage,
    SpanReport,
    TierReport,
    TopLogprob,
    UsageReport,
)
from epd.serve_app.observability.record import AMOUNTS, RequestRecord, seconds_by_stage
from epd.serve_app.service import AnswerEnd, AnswerItem, FinishReason, StageSpan, TokenDelta, TokenLogprob
from epd.types import Usage, totals

MIN_LOGPROB = -9999.0
DONE = b"data: [DONE]\n\n"


def logprobs_of(tokens: Sequence[TokenLogprob]) -> ChoiceLogprobs:
    return ChoiceLogprobs(content=[_logprob(token) for token in tokens])


def _logprob(token: TokenLogprob) -> ContentLogprob:
    alternatives = [
        TopLogprob(token=one.text, logprob=finite(one.logprob), bytes=list(one.data) or None)
        for one in token.alternatives
    ]
    return ContentLogprob(
        token=token.text,
        logprob=finite(token.logprob),
        bytes=list(token.data) or None,
        top_logprobs=alternatives,
    )


def finite(logprob: float) -> float:
    """Clips a log probability, as JSON has no infinity: an impossible token gets the least clients expect."""
    return max(logprob, MIN_LOGPROB)


class CompletionBuilder:
    """Gathers the pieces of all choices into one completion."""

    def __init__(
        self,
        record: RequestRecord,
        num_choices: int,
        *,
        has_logprobs: bool,
        parsing: AnswerParsing | None = None,
    ) -> None:
        """Takes parsing: how the answer is read; None if it is content alone."""
        self._record = record
        self._has_logprobs = has_logprobs
        self._parsing = parsing
        self._thinks = False
        self._texts: list[list[str]] = [[] for _ in range(num_choices)]
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in range(num_choices)]
        self._reasons: list[FinishReason] = ["length"] * num_choices
        self._spans: list[SpanReport] = []
        self._end: AnswerEnd | None = None

    def add(self, item: AnswerItem) -> None:
        if isinstance(item, TokenDelta):
            self._texts[item.index].append(item.text)
            self._thinks = item.thinks
            self._logprobs[item.index] += item.logprobs
            self._reasons[item.index] = item.finish_reason or self._reasons[item.index]
        elif isinstance(item, StageSpan):
            self._spans.append(span_report(item, self._record))
        elif isinstance(item, AnswerEnd):
            self._end = item

    def build(self) -> ChatCompletion:
        """Returns the completion. Raises EPDError if the answer stopped without its end."""
        end = checked_end(self._end)
        return ChatCompletion(
            id=self._record.request_id,
            created=int(self._record.arrival_s),
            model=self._record.model,
            choices=[self._choice(index) for index in range(len(self._texts))],
            usage=usage_report(end),
            system_fingerprint=self._record.model_revision or None,
            epd=epd_report(self._record, end).model_copy(update={"events": self._spans or None}),
        )

    def body(self) -> str:
        """Returns the JSON of the completion. Raises EPDError as `build`."""
        return self.build().model_dump_json()

    def _choice(self, index: int) -> Choice:
        text, reason = "".join(self._texts[index]), self._reasons[index]
        message = ReplyMessage(content=text)
        if self._parsing is not None:
            reader = reader_of(self._parsing, thinks=self._thinks)
            message = reply_of(reader, text, self._record.request_id, index)
        return Choice(
            index=index,
            message=message,
            logprobs=logprobs_of(self._logprobs[index]) if self._has_logprobs else None,
            finish_reason="tool_calls" if message.tool_calls and reason == "stop" else reason,
        )


class ChunkBuilder:
    """Turns items into chunks. The last text of a choice comes with the reason of its end, as vLLM's does.

    The last chunk with a choice waits for the answer's end and has its report, so that the only chunks
    without a choice are those that were requested: usage, and the events of stages.
    `events` gives the same as bytes; a piece of text, of which a stream has thousands, is put into the event
    of an empty one instead of being validated and serialised.
    """

    def __init__(
        self,
        record: RequestRecord,
        num_choices: int,
        *,
        includes_usage: bool,
        has_logprobs: bool,
        parsing: AnswerParsing | None = None,
        counts_on: bool = False,
    ) -> None:
        """Takes parsing: how the answer is read, None for content alone; counts_on: usage in every chunk."""
        self._record = record
        self._parsing = parsing
        self._so_far: UsageReport | None = usage_of(0, 0) if counts_on else None
        self._readers: dict[int, AnswerReader] = {}
        self._includes_usage = includes_usage
        self._has_logprobs = has_logprobs
        self._begun: set[int] = set()
        self._num_open = num_choices
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        self._held: ChatChunk | None = None
        self._end: AnswerEnd | None = None

    def events(self, item: AnswerItem) -> bytes:
        """Returns the events of an item: those of `chunks`."""
        if not (isinstance(item, TokenDelta) and self._is_text(item)):
            return b"".join(map(event, self.chunks(item)))
        before, after = self._frame(item.index)
        return b"%b%b%b" % (before, encode_basestring(item.text).encode(), after)

    def _is_text(self, delta: TokenDelta) -> bool:
        """Returns whether a piece is one chunk with a text alone."""
        has_more = delta.finish_reason or self._has_logprobs or delta.index not in self._begun
        has_more = has_more or self._parsing is not None
        return bool(delta.text) and not has_more and self._so_far is None

    def _frame(self, index: int) -> tuple[bytes, bytes]:
        """Returns what comes before and after the text in the events of a choice."""
        if index not in self._frames:
            before, _, after = event(self._choice_chunk(index, Delta(content=""))).rpartition(b'""')
            self._frames[index] = before, after
        return self._frames[index]

    def chunks(self, item: AnswerItem) -> Iterator[ChatChunk]:
        if isinstance(item, TokenDelta):
            if item.index not in self._begun:
                self._begun.add(item.index)
                self._count(item, 0)
                yield self._choice_chunk(item.index, Delta(role="assistant", content=""))
            self._count(item, len(item.token_ids))
            yield from self._pieces(item)
        elif isinstance(item, StageSpan):
            yield self._chunk([], epd=EpdEvents(events=[span_report(item, self._record)]))
        else:
            self._end = item

    def _count(self, delta: TokenDelta, num_tokens: int) -> None:
        """Adds tokens of the answer to the usage so far, where it is in every chunk."""
        if self._so_far:
            num_completed = self._so_far.completion_tokens + num_tokens
            self._so_far = usage_of(delta.num_prompt_tokens, num_completed)

    def last_chunks(self) -> Iterator[ChatChunk]:
        """Yields the last chunks. Raises EPDError if the answer stopped without its end."""
        end = checked_end(self._end)
        report = epd_report(self._record, end)
        if self._held:
            yield self._held.model_copy(update={"epd": report} | self._usage_so_far())
        if self._includes_usage:
            yield self._chunk([]).model_copy(update={"usage": usage_report(end)})

    def last_events(self) -> bytes:
        """Returns the events of the last chunks, and the end of the stream. Raises EPDError as they do."""
        return b"".join(map(event, self.last_chunks())) + DONE

    def error_event(self, error: ErrorReply) -> bytes:
        return event(error)

    def _pieces(self, delta: TokenDelta) -> Iterator[ChatChunk]:
        deltas = self._deltas(delta)
        if not deltas and (delta.logprobs or delta.finish_reason):
            deltas = [Delta(content="")]
        logprobs = logprobs_of(delta.logprobs) if self._has_logprobs else None
        for number, part in enumerate(deltas, start=1):
            reason = self._reason(delta) if number == len(deltas) else None
            chunk = self._choice_chunk(delta.index, part, logprobs, reason)
            logprobs = None
            self._num_open -= reason is not None
            if reason and not self._num_open:
                self._held = chunk
            else:
                yield chunk

    def _reason(self, delta: TokenDelta) -> Literal["stop", "length", "tool_calls"] | None:
        called = delta.index in self._readers and self._readers[delta.index].num_calls
        return "tool_calls" if called and delta.finish_reason == "stop" else delta.finish_reason

    def _deltas(self, delta: TokenDelta) -> list[Delta]:
        """Returns the text of a piece, or the pieces of thoughts, calls and texts in it."""
        if self._parsing is None:
            return [Delta(content=delta.text)] if delta.text else []
        if delta.index not in self._readers:
            self._readers[delta.index] = reader_of(self._parsing, thinks=delta.thinks)
        reader = self._readers[delta.index]
        pieces = reader.push(delta.text) + (reader.finish() if delta.finish_reason else [])
        return [delta_of(piece, self._record.request_id, delta.index) for piece in pieces]

    def _choice_chunk(
        self,
        index: int,
        delta: Delta,
        logprobs: ChoiceLogprobs | None = None,
        finish_reason: Literal["stop", "length", "tool_calls"] | None = None,
    ) -> ChatChunk:
        choice = ChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=finish_reason)
        return self._chunk([choice])

    def _chunk(self, choices: list[ChunkChoice], epd: EpdEvents | None = None) -> ChatChunk:
        chunk = ChatChunk(
            id=self._record.request_id,
            object="chat.completion.chunk",
            created=int(self._record.arrival_s),
            model=self._record.model,
            choices=choices,
        )
        return chunk.model_copy(update=self._usage_so_far() | ({"epd": epd} if epd else {}))

    def _usage_so_far(self) -> dict[str, UsageReport | None]:
        """Returns a chunk's field of usage, where one was requested."""
        return {"usage": self._so_far} if self._includes_usage else {}


def checked_end(end: AnswerEnd | None) -> AnswerEnd:
    if end is None:
        raise EPDError("the answer stopped without its end; this is a bug of the server; retry")
    return end


def event(chunk: ChatChunk | ErrorReply) -> bytes:
    """Formats a chunk or an error as a server-sent event, without unset fields."""
    return b"data: " + chunk.model_dump_json(exclude_unset=True).encode() + b"\n\n"


def usage_report(end: AnswerEnd) -> UsageReport:
    return usage_of(end.usage.prompt_tokens, end.usage.completion_tokens, end.cached_tokens)


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> UsageReport:
    return UsageReport(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
        cache_read_input_tokens=cached_tokens,
    )


def epd_report(record: RequestRecord, end: AnswerEnd) -> EpdReport:
    amounts = {each.name: each.value(end) for each in AMOUNTS if each.name in EpdReport.model_fields}
    return EpdReport.model_validate(
        {
            **amounts,
            "video_s": end.usage.video_s,
            "visual_tokens_before_reduction": end.usage.visual_tokens_before,
            "retention": end.retention,
            "ttft_s": record.ttft_s or 0.0,
            "total_s": record.total_s,
            "stages_s": seconds_by_stage(end.timings),
            "queued_s": seconds_by_stage(end.queued),
            **({"cache": _cache_report(end.usage)} if end.keeps_media else {}),
        }
    )


def _cache_report(usage: Usage) -> CacheReport:
    found: dict[str, dict[str, TierReport]] = {"embeddings": {}, "kv": {}}
    for each in totals(usage.reused):
        found[each.kind][each.tier] = TierReport(tokens=each.num, bytes=each.num_bytes)
    return CacheReport(frames=usage.num_unread_frames, **found)


def span_report(span: StageSpan, record: RequestRecord) -> SpanReport:
    return SpanReport(
        stage=span.stage,
        worker=span.worker,
        start_s=span.start_s - record.arrival_s,
        stop_s=span.stop_s - record.arrival_s,
        item=span.item,
        group=span.group,
        frame_times_s=list(span.frame_times_s) or None,
        kept=[_kept_report(each) for each in span.kept] or None,
        frames=span.num_frames or None,
        notes=list(span.notes) or None,
        choice=span.choice or None,
    )


def _kept_report(kept: KeptCells) -> KeptReport:
    (start, stop), (rows, columns) = kept.units, kept.grid
    return KeptReport(
        first_unit=start,
        num_units=stop - start,
        frames_per_unit=kept.frames_per_unit,
        rows=rows,
        columns=columns,
        bits=base64.b64encode(kept.bits).decode(),
    )
