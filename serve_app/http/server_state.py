"""Takes a request from its JSON to the items of its answer: admission, media, service, and records."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import reduce
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from epd.control.request_budget import check_json_size
from epd.serve_app.clients import Client
from epd.serve_app.files.batch_store import BatchStore
from epd.serve_app.files.file_store import FileStore, check_media, names_file
from epd.serve_app.files.upload_store import UploadStore
from epd.serve_app.http.chat_answers import ApiSettings, ChatAnswers, ParsedRequest, without_spans
from epd.serve_app.http.guard.body_reader import BodyReader
from epd.serve_app.http.guard.http_guard import check_admin, client_of
from epd.serve_app.http.guard.keyed_clients import KeyedClients
from epd.serve_app.http.requests.chat_request import ChatRequest
from epd.serve_app.http.requests.request_parsing import describe
from epd.serve_app.observability.metrics import ServerMetrics
from epd.serve_app.observability.record import RequestRecord, record_of
from epd.serve_app.observability.tracing import tracing_of
from epd.serve_app.service import (
    AnswerEnd,
    AnswerItem,
    AnswerRequest,
    AnswerService,
    MediaReference,
    MediaService,
    ModelCard,
    TokenDelta,
)
from epd.types import StageTimings, Usage

__all__ = ["ApiSettings", "ParsedRequest", "ServerState"]

_T = TypeVar("_T", bound=BaseModel)
NUM_AT_ONCE = 16  # prompts of one request
_Pieces = asyncio.Queue[Sequence[AnswerItem] | None]


class ServerState(ChatAnswers):
    """Holds the state that all routes share."""

    def __init__(self, service: AnswerService, media: MediaService, settings: ApiSettings) -> None:
        """Starts serving. media: keeps the media of requests to the service."""
        super().__init__(service, media, settings)
        self.metrics = ServerMetrics(settings.front)
        self.tracing = tracing_of(settings.trace_dir, settings.max_traces, settings.otlp_endpoint)
        self.bodies = BodyReader(settings.bodies)
        self.clients = None if settings.api_keys_file is None else KeyedClients(settings.api_keys_file)
        self.files = None if settings.files is None else FileStore(settings.files)
        self.batches = None if self.files is None else BatchStore(self.files)
        self.uploads = None if self.files is None else UploadStore(self.files)
        self.is_traced = self.tracing.is_on
        watch = self.metrics.watch
        watch(
            "held_body_bytes", "Bytes of request bodies held in memory.", lambda: self.bodies.budget.num_taken
        )
        watch(
            "spooled_media_bytes",
            "Bytes of media files of requests in flight.",
            lambda: media.num_spooled_bytes,
        )
        watch(
            "named_media_bytes",
            "Bytes of media that are kept by the uuid of a client.",
            lambda: self.named_media.num_bytes,
        )
        watch("media_downloads", "Media downloads in flight.", lambda: media.num_downloads)
        watch("dropped_traces", "Traces dropped since the start.", lambda: self.tracing.num_dropped)

    def close(self) -> None:
        super().close()
        self.tracing.close()
        if self.files is not None:
            self.files.close()

    async def render_metrics(self) -> bytes:
        """Returns the metrics as they are now, as Prometheus scrapes them."""
        return self.metrics.render(await self.service.status())

    async def read(self, request: Request) -> ParsedRequest:
        """Reads and checks the body of a chat request. Raises EPDError."""
        chat, num_bytes = await self.read_json(request, ChatRequest)
        return await self.checked(request, chat, num_bytes)

    async def read_body(self, request: Request) -> bytearray:
        """Reads a body whose JSON has no more values than allowed. Raises EPDError."""
        body = await self.bodies.read(request, self.settings.max_body_bytes)
        check_json_size(body, self.settings.limits)
        return body

    async def read_json(self, request: Request, kind: type[_T]) -> tuple[_T, int]:
        """Reads a body. Returns its JSON and the bytes of it. Raises EPDError."""
        body = await self.read_body(request)
        try:
            return kind.model_validate_json(body), len(body)
        except ValidationError as error:
            raise describe(error) from None  # pydantic's message contains the input, which must not be logged

    async def read_small(self, request: Request, kind: type[_T], max_bytes: int) -> _T:
        """Reads a body that asks for no answer of a model, and holds none of it. Raises EPDError."""
        body = await self.bodies.read(request, max_bytes)
        try:
            return kind.model_validate_json(body)
        except ValidationError as error:
            raise describe(error) from None
        finally:
            self.bodies.release(record_of(request))

    async def checked(self, request: Request, chat: ChatRequest, num_bytes: int) -> ParsedRequest:
        """Checks a chat request that was read. num_bytes: of its body. Raises EPDError."""
        self.check_options(request, chat)
        return await self.checked_chat(chat, record_of(request), client_of(request), num_bytes)

    async def with_files(
        self, references: tuple[MediaReference, ...], client: Client
    ) -> tuple[MediaReference, ...]:
        names = [each.url for each in references if names_file(each.url)]
        if not names:
            return references
        await asyncio.to_thread(check_media, self.files, client.owner, names)
        return tuple(replace(each, is_upload=names_file(each.url)) for each in references)

    def check_options(self, request: Request, chat: ChatRequest) -> ModelCard:
        """Checks everything but the amounts of a request. Returns its model. Raises EPDError."""
        if chat.priority is not None and chat.priority < min(0, client_of(request).priority):
            check_admin(request, f"a priority of {chat.priority}", "0 and above")
        return self.check_chat(chat)

    def begun(self, record: RequestRecord) -> None:
        self.bodies.release(record)

    def hold(self, record: RequestRecord, num_bytes: int) -> None:
        self.bodies.hold(record, num_bytes, self.settings.max_body_bytes)

    @contextmanager
    def admitted(self, client: Client) -> Iterator[None]:
        try:
            with super().admitted(client):
                self.metrics.in_flight.set(self.num_requests)
                yield
        finally:
            self.metrics.in_flight.set(self.num_requests)

    async def items_of_prompts(
        self, parsed: ParsedRequest, prompts: Sequence[tuple[int, ...]], record: RequestRecord
    ) -> AsyncGenerator[Sequence[AnswerItem], None]:
        """Yields the answers to prompts of tokens as `answer_all` does. parsed: their options."""
        request = self.request_of(parsed, record)
        requests = [
            request(request_id=f"{record.request_id}-{number}", prompt=prompt)
            for number, prompt in enumerate(prompts)
        ]
        with self.admitted(parsed.client):
            self.bodies.release(record)
            async with aclosing(answer_all(self.service, requests)) as answers:
                async for items in answers:
                    for item in items:
                        record.note(item)
                    yield without_spans(items)

    def finish(self, record: RequestRecord) -> None:
        """Records a finished HTTP request. Called once for each, however it ended."""
        self.bodies.release(record)
        if self.clients is not None and record.client:
            self.clients.spend(record.client, record.num_tokens)
        if record.is_answer:
            self.metrics.observe(record)
            record.log()
            if self.is_traced:
                self.tracing.add(record.trace())


def server_of(request: Request) -> ServerState:
    """Returns the state of the server that a request came to."""
    server = request.app.state.server
    assert isinstance(server, ServerState)
    return server


async def answer_all(
    service: AnswerService, requests: Sequence[AnswerRequest]
) -> AsyncGenerator[Sequence[AnswerItem], None]:
    """Yields the pieces of all answers, and one AnswerEnd with what all of them have used as the last.

    Prompts are answered as if they were choices of one answer, a few at a time:

    prompt 0, n 2    choices 0 1
    prompt 1, n 2    choices 2 3

    requests: at least one, each with the same number of choices.
    Closing it closes all answers. Raises EPDError as the first answer that fails.
    """
    ends: list[AnswerEnd] = []
    pieces: _Pieces = asyncio.Queue()
    waiting = iter(enumerate(requests))
    workers = [
        asyncio.create_task(_answer_next(service, waiting, pieces, ends))
        for _ in range(min(NUM_AT_ONCE, len(requests)))
    ]
    done = asyncio.gather(*workers)
    done.add_done_callback(lambda _: pieces.put_nowait(None))
    try:
        while (items := await pieces.get()) is not None:
            yield items
        await done
        if len(ends) == len(requests):
            yield [_sum_of(ends)]
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(done, *workers, return_exceptions=True)


async def _answer_next(
    service: AnswerService,
    waiting: Iterator[tuple[int, AnswerRequest]],
    pieces: _Pieces,
    ends: list[AnswerEnd],
) -> None:
    """Answers one request after the other until none is waiting. waiting: shared with others."""
    for number, request in waiting:
        first_choice = number * request.sampling.n
        async with aclosing(service.answer(request)) as answer:
            async for items in answer:
                ends += [item for item in items if isinstance(item, AnswerEnd)]
                moved = [_moved(item, first_choice) for item in items if not isinstance(item, AnswerEnd)]
                if moved:
                    pieces.put_nowait(moved)


def _moved(item: AnswerItem, first_choice: int) -> AnswerItem:
    return replace(item, index=item.index + first_choice) if isinstance(item, TokenDelta) else item


def _sum_of(ends: Sequence[AnswerEnd]) -> AnswerEnd:
    """Returns what several answers have used. Seconds of stages add up, their total is the longest."""
    return replace(
        ends[0],
        usage=reduce(Usage.__add__, (end.usage for end in ends)),
        cached_tokens=sum(end.cached_tokens for end in ends),
        num_retries=sum(end.num_retries for end in ends),
        timings=_timings([end.timings for end in ends]),
        queued=_timings([end.queued for end in ends]),
    )


def _timings(timings: Sequence[StageTimings]) -> StageTimings:
    total = reduce(StageTimings.__add__, timings)
    return replace(total, total_s=max(each.total_s for each in timings))
