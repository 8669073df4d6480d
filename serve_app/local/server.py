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
from pathlib import Path

import torch
from fastapi import FastAPI

from epd.colour import parse_colour
from epd.serve_app.app_args import AppArgs
from epd.serve_app.composition import create_app, media_settings
from epd.serve_app.held_folder import FILES_PREFIX, HeldFolder, remove_abandoned
from epd.serve_app.http.address import HttpAddress
from epd.serve_app.http.http_server import HttpServer
from epd.serve_app.local.own_service import create_fleet, devices_of
from epd.serve_app.media.media_processes import MediaProcesses
from epd.serve_app.observability.logs import operation
from epd.video.children.walls import hide_process

logger = logging.getLogger(__name__)

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
    devices_of(args)  # what is refused is so before anything is started
    torch.set_num_threads(args.threads_per_worker)
    started: Future[_Server] = Future()
    operation.info("loading the model into %d workers of this process", args.num_stage_workers)
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
    hide_process()  # it holds the keys, and its children read media
    background = parse_colour(args.image_background)
    with closing(
        MediaProcesses(
            background=background, requires_walls=args.require_media_sandbox, device=args.video_device
        )
    ) as processes:
        app = await create_app(args, create_fleet(args, media_settings(args), processes))
        async with app.router.lifespan_context(app):
            await _Server(app, args.drain_s, prefix, started).serve([listener])


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
