"""Answers chat requests that are JSON already: checks them, holds their media, asks the service.

The HTTP server does this for its routes; commands ask the service in their own process so, without HTTP.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from epd.answer_parsers import AnswerParsing
from epd.chat import ChatMessage
from epd.control.admission import has_place
from epd.control.request_budget import RequestLimits
from epd.errors import OverloadedError, RequestError
from epd.machine import steady_time_s
from epd.reduction import KEEP_ALL, ReductionPolicy
from epd.sampling_params import SamplingParams
from epd.serve_app.clients import THIS_PROCESS, Client
from epd.serve_app.fair_threads import FairThreads
from epd.serve_app.files.settings import FileSettings
from epd.serve_app.http.guard.body_reader import BodyLimits
from epd.serve_app.http.requests.answer_format import answer_format, chooses_calls, no_turns, offers_tools
from epd.serve_app.http.requests.chat_request import ChatRequest, EpdOptions
from epd.serve_app.http.requests.named_media import KeptNames, NamedMedia, namespace_of
from epd.serve_app.http.requests.request_parsing import (
    budget_of,
    check_supported,
    conversation,
    heard_part,
    model_named,
    pixel_limits,
    reduction_policy,
    sampling_params,
    video_sampling,
    visual_budget,
)
from epd.serve_app.observability.record import RequestRecord
from epd.serve_app.service import (
    AnswerItem,
    AnswerRequest,
    AnswerService,
    MediaReference,
    MediaService,
    ModelCard,
    StageSpan,
)
from epd.stages.grammar.checker import GrammarChecker
from epd.stages.grammar.formats import AnswerFormat
from epd.store.object_values import ObjectValues
from epd.store.piece_files import PieceFiles

# Processes at once, and those that one client may have.
_NUM_CHILDREN, _MAX_PER_CLIENT = 2, 1
# Formats that wait or are being checked.
_MAX_WAITING, _MAX_WAITING_PER_CLIENT = 64, 32


class FormatChecks:
    """Checks formats for one event loop. Formats whose verdict is known wait for nothing."""

    def __init__(self) -> None:
        """Starts nothing yet."""
        self._checker = GrammarChecker()
        self._threads = FairThreads("formats", _NUM_CHILDREN, _MAX_PER_CLIENT)
        self._num_waiting: Counter[str] = Counter()

    async def checked(self, wanted: AnswerFormat, client: str) -> str:
        """Returns the grammar of a client's format. Raises RequestError, OverloadedError."""
        if self._checker.knows(wanted):
            return self._checker.grammar_of(wanted)
        self._check_waiting(client)
        self._num_waiting[client] += 1
        try:
            return await self._threads.run(client, partial(self._checker.grammar_of, wanted))
        finally:
            self._num_waiting[client] -= 1
            self._num_waiting += Counter()  # forgets clients without any

    def _check_waiting(self, client: str) -> None:
        for count, allowed, whose in (
            (self._num_waiting[client], _MAX_WAITING_PER_CLIENT, "of this client "),
            (self._num_waiting.total(), _MAX_WAITING, ""),
        ):
            if count >= allowed:
                raise OverloadedError(
                    f"{count} formats {whose}are being checked; allowed: {allowed}; retry later"
                )

    def close(self) -> None:
        """Ends the processes."""
        self._threads.close()
        self._checker.close()


