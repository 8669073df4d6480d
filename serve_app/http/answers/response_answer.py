"""Gives an answer the form of `/v1/responses`: items of output, and OpenAI's typed events while they grow.

created, in_progress
    output_item.added   content_part.added   output_text.delta ...   .done   content_part.done   .done
    output_item.added   function_call_arguments.delta ...            .done                       .done
    output_item.added   reasoning_text.delta ...                     .done                       .done
completed, or incomplete where the answer was cut
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_core import to_json

from epd.answer_parsers import AnswerParsing
from epd.serve_app.http.answers.answer_reader import AnswerReader, Piece, call_id, reader_of
from epd.serve_app.http.answers.reasoning import Thought
from epd.serve_app.http.answers.responses import checked_end, epd_report, finite
from epd.serve_app.http.answers.tool_calls import CallPiece
from epd.serve_app.http.protocol import EpdReport, ErrorReply
from epd.serve_app.observability.record import RequestRecord
from epd.serve_app.service import AnswerEnd, AnswerItem, FinishReason, TokenDelta, TokenLogprob

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class ResponseTopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ResponseLogprob(ResponseTopLogprob):
    top_logprobs: list[ResponseTopLogprob]


class ResponseText(BaseModel):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[None] = []
    logprobs: list[ResponseLogprob] = []


class ResponseMessage(BaseModel):
    """An answer. content: one text, none before it has begun."""

    id: str
    type: Literal["message"] = "message"
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[ResponseText]


class ResponseCall(BaseModel):
    """A call of a function. arguments: JSON, as the model wrote it."""

    id: str
    type: Literal["function_call"] = "function_call"
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class ResponseThought(BaseModel):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class ResponseReasoning(BaseModel):
    """What a model thought before its answer. content: one text, none before it has begun."""

    id: str
    type: Literal["reasoning"] = "reasoning"
    status: ItemStatus
    summary: list[ResponseText] = []
    content: list[ResponseThought]


class CachedTokens(BaseModel):
    """Tokens that were found in caches. cache_write_tokens: none, as writing is not counted apart."""

    cached_tokens: int
    cache_write_tokens: int = 0


class ReasoningTokens(BaseModel):
    reasoning_tokens: int = 0


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseReply(BaseModel):
    """A response. The fields after `usage` are those of the request, or what is used in their place.

    An error is a status or an event of its own, so a response has no `error`: clients that ask for its
    message where the name is there would fail on a null.
    """

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: ItemStatus
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[ResponseMessage | ResponseCall | ResponseReasoning] = []
    usage: ResponseUsage | None = None
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    text: dict[str, Any]
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    top_logprobs: int
    metadata: dict[str, str]
    background: Literal[False] = False
    previous_response_id: None = None
    store: Literal[False] = False
    truncation: Literal["disabled"] = "disabled"
    epd: EpdReport | None = None


Event = dict[str, Any]
Item = ResponseMessage | ResponseCall | ResponseReasoning


class _Output:
    """Gathers the items of a response, the last of which may be open, and yields the events of their growth.

    request_id: of the response, in the names of its items
    """

    def __init__(self, request_id: str) -> None:
        self.items: list[Item] = []
        self._request_id = request_id
        self._is_open = False
        self._pieces: list[str] = []  # of the open item
        self._logprobs: list[ResponseLogprob] = []

    def _open(self, item: Item) -> Iterator[Event]:
        yield from self.close("completed")
        self.items.append(item)
        self._is_open, self._pieces, self._logprobs = True, [], []
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": item}

    def _name(self, prefix: str) -> str:
        return f"{prefix}_{self._request_id.removeprefix('resp_')}_{len(self.items)}"

    def text(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> Iterator[Event]:
        """Adds to the answer's text."""
        if not self._is_open or not isinstance(self.items[-1], ResponseMessage):
            yield from self._open(ResponseMessage(id=self._name("msg"), status="in_progress", content=[]))
            yield self._of_text("content_part.added", part=ResponseText(text=""))
        self._pieces.append(text)
        reported = [_logprob(token) for token in logprobs]
        self._logprobs += reported
        if text or reported:
            yield self._of_text("output_text.delta", delta=text, logprobs=reported)

    def thought(self, text: str) -> Iterator[Event]:
        """Adds to what the model thought."""
        if not self._is_open or not isinstance(self.items[-1], ResponseReasoning):
            yield from self._open(ResponseReasoning(id=self._name("rs"), status="in_progress", content=[]))
        self._pieces.append(text)
        yield self._of_text("reasoning_text.delta", delta=text)

    def call(self, piece: CallPiece) -> Iterator[Event]:
        """Adds to a call of a function. A piece with a name begins one."""
        if piece.name is not None:
            number = call_id(self._request_id, 0, piece.index)
            call = ResponseCall(
                id=self._name("fc"), status="in_progress", call_id=number, name=piece.name, arguments=""
            )
            yield from self._open(call)
        self._pieces.append(piece.arguments)
        if piece.arguments:
            yield self._of_item("function_call_arguments.delta", delta=piece.arguments)

    def close(self, status: ItemStatus) -> Iterator[Event]:
        """Ends the open item, if there is one."""
        if not self._is_open:
            return
        whole, item = "".join(self._pieces), self.items[-1]
        self._is_open = False
        done: Item
        if isinstance(item, ResponseReasoning):
            yield self._of_text("reasoning_text.done", text=whole)
            done = item.model_copy(update={"status": status, "content": [ResponseThought(text=whole)]})
        elif isinstance(item, ResponseMessage):
            part = ResponseText(text=whole, logprobs=self._logprobs)
            yield self._of_text("output_text.done", text=whole, logprobs=self._logprobs)
            yield self._of_text("content_part.done", part=part)
            done = item.model_copy(update={"status": status, "content": [part]})
        else:
            yield self._of_item("function_call_arguments.done", arguments=whole, name=item.name)
            done = item.model_copy(update={"status": status, "arguments": whole})
        self.items[-1] = done
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": done}

    def _of_item(self, kind: str, **fields: object) -> Event:
        place = {"item_id": self.items[-1].id, "output_index": len(self.items) - 1}
        return {"type": f"response.{kind}", **place, **fields}

    def _of_text(self, kind: str, **fields: object) -> Event:
        return self._of_item(kind, content_index=0, **fields)


