"""Takes a request from its JSON to the items of its answer: admission, media, service, and records."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from epd.chat import ChatMessage
from epd.control.request_budget import RequestLimits, check_json_size
from epd.errors import OverloadedError
from epd.frame_sampling import FrameSampling
from epd.reduction import KEEP_ALL, ReductionPolicy, VisualBudget
from epd.sampling_params import SamplingParams
from epd.serve_app.files.batch_store import BatchStore
from epd.serve_app.files.file_store import FileStore
from epd.serve_app.files.settings import FileSettings
from epd.serve_app.files.upload_store import UploadStore
from epd.serve_app.files.uploaded_media import check_media, names_file
from epd.serve_app.http.answers.several_answers import answer_all
from epd.serve_app.http.guard.body_reader import BodyLimits, BodyReader
from epd.serve_app.http.guard.http_guard import check_admin, sent_key
from epd.serve_app.http.requests.answer_format import answer_format, no_turns
from epd.serve_app.http.requests.chat_request import ChatRequest, EpdOptions
from epd.serve_app.http.requests.named_media import NamedMedia, namespace_of
from epd.serve_app.http.requests.request_cost import budget_of
from epd.serve_app.http.requests.request_parsing import (
    check_supported,
    conversation,
    describe,
    heard_part,
    model_named,
    pixel_limits,
    reduction_policy,
    sampling_params,
    video_sampling,
    visual_budget,
)
from epd.serve_app.observability.metrics import ServerMetrics
from epd.serve_app.observability.record import RequestRecord, record_of
from epd.serve_app.observability.tracing import tracing_of
from epd.serve_app.service import (
    AnswerItem,
    AnswerRequest,
    AnswerService,
    Estimate,
    MediaReference,
    MediaService,
    MediaSource,
    ModelCard,
    StageSpan,
)
from epd.stages.grammar.checker import GrammarChecker

_RETRY_AFTER_S = 1.0
_T = TypeVar("_T", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Limits and policy of the HTTP server.

    api_key: None allows every client
    admin_api_key: required to change roles and to come before others; None allows no client
    max_body_bytes: of one body
    bodies: limits of all bodies being read
    max_requests: requests answered at once
    limits: of what one request may ask for
    default_params, default_reduction: for requests without their own
    max_visual_tokens: of each request, None for what the model's context has room for
    default_deadline_s: of the first token, from arrival
    max_named_media, max_named_bytes: media with a uuid that are kept to be asked about again
    keep_alive_s: seconds of silence in a stream before a comment is sent
    allowed_hosts: names that clients may use for the server, see `HostCheck`
    trace_dir: folder for a Chrome trace of each request, of which the latest `max_traces` are kept
    otlp_endpoint: base URL of a collector that gets OpenTelemetry traces
    files: where files of clients and batches are kept; None keeps none
    front: the label of this server's metrics; empty where it is the only one at its address
    """

    api_key: str | None = field(default=None, repr=False)
    admin_api_key: str | None = field(default=None, repr=False)
    max_body_bytes: int = 128 << 20
    bodies: BodyLimits = field(default_factory=BodyLimits)
    max_requests: int = 512
    limits: RequestLimits = field(default_factory=RequestLimits)
    default_params: SamplingParams = field(default_factory=SamplingParams)
    default_deadline_s: float | None = None
    default_reduction: ReductionPolicy = KEEP_ALL
    max_visual_tokens: int | None = None
    max_named_media: int = 4096
    max_named_bytes: int = 256 << 20
    keep_alive_s: float = 15.0
    allowed_hosts: frozenset[str] | None = None
    trace_dir: Path | None = None
    max_traces: int = 256
    otlp_endpoint: str | None = None
    files: FileSettings | None = None
    front: str = ""

    def defaults(self) -> dict[str, str | float | int | None]:
        """Returns what holds for requests that do not say it, by the name of the option."""
        params, reduction = self.default_params, self.default_reduction
        return {
            "temperature": params.temperature,
            "max_tokens": params.max_tokens,
            "retention": reduction.retention,
            "reduction": reduction.method,
        }