_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Limits and policy of the HTTP server.

    api_key: None allows every client
    admin_api_key: required to change roles and to come before others; None allows no client
    api_keys_file: keys of several clients, in place of an api_key
    max_body_bytes: of one body
    bodies: limits of all bodies being read
    max_requests: requests answered at once, beside some of clients that have few
    limits: of what one request may ask for
    default_params, default_reduction: for requests without their own
    max_visual_tokens: of each request, None for what the model's context has room for
    default_deadline_s: of the first token, from arrival
    max_named_media, max_named_bytes: media with a uuid that are kept to be asked about again
    name_files: opens what is known of named videos, which outlives the server; None for nothing
    keep_alive_s: seconds of silence in a stream before a comment is sent
    allowed_hosts: names that clients may use for the server, see `HostCheck`
    trace_dir: folder for a Chrome trace of each request, of which the latest `max_traces` are kept
    otlp_endpoint: base URL of a collector that gets OpenTelemetry traces
    log_stats_s: interval of the log's lines of figures; None writes none
    files: where files of clients and batches are kept; None keeps none
    reasoning_parser, tool_call_parser: of `epd.answer_parsers`, how answers are read
    enable_auto_tool_choice: whether a model may choose to call a function
    front: the label of this server's metrics; empty where it is the only one at its address
    """

    api_key: str | None = field(default=None, repr=False)
    admin_api_key: str | None = field(default=None, repr=False)
    api_keys_file: Path | None = None
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
    name_files: Callable[[], tuple[PieceFiles, ObjectValues | None]] | None = None
    keep_alive_s: float = 15.0
    allowed_hosts: frozenset[str] | None = None
    trace_dir: Path | None = None
    max_traces: int = 256
    otlp_endpoint: str | None = None
    log_stats_s: float | None = None
    files: FileSettings | None = None
    reasoning_parser: str | None = None
    tool_call_parser: str = "hermes"
    enable_auto_tool_choice: bool = True
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
class ParsedRequest:
    """A checked chat request: its JSON, its conversation, and the media that the messages refer to.

    grammar: that the answer follows, empty for any answer
    """

    chat: ChatRequest
    messages: tuple[ChatMessage, ...]
    references: tuple[MediaReference, ...]
    grammar: str = ""
    client: Client = THIS_PROCESS

    @property
    def namespace(self) -> bytes:
        """Returns the space of the names that the client gives to media."""
        return namespace_of(self.client.space, self.chat.cache_salt or "")


class ChatAnswers:
    """Answers chat requests with a service.

    is_traced: whether spans are wanted though no client asks for them
    """

    is_traced = False

    def __init__(self, service: AnswerService, media: MediaService, settings: ApiSettings) -> None:
        """Starts without requests. media: keeps the media of requests to the service."""
        self.service = service
        self.media = media
        self.settings = settings
        self.formats = FormatChecks()
        kept = None if settings.name_files is None else KeptNames(*settings.name_files())
        self.named_media = NamedMedia(settings.max_named_media, settings.max_named_bytes, kept)
        self._num_of: Counter[str] = Counter()  # requests of each client

    def close(self) -> None:
        self.formats.close()
        self.named_media.close()

    def begun(self, record: RequestRecord) -> None:
        """Notes that the body of a request is not needed any more."""

    async def checked_chat(
        self,
        chat: ChatRequest,
        record: RequestRecord,
        client: Client = THIS_PROCESS,
        num_bytes: int = 0,
    ) -> ParsedRequest:
        """Checks a chat request. num_bytes: of its body. Raises EPDError."""
        model = self.check_chat(chat)
        messages, sent = conversation(chat.messages, no_turns(chat), pixel_limits(chat), heard_part(chat))
        parsed = ParsedRequest(chat, messages, sent, client=client)
        found = await self._found(parsed) if sent else ()
        parsed = replace(parsed, references=tuple(replace(each, client=client.share) for each in found))
        num_bytes += sum(len(each.url) for each, old in zip(found, sent, strict=True) if not old.url)
        if found != sent:
            self.hold(record, num_bytes)
        cost = budget_of(chat, messages, found, num_bytes=num_bytes, context_tokens=model.max_model_len)
        cost.check(self.settings.limits)
        return await self.accepted(parsed, record, model)

    async def _found(self, parsed: ParsedRequest) -> tuple[MediaReference, ...]:
        """Returns the media of a request, those that came as a name found. Raises EPDError."""
        client = parsed.client
        named = await self.named_media.completed(parsed.namespace, parsed.references, client.share)
        return await self.with_files(named, client)

    async def with_files(
        self, references: tuple[MediaReference, ...], _client: Client
    ) -> tuple[MediaReference, ...]:
        """Returns the media with the uploaded files among them checked. Raises EPDError."""
        return references

    def hold(self, record: RequestRecord, num_bytes: int) -> None:
        """Notes that a request holds that many bytes, with those of media that it names. Raises EPDError."""

    def check_chat(self, chat: ChatRequest) -> ModelCard:
        """Checks everything but the amounts of a request. Returns its model. Raises EPDError."""
        check_supported(chat)
        if not self.settings.enable_auto_tool_choice and chooses_calls(chat):
            raise RequestError(
                "received tools with tool_choice auto; allowed: none, required or a function, since this "
                "server runs without enable_auto_tool_choice; set tool_choice"
            )
        return model_named(chat.model, self.service.models)

    async def accepted(self, parsed: ParsedRequest, record: RequestRecord, model: ModelCard) -> ParsedRequest:
        """Returns a checked request with the grammar of its format, and notes it. Raises RequestError."""
        record.model, record.model_revision = model.name, model.revision
        record.is_stream = bool(parsed.chat.stream)
        wanted = answer_format(parsed.chat)
        if wanted is None:
            return parsed
        return replace(parsed, grammar=await self.formats.checked(wanted, parsed.client.share))

    def parsing_of(self, parsed: ParsedRequest) -> AnswerParsing | None:
        """Returns how the answer is read; None if it is content alone.

        An answer that is held to a format has no thoughts, and required calls are written as Hermes has them.
        """
        chat = parsed.chat
        reasoning = None if parsed.grammar else self.settings.reasoning_parser
        if not offers_tools(chat):
            return AnswerParsing(reasoning) if reasoning else None
        calls = "hermes" if parsed.grammar else self.settings.tool_call_parser
        schemas = {tool.function.name: tool.function.parameters or {} for tool in chat.tools or ()}
        return AnswerParsing(reasoning, calls, schemas)

    async def items(
        self, parsed: ParsedRequest, record: RequestRecord
    ) -> AsyncGenerator[Sequence[AnswerItem], None]:
        """Yields the answer; ending or closing it frees all resources of the request. Raises EPDError."""
        request = self.request_of(parsed, record)
        shows_spans = bool(parsed.chat.epd and parsed.chat.epd.events)
        record.num_media = len(parsed.references)
        with self.admitted(parsed.client):
            references = parsed.references
            sources = self.media.sources(record.request_id, references) if references else nullcontext(())
            async with sources as media:
                if media:
                    self.named_media.keep(parsed.namespace, references, parsed.client.share, media)
                del parsed, references  # with whole media as text, and the answer may take minutes
                self.begun(record)
                async with aclosing(self.service.answer(request(media=media))) as answer:
                    async for items in answer:
                        for item in items:
                            record.note(item)
                        yield items if shows_spans else without_spans(items)

    def request_of(self, parsed: ParsedRequest, record: RequestRecord) -> Callable[..., AnswerRequest]:
        """Returns what the service is asked, as a function of `media`, or of the tokens of a `prompt`.

        Raises RequestError for inconsistent options.
        """
        chat, ours = parsed.chat, parsed.chat.epd or EpdOptions()
        patience_s = ours.deadline_s or self.settings.default_deadline_s
        return partial(
            AnswerRequest,
            request_id=record.request_id,
            model=record.model,
            messages=parsed.messages,
            priority=parsed.client.priority if chat.priority is None else chat.priority,
            sampling=replace(sampling_params(chat, self.settings.default_params), grammar=parsed.grammar),
            frame_sampling=video_sampling(chat, parsed.references),
            reduction=reduction_policy(chat, self.settings.default_reduction),
            budget=visual_budget(chat, self.settings.max_visual_tokens),
            retention_min=ours.retention or ours.retention_min,
            arrival_s=record.arrival_s,
            deadline_s=None if patience_s is None else steady_time_s() - record.total_s + patience_s,
            cache_salt=chat.cache_salt or "",
            client=parsed.client.share,
            weight=parsed.client.weight,
            wants_spans=bool(ours.events) or self.is_traced,
            streams=record.is_stream,
        )

    @contextmanager
    def admitted(self, client: Client) -> Iterator[None]:
        """Counts a request of a client while open. Raises OverloadedError for one too many."""
        num_own, most = self._num_of[client.share], self.settings.max_requests
        if not has_place(self.num_requests, num_own, most):
            raise OverloadedError(
                f"{self.num_requests} requests are in flight; allowed {most}; retry later", _RETRY_AFTER_S
            )
        self._num_of[client.share] += 1
        try:
            yield
        finally:
            self._num_of[client.share] -= 1
            self._num_of += Counter()  # forgets clients without requests

    @property
    def num_requests(self) -> int:
        """Returns the number of requests that are being answered."""
        return self._num_of.total()


def without_spans(items: Sequence[AnswerItem]) -> Sequence[AnswerItem]:
    """Returns items without those that are only for traces; most answers have none."""
    return [item for item in items if not isinstance(item, StageSpan)]