class ResponseBuilder:
    """Gathers the items of an answer into a response, and says by events how it grows."""

    def __init__(self, record: RequestRecord, begun: ResponseReply, *, parsing: AnswerParsing | None) -> None:
        """Takes begun: the response without output; parsing: how it is read, None for a text alone."""
        self._record = record
        self._begun = begun
        self._parsing = parsing
        self._reader: AnswerReader | None = None
        self._output = _Output(record.request_id)
        self._has_begun = False
        self._reason: FinishReason = "length"
        self._end: AnswerEnd | None = None
        self._num_events = 0

    def add(self, item: AnswerItem) -> None:
        """Takes an item without its events."""
        for _ in self._taken(item):
            pass

    def body(self) -> str:
        """Returns the JSON of the response. Raises EPDError if the answer stopped without its end."""
        for _ in self._ended():
            pass
        return self._complete().model_dump_json()

    def events(self, item: AnswerItem) -> bytes:
        """Takes an item; returns its events."""
        return b"".join(map(self._sent, self._taken(item)))

    def last_events(self) -> bytes:
        """Returns the events of the end. Raises EPDError if the answer stopped without one."""
        data = b"".join(map(self._sent, self._ended()))
        reply = self._complete()
        return data + self._sent({"type": f"response.{reply.status}", "response": reply})

    def error_event(self, error: ErrorReply) -> bytes:
        """Returns an error as an event that the official client raises as an error."""
        body = error.error
        return self._sent({"type": "error", "code": body.code, "message": body.message, "error": body})

    def _sent(self, event: Event) -> bytes:
        data = to_json({**event, "sequence_number": self._num_events})
        self._num_events += 1
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), data)

    def _taken(self, item: AnswerItem) -> Iterator[Event]:
        if isinstance(item, AnswerEnd):
            self._end = item
        if not isinstance(item, TokenDelta):
            return
        yield from self._start()
        if self._parsing is not None and self._reader is None:
            self._reader = reader_of(self._parsing, thinks=item.thinks)
        if self._reader is None:
            if item.text or item.logprobs:
                yield from self._output.text(item.text, item.logprobs)
        else:
            yield from self._read(self._reader.push(item.text))
        self._reason = item.finish_reason or self._reason

    def _start(self) -> Iterator[Event]:
        if not self._has_begun:
            self._has_begun = True
            for kind in ("created", "in_progress"):
                yield {"type": f"response.{kind}", "response": self._begun}

    def _read(self, pieces: Sequence[Piece]) -> Iterator[Event]:
        for piece in pieces:
            if isinstance(piece, Thought):
                yield from self._output.thought(piece.text)
            else:
                yield from self._output.text(piece) if isinstance(piece, str) else self._output.call(piece)

    def _ended(self) -> Iterator[Event]:
        """Yields the events of what is left of the answer, closing its last item."""
        checked_end(self._end)
        yield from self._start()
        if self._reader is not None:
            yield from self._read(self._reader.finish())
        if all(isinstance(each, ResponseReasoning) for each in self._output.items):
            yield from self._output.text("")
        yield from self._output.close("completed" if self._reason == "stop" else "incomplete")

    def _complete(self) -> ResponseReply:
        end = checked_end(self._end)
        is_cut = self._reason != "stop"
        return self._begun.model_copy(
            update={
                "status": "incomplete" if is_cut else "completed",
                "incomplete_details": IncompleteDetails() if is_cut else None,
                "output": self._output.items,
                "usage": _usage(end),
                "epd": epd_report(self._record, end),
            }
        )


def _logprob(token: TokenLogprob) -> ResponseLogprob:
    alternatives = [
        ResponseTopLogprob(token=one.text, logprob=finite(one.logprob), bytes=list(one.data))
        for one in token.alternatives
    ]
    return ResponseLogprob(
        token=token.text,
        logprob=finite(token.logprob),
        bytes=list(token.data),
        top_logprobs=alternatives,
    )


def _usage(end: AnswerEnd) -> ResponseUsage:
    usage = end.usage
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=CachedTokens(cached_tokens=end.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=ReasoningTokens(),
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
    )
