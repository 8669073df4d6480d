"""Runs the service in this process for callers in it, without HTTP: workers as threads.

caller's thread   body of a chat request ──> events, or a completion
thread "service"  event loop: checks, orchestrator ──> workers, each a thread
"""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from pydantic import ValidationError

from epd.batch.media_names import local_path
from epd.client.endpoint import Endpoint
from epd.errors import CancelledError, InternalError, RequestError
from epd.sampling_params import SamplingParams
from epd.serve_app.app_args import AppArgs
from epd.serve_app.http.answers.responses import ChunkBuilder, CompletionBuilder
from epd.serve_app.http.chat_answers import ChatAnswers, ParsedRequest
from epd.serve_app.http.requests.chat_request import ChatRequest
from epd.serve_app.http.requests.request_parsing import describe
from epd.serve_app.local.fleet import LocalFleet, LocalFleetConfig
from epd.serve_app.media.media_processes import MediaProcesses
from epd.serve_app.media.media_worker import MediaSettings
from epd.serve_app.observability.record import RequestRecord
from epd.serve_app.orchestration.orchestrator import Orchestrator
from epd.serve_app.service import MediaReference
from epd.serve_app.service_composition import create_service, media_settings, worker_settings
from epd.serve_app.service_status import ServiceStatus
from epd.worker_classes import REST

if TYPE_CHECKING:  # it brings the simulator
    from epd.serve_app.local.pacing import Pace

JSON = dict[str, Any]
# Where callers in this process ask, in place of a server.
HERE = Endpoint("this process", "http://localhost")
_T = TypeVar("_T")

# The steps of a thread are its only heartbeat, and one step of a large model can take long.
_MAX_STEP_S = 120.0
_ANY_BYTES = 1 << 62  # of a medium of the caller's
_JOIN_S = 30.0


class OwnService:
    """Answers chat requests in this process. May be used from any thread while it is open."""

    def __init__(self, answers: ChatAnswers, loop: asyncio.AbstractEventLoop) -> None:
        """Takes what answers, and the event loop that it runs in."""
        self._answers = answers
        self._loop = loop

    @property
    def model(self) -> str:
        """Returns the model that is asked unless a request names one: an adapter, where one is served."""
        first, *adapters = self._answers.service.models
        return adapters[0].name if len(adapters) == 1 else first.name

    @property
    def status(self) -> ServiceStatus:
        return asyncio.run_coroutine_threadsafe(self._answers.service.status(), self._loop).result()

    def counters(self) -> Mapping[str, float]:
        """Returns what the workers have counted, see `SERVICE_COUNTERS`."""
        return self.status.counters

    async def completion(self, body: JSON) -> JSON:
        """Returns the completion of a chat request, from any event loop. Raises EPDError."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._complete(body), self._loop))

    def events(self, body: JSON) -> Iterator[JSON]:
        """Yields the chunks of a chat request's answer; closing it ends the request. Raises EPDError."""
        chunks: queue.SimpleQueue[JSON | BaseException | None] = queue.SimpleQueue()
        work = asyncio.run_coroutine_threadsafe(self._stream(body, chunks), self._loop)
        try:
            while (chunk := chunks.get()) is not None:
                if isinstance(chunk, BaseException):
                    raise chunk
                yield chunk
        finally:
            work.cancel()

    async def _complete(self, body: JSON) -> JSON:
        record = RequestRecord(is_answer=True)
        parsed = await self._parsed(body, record)
        builder = CompletionBuilder(record, parsed.chat.n or 1, **_form(self._answers, parsed))
        async with aclosing(self._answers.items(parsed, record)) as answer:
            async for items in answer:
                for item in items:
                    builder.add(item)
        return builder.build().model_dump(mode="json")

    async def chunks(self, body: JSON, take: Callable[[JSON], None]) -> None:
        """Gives the chunks of a chat request's answer to `take`, in the service's thread. Raises EPDError."""
        work = asyncio.run_coroutine_threadsafe(self._taken(body, take), self._loop)
        await asyncio.wrap_future(work)

    async def _stream(self, body: JSON, chunks: queue.SimpleQueue[JSON | BaseException | None]) -> None:
        """Puts all chunks, and None or an error in the end."""
        try:
            await self._taken(body, chunks.put)
            chunks.put(None)
        except Exception as error:  # noqa: BLE001 - raised where the chunks are read
            chunks.put(InternalError.of(error))

    async def _taken(self, body: JSON, take: Callable[[JSON], None]) -> None:
        record = RequestRecord(is_answer=True)
        parsed = await self._parsed(body, record)
        record.is_stream = True  # whatever the body says
        form = _form(self._answers, parsed)
        builder = ChunkBuilder(record, parsed.chat.n or 1, includes_usage=True, **form)
        async with aclosing(self._answers.items(parsed, record)) as answer:
            async for items in answer:
                for item in items:
                    for chunk in builder.chunks(item):
                        take(chunk.model_dump(mode="json", exclude_unset=True))
        for chunk in builder.last_chunks():
            take(chunk.model_dump(mode="json", exclude_unset=True))

    async def _parsed(self, body: JSON, record: RequestRecord) -> ParsedRequest:
        try:
            chat = ChatRequest.model_validate_json(json.dumps(body))
        except ValidationError as error:
            raise describe(error) from None
        parsed = await self._answers.checked_chat(chat, record)
        return replace(parsed, references=tuple(map(_named, parsed.references)))


