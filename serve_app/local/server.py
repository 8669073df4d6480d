"""Serves the application in this process, without Ray: workers as threads, HTTP by uvicorn."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch
from fastapi import FastAPI

from epd.colour import parse_colour
from epd.errors import RequestError
from epd.serve_app.app_args import AppArgs
from epd.serve_app.composition import create_app, log_requests, media_settings, worker_settings
from epd.serve_app.held_folder import FILES_PREFIX, HeldFolder, remove_abandoned
from epd.serve_app.http.address import HttpAddress
from epd.serve_app.http.http_server import HttpServer
from epd.serve_app.local.fleet import LocalFleet, LocalFleetConfig
from epd.serve_app.media.media_processes import MediaProcesses

__all__ = ["log_requests", "served_locally", "with_files"]

logger = logging.getLogger(__name__)

# The steps of a thread are its only heartbeat, and one step of a large model can take long.
_MAX_STEP_S = 120.0
_CLOSE_S, _ABORT_S = 30.0, 5.0  # for the workers to end: after the requests, or during them


@contextmanager
def with_files(args: AppArgs) -> Iterator[AppArgs]:
    """Yields the arguments with a folder for files of clients; one that they did not name ends here."""
    if args.files_dir is not None:
        yield args
        return
    parent = Path(tempfile.gettempdir())
    remove_abandoned(parent, FILES_PREFIX)
    folder = HeldFolder(parent / f"{FILES_PREFIX}{secrets.token_hex(8)}")
    try:
        yield args.model_copy(update={"files_dir": folder.path})
    finally:
        folder.remove()


@contextmanager
def served_locally(args: AppArgs, address: HttpAddress) -> Iterator[None]:
    """Answers requests while open; at the end, requests in flight have `drain_s` to complete.

    An exception in the block, or a KeyboardInterrupt while draining, stops at once.
    Raises EPDError for arguments that cannot be served.
    """
    args = args.resolved()
    _devices(args)  # what is refused is so before anything is started
    torch.set_num_threads(args.threads_per_worker)
    started: Future[_Server] = Future()
    with address.listen() as listener:
        thread = threading.Thread(
            target=_run, args=(args, listener, address.prefix, started), name="http", daemon=True
        )
        thread.start()
        server = started.result()
        try:
            yield
            server.should_exit = True
            thread.join(args.drain_s + _CLOSE_S)
        finally:
            server.abort()
            thread.join(_ABORT_S)


def _run(args: AppArgs, listener: socket.socket, prefix: str, started: Future[_Server]) -> None:
    """Runs the application's thread. started: gets the server, or the error that prevented its start."""
    try:
        asyncio.run(_serve(args, listener, prefix, started))
    except asyncio.CancelledError:
        logger.warning("stopped before all requests were answered")
    except BaseException as error:
        if started.done():
            raise
        started.set_exception(error)


async def _serve(args: AppArgs, listener: socket.socket, prefix: str, started: Future[_Server]) -> None:
    with closing(MediaProcesses(background=parse_colour(args.image_background))) as processes:
        devices = _devices(args)
        config = LocalFleetConfig(
            args.workers,
            hang_s=max(args.hang_s, _MAX_STEP_S),
            devices=devices,
            media=media_settings(args),
            processes=processes,
        )
        num_sharing = 1 if devices else args.num_stage_workers
        settings = replace(worker_settings(args), num_sharing=num_sharing, samples_load=args.elastic)
        app = await create_app(args, LocalFleet(config, settings))
        async with app.router.lifespan_context(app):
            await _Server(app, args.drain_s, prefix, started).serve([listener])


def _devices(args: AppArgs) -> dict[str, str]:
    """Returns the first GPU of each worker where language models are shared: then no two have one GPU.

    Raises RequestError for more than there are.
    """
    placement = worker_settings(args).placement()
    if args.max_ranks == 1 or not placement.is_cuda:
        return {}
    devices: dict[str, str] = {}
    first = index = placement.device.index or 0
    for name, roles in args.workers.items():
        if "video" not in roles:
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


class _Server(HttpServer):
    """Is stopped by other threads. started: gets the server when it listens."""

    def __init__(self, app: FastAPI, drain_s: float, prefix: str, started: Future[_Server]) -> None:
        super().__init__(app, drain_s, prefix)
        self._started = started
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._started.set_result(self)

    def abort(self) -> None:
        """Ends the server without waiting for requests. For other threads."""
        assert self._task is not None
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._task.cancel)