@dataclass(frozen=True, slots=True)
class _Options:
    priority: int
    sampling: SamplingParams
    frame_sampling: FrameSampling
    reduction: ReductionPolicy
    budget: VisualBudget
    ours: EpdOptions
    cache_salt: str


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A checked chat request: its JSON, its conversation, and the media that the messages refer to.

    grammar: that the answer follows, empty for any answer
    namespace: of the names that the client gives to media
    """

    chat: ChatRequest
    messages: tuple[ChatMessage, ...]
    references: tuple[MediaReference, ...]
    grammar: str = ""
    namespace: bytes = b""


class ServerState:
    """Holds the state that all routes share."""

    def __init__(self, service: AnswerService, media: MediaService, settings: ApiSettings) -> None:
        """Starts serving. media: keeps the media of requests to the service."""
        self.service = service
        self.media = media
        self.settings = settings
        self.metrics = ServerMetrics(settings.front)
        self.tracing = tracing_of(settings.trace_dir, settings.max_traces, settings.otlp_endpoint)
        self.bodies = BodyReader(settings.bodies)
        self.grammars = GrammarChecker()
        self.files = None if settings.files is None else FileStore(settings.files)
        self.named_media = NamedMedia(settings.max_named_media, settings.max_named_bytes)
        self.batches = None if self.files is None else BatchStore(self.files)
        self.uploads = None if self.files is None else UploadStore(self.files)
        self.num_requests = 0
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
        self.tracing.close()
        self.grammars.close()

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

    async def checked(self, request: Request, chat: ChatRequest, num_bytes: int) -> ParsedRequest:
        """Checks a chat request that was read. num_bytes: of its body. Raises EPDError."""
        model = self.check_options(request, chat)
        messages, references = conversation(
            chat.messages, no_turns(chat), pixel_limits(chat), heard_part(chat)
        )
        namespace = namespace_of(request.headers.get("authorization", ""), chat.cache_salt or "")
        found = self.named_media.found(namespace, references)
        found = await self._with_files(request, found)
        parsed = ParsedRequest(chat, messages, found, namespace=namespace)
        if found != references:
            num_bytes += sum(
                len(each.url) for each, sent in zip(found, references, strict=True) if not sent.url
            )
            self.bodies.hold(record_of(request), num_bytes, self.settings.max_body_bytes)
        cost = budget_of(
            chat,
            parsed.messages,
            parsed.references,
            num_bytes=num_bytes,
            context_tokens=model.max_model_len,
        )
        cost.check(self.settings.limits)
        return await self.accepted(request, parsed, model)

    def owner_of(self, request: Request) -> str:
        """Returns a name of the key that a request came with; empty where the server has none."""
        if self.settings.api_key is None and not request.state.is_admin:
            return ""
        return hashlib.blake2b(sent_key(request) or b"", digest_size=16, person=b"epd files").hexdigest()

    async def _with_files(
        self, request: Request, references: tuple[MediaReference, ...]
    ) -> tuple[MediaReference, ...]:
        """Returns the media with the files among them checked, which reads the disk. Raises EPDError."""
        names = [each.url for each in references if names_file(each.url)]
        if not names:
            return references
        await asyncio.to_thread(check_media, self.files, self.owner_of(request), names)
        return tuple(replace(each, is_upload=names_file(each.url)) for each in references)

    def check_options(self, request: Request, chat: ChatRequest) -> ModelCard:
        """Checks everything but the amounts of a request. Returns its model. Raises EPDError."""
        check_supported(chat)
        if chat.priority is not None and chat.priority < 0:
            check_admin(request, f"a priority of {chat.priority}", "0 and above")
        return model_named(chat.model, self.service.models)

    async def accepted(self, request: Request, parsed: ParsedRequest, model: ModelCard) -> ParsedRequest:
        """Returns a checked request with the grammar of its format, and notes it. Raises RequestError."""
        record = record_of(request)
        record.model = model.name
        record.is_stream = bool(parsed.chat.stream)
        wanted = answer_format(parsed.chat)
        return parsed if wanted is None else replace(parsed, grammar=await self.grammars.checked(wanted))

    async def items(
        self, parsed: ParsedRequest, record: RequestRecord
    ) -> AsyncGenerator[Sequence[AnswerItem], None]:
        """Yields the answer; ending or closing it frees all resources of the request. Raises EPDError."""
        options = self._options(parsed)
        shows_spans = record.is_stream and bool(options.ours.events)
        request = partial(self._request, record, parsed.messages, options)
        record.num_media = len(parsed.references)
        with self._admitted():
            async with self.media.sources(record.request_id, parsed.references) as media:
                self.named_media.keep(parsed.namespace, parsed.references)
                del parsed  # it holds whole media as text, and the answer may take minutes
                self.bodies.release(record)
                async with aclosing(self.service.answer(request(media))) as answer:
                    async for items in answer:
                        for item in items:
                            record.note(item)
                        yield items if shows_spans else _without_spans(items)

    async def items_of_prompts(
        self, parsed: ParsedRequest, prompts: Sequence[tuple[int, ...]], record: RequestRecord
    ) -> AsyncGenerator[Sequence[AnswerItem], None]:
        """Yields the answers to prompts of tokens as `answer_all` does. parsed: their options."""
        options = self._options(parsed)
        first = self._request(record, (), options, (), prompts[0])
        requests = [
            replace(first, request_id=f"{record.request_id}-{number}", prompt=prompt)
            for number, prompt in enumerate(prompts)
        ]
        with self._admitted():
            self.bodies.release(record)
            async with aclosing(answer_all(self.service, requests)) as answers:
                async for items in answers:
                    for item in items:
                        record.note(item)
                    yield _without_spans(items)

    async def estimate(self, parsed: ParsedRequest, record: RequestRecord) -> Estimate:
        """Returns what the answer would use. Its media are held until then. Raises EPDError."""
        options = self._options(parsed)
        with self._admitted():
            async with self.media.sources(record.request_id, parsed.references) as media:
                self.named_media.keep(parsed.namespace, parsed.references)
                self.bodies.release(record)
                request = self._request(record, parsed.messages, options, media)
                return await self.service.prompts.estimate(request)

    def _options(self, parsed: ParsedRequest) -> _Options:
        """Returns the options of a request. Raises RequestError for inconsistent ones."""
        chat = parsed.chat
        return _Options(
            chat.priority or 0,
            replace(sampling_params(chat, self.settings.default_params), grammar=parsed.grammar),
            video_sampling(chat, parsed.references),
            reduction_policy(chat, self.settings.default_reduction),
            visual_budget(chat, self.settings.max_visual_tokens),
            chat.epd or EpdOptions(),
            chat.cache_salt or "",
        )

    def _request(
        self,
        record: RequestRecord,
        messages: tuple[ChatMessage, ...],
        options: _Options,
        media: tuple[MediaSource, ...],
        prompt: tuple[int, ...] | None = None,
    ) -> AnswerRequest:
        patience_s = options.ours.deadline_s or self.settings.default_deadline_s
        return AnswerRequest(
            request_id=record.request_id,
            model=record.model,
            messages=messages,
            media=media,
            priority=options.priority,
            sampling=options.sampling,
            frame_sampling=options.frame_sampling,
            reduction=options.reduction,
            budget=options.budget,
            retention_min=options.ours.retention or options.ours.retention_min,
            arrival_s=record.arrival_s,
            deadline_s=None if patience_s is None else record.arrival_s + patience_s,
            cache_salt=options.cache_salt,
            wants_spans=(bool(options.ours.events) and record.is_stream) or self.tracing.is_on,
            prompt=prompt,
        )

    @contextmanager
    def _admitted(self) -> Iterator[None]:
        if self.num_requests >= self.settings.max_requests:
            raise OverloadedError(
                f"{self.num_requests} requests are in flight; allowed {self.settings.max_requests}; "
                "retry later",
                _RETRY_AFTER_S,
            )
        self.num_requests += 1
        self.metrics.in_flight.set(self.num_requests)
        try:
            yield
        finally:
            self.num_requests -= 1
            self.metrics.in_flight.set(self.num_requests)

    def finish(self, record: RequestRecord) -> None:
        """Records a finished HTTP request. Called once for each, however it ended."""
        self.bodies.release(record)
        if record.is_answer:
            self.metrics.observe(record)
            record.log()
            if self.tracing.is_on:
                self.tracing.add(record.trace())


def _without_spans(items: Sequence[AnswerItem]) -> Sequence[AnswerItem]:
    """Returns items without those that are only for traces; most answers have none."""
    return [item for item in items if not isinstance(item, StageSpan)]