def _named(reference: MediaReference) -> MediaReference:
    """Returns a medium that errors name by its file, if it is one."""
    path = local_path(reference.url)
    return reference if path is None else replace(reference, label=f"'{path}'")


def _form(answers: ChatAnswers, parsed: ParsedRequest) -> dict[str, Any]:
    return {"has_logprobs": bool(parsed.chat.logprobs), "parsing": answers.parsing_of(parsed)}


@contextmanager
def own_service(args: AppArgs, *, is_greedy: bool, pace: Pace | None = None) -> Iterator[OwnService]:
    """Answers requests of this process while open; at the end, those in flight are ended.

    is_greedy: whether requests without a temperature are, instead of as the checkpoint has it
    pace: of workers that last as long as on other devices
    Media may be of any size, and threads of this process read them.
    Raises EPDError for arguments that cannot be served.
    """
    args = args.resolved()
    torch.set_num_threads(args.threads_per_worker)
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(_report)
    thread = threading.Thread(target=loop.run_forever, name="service", daemon=True)
    thread.start()
    try:
        service, answers = _wait(started(args, is_greedy=is_greedy, pace=pace), loop)
        try:
            yield OwnService(answers, loop)
        finally:
            answers.close()
            _wait(_closed(service), loop)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_JOIN_S)
        loop.close()


def _wait(work: Coroutine[Any, Any, _T], loop: asyncio.AbstractEventLoop) -> _T:
    return asyncio.run_coroutine_threadsafe(work, loop).result()


async def started(args: AppArgs, *, is_greedy: bool, pace: Pace | None) -> tuple[Orchestrator, ChatAnswers]:
    """Starts the service in the loop that runs. args: resolved; the rest as for `own_service`."""
    media = media_settings(args)
    fetch = replace(media.fetch, max_bytes=_ANY_BYTES, trusts_urls=True)
    media = replace(media, fetch=fetch, opens_early=False)
    fleet = create_fleet(args, media, pace=pace)
    service, settings = create_service(args, fleet, controller=pace.controller if pace else None)
    await service.start()
    if is_greedy:
        penalty = settings.default_params.repetition_penalty
        settings = replace(settings, default_params=SamplingParams(repetition_penalty=penalty))
    # No name is kept from one request to another.
    settings = replace(settings, max_named_media=0, name_files=None)
    return service, ChatAnswers(service, service.media, settings)


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Reports errors that nobody awaits, but for those of work that was stopped."""
    if not isinstance(context.get("exception"), CancelledError):
        loop.default_exception_handler(context)


async def _closed(service: Orchestrator) -> None:
    """Ends the service, and whatever still runs in its loop."""
    await service.close()
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_default_executor()


def create_fleet(
    args: AppArgs,
    media: MediaSettings,
    processes: MediaProcesses | None = None,
    pace: Pace | None = None,
) -> LocalFleet:
    """Returns the workers of a topology as threads. processes: that read media, None for threads as well."""
    devices, given = devices_of(args), args
    if args.worker_classes:
        args = given.on_devices(lambda name: _found_device(given.of_class(name).device))
        args.check_classes()
    own = {name: worker_settings(args, each, devices.get(name)) for name, each in args.classes.items()}
    counted = Counter(each.placement().device for each in own.values())
    own = {
        name: replace(
            settings,
            num_sharing=counted[settings.placement().device],
            samples_load=args.elastic or bool(args.worker_classes),
            pace=pace,
        )
        for name, settings in own.items()
    }
    config = LocalFleetConfig(
        args.workers,
        hang_s=max(args.hang_s, _MAX_STEP_S),
        own=own,
        media=media,
        processes=processes,
    )
    return LocalFleet(config, worker_settings(args))


def _found_device(name: str) -> str:
    """Returns what `auto` means on this machine, and other names as they are."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def devices_of(args: AppArgs) -> dict[str, str]:
    """Returns the first GPU of each worker where language models are shared: then no two have one GPU.

    Raises RequestError for more than there are.
    """
    placement = worker_settings(args).placement()
    if args.max_ranks == 1 or not placement.is_cuda:
        return {}
    devices: dict[str, str] = {}
    first = index = placement.device.index or 0
    for name, roles in args.workers.items():
        worker_class = args.worker_classes.get(args.classes.get(name, REST))
        if "video" not in roles and (worker_class is None or worker_class.device is None):
            devices[name] = f"cuda:{index}"
            index += args.num_ranks(roles)
    num_gpus = torch.cuda.device_count() - first
    if index - first > num_gpus:
        raise RequestError(
            f"received the topology {args.topology} with up to {args.max_ranks} processes for a language "
            f"model, which needs {index - first} GPUs; allowed: {num_gpus}, those from cuda:{first} on that "
            "this process sees; set a smaller tensor_parallel_size or topology"
        )
    return devices
