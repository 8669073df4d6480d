"""Gives answers the form of OpenAI's completions: one object, or the chunks of a stream."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel

from epd.serve_app.http.answers.responses import DONE, checked_end, event, finite, usage_of, usage_report
from epd.serve_app.http.protocol import ErrorReply, UsageReport
from epd.serve_app.observability.record import RequestRecord
from epd.serve_app.service import AnswerEnd, AnswerItem, FinishReason, TokenDelta, TokenLogprob


class CompletionLogprobs(BaseModel):
    """The tokens of a text.

    text_offset: where each begins, in characters of the answer
    token_logprobs: of each
    tokens: each one's text
    top_logprobs: of each the likeliest tokens in its place, and itself
    """

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None


class WholeChoice(CompletionChoice):
    """A choice of a completion that is not streamed. prompt_logprobs: vLLM's, never there."""

    prompt_logprobs: None = None


class Completion(BaseModel):
    """A completion, or one chunk of its stream. usage: of a stream in its last chunk, if requested."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: Sequence[WholeChoice | CompletionChoice]
    usage: UsageReport | None = None


class _TextOffsets:
    """Counts the characters of one answer, whose tokens may end within one."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0

    def logprobs_of(self, tokens: Sequence[TokenLogprob]) -> CompletionLogprobs:
        """Takes the next tokens; returns how they are reported."""
        offsets = []
        for token in tokens:
            offsets.append(self._num_chars)
            self._num_chars += len(self._decoder.decode(token.data))
        return CompletionLogprobs(
            text_offset=offsets,
            token_logprobs=[finite(token.logprob) for token in tokens],
            tokens=[token.text for token in tokens],
            top_logprobs=[_likeliest(token) for token in tokens],
        )


def _likeliest(token: TokenLogprob) -> dict[str, float]:
    found = {token.text: finite(token.logprob)}
    for other in token.alternatives:
        found.setdefault(other.text, finite(other.logprob))
    return found


class CompletionWhole:
    """Gathers the answers to all prompts into one completion."""

    def __init__(self, record: RequestRecord, echoed: Sequence[str], *, has_logprobs: bool) -> None:
        """Takes echoed: what stands before the answer of each choice."""
        self._record = record
        self._has_logprobs = has_logprobs
        self._texts = [[text] for text in echoed]
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in echoed]
        self._reasons: list[FinishReason] = ["length"] * len(echoed)
        self._end: AnswerEnd | None = None

    def add(self, item: AnswerItem) -> None:
        if isinstance(item, TokenDelta):
            self._texts[item.index].append(item.text)
            self._logprobs[item.index] += item.logprobs
            self._reasons[item.index] = item.finish_reason or self._reasons[item.index]
        elif isinstance(item, AnswerEnd):
            self._end = item

    def body(self) -> str:
        """Returns the JSON of the completion. Raises EPDError if the answer stopped without its end."""
        usage = usage_report(checked_end(self._end))
        choices = [self._choice(index) for index in range(len(self._texts))]
        return completion_of(self._record, choices).model_copy(update={"usage": usage}).model_dump_json()

    def _choice(self, index: int) -> WholeChoice:
        return WholeChoice(
            index=index,
            text="".join(self._texts[index]),
            logprobs=_TextOffsets().logprobs_of(self._logprobs[index]) if self._has_logprobs else None,
            finish_reason=self._reasons[index],
        )


class CompletionChunks:
    """Turns items into chunks. The first of each choice begins with what is echoed."""

    def __init__(
        self,
        record: RequestRecord,
        echoed: Sequence[str],
        *,
        has_logprobs: bool,
        includes_usage: bool = False,
        counted_prompt: int | None = None,
    ) -> None:
        """Takes echoed: as `CompletionWhole`; counted_prompt: its tokens, for the usage in every chunk."""
        self._record = record
        self._echoed = list(echoed)
        self._offsets = [_TextOffsets() for _ in echoed] if has_logprobs else []
        self._includes_usage = includes_usage
        self._so_far = None if counted_prompt is None else usage_of(counted_prompt, 0)
        self._end: AnswerEnd | None = None

    def events(self, item: AnswerItem) -> bytes:
        """Returns the event of a piece of text; others have none."""
        if isinstance(item, AnswerEnd):
            self._end = item
        if not isinstance(item, TokenDelta):
            return b""
        if self._so_far:
            num_completed = self._so_far.completion_tokens + len(item.token_ids)
            self._so_far = usage_of(self._so_far.prompt_tokens, num_completed)
        text, self._echoed[item.index] = self._echoed[item.index] + item.text, ""
        if not (text or item.finish_reason or (self._offsets and item.logprobs)):
            return b""
        choice = CompletionChoice(
            index=item.index,
            text=text,
            logprobs=self._offsets[item.index].logprobs_of(item.logprobs) if self._offsets else None,
            finish_reason=item.finish_reason,
        )
        return self._event([choice], self._so_far)

    def last_events(self) -> bytes:
        """Returns the usage, if requested, and the end. Raises EPDError without the answer's end."""
        usage = usage_report(checked_end(self._end))
        return (self._event([], usage) if self._includes_usage else b"") + DONE

    def error_event(self, error: ErrorReply) -> bytes:
        return event(error)

    def _event(self, choices: list[CompletionChoice], usage: UsageReport | None) -> bytes:
        chunk = completion_of(self._record, choices).model_copy(update={"usage": usage})
        without = None if self._includes_usage else {"usage"}
        return b"data: " + chunk.model_dump_json(exclude=without).encode() + b"\n\n"


def completion_of(record: RequestRecord, choices: Sequence[CompletionChoice]) -> Completion:
    """Returns a completion of these choices, without its usage."""
    return Completion(
        id=record.request_id, created=int(record.arrival_s), model=record.model, choices=choices
    )
