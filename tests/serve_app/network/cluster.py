"""An application of fronts and workers in one process, which talk over real links, without Ray."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from epd.engine_config import EngineConfig
from epd.errors import UnavailableError
from epd.kv.pass_limits import PassLimits
from epd.serve_app.composition import share_lead
from epd.serve_app.media.media_worker import MediaSettings, MediaWorker
from epd.serve_app.network.board import Board
from epd.serve_app.network.connector import TransportConfig
from epd.serve_app.network.media_server import MediaServer
from epd.serve_app.network.members import Kind, ProcessAddress, Purpose
from epd.serve_app.network.remote_fleet import RemoteFleet
from epd.serve_app.network.worker_server import WorkerServer, WorkerServerConfig
from epd.serve_app.orchestration.orchestrator import Orchestrator
from epd.serve_app.orchestration.request_planner import RequestPlanner
from epd.serve_app.worker.worker_core import WorkerCore
from epd.serve_app.worker.worker_settings import WorkerSettings
from epd.topology import parse_topology
from tests.engine_options import parted
from tests.serve_app.deployments import ANY_FILE, NEVER_S, Answered, Question, patient, reference_to
from tests.serve_app.network.board_calls import BoardCalls

HOST = "127.0.0.1"
HANG_S = 600.0
_numbers = itertools.count()


class BoardHere(BoardCalls):
    """A board of this process that can be restarted. Calls that wait when it ends fail, as an actor's do.

    Whoever is lost is noticed by its link: a busy machine may be silent for long.
    """

    def __init__(self) -> None:
        self.board: Board | None = Board(hang_s=HANG_S)
        self._calls: set[asyncio.Task[Any]] = set()
        self.unreachable: Kind | None = None  # for members of this kind

    async def stop(self) -> None:
        board, self.board = self.board, None
        for call in self._calls:
            call.cancel()
        if board is not None:
            await board.close()

    def restart(self, *, is_new: bool = False) -> asyncio.Event:
        """is_new: another one in its place, which is not said to be restarted.

        Returns an event that ends the time in which it waits for members: after all of them have called.
        """
        self.board, is_over = Board(hang_s=HANG_S, is_restarted=not is_new), asyncio.Event()
        hold_regrouping(self.board, is_over)
        return is_over

    def knows(self, epoch: str) -> bool:
        return self.board is not None and epoch in self.board._entries

    async def hears_no_more_of(self, epoch: str) -> None:
        """Lets a member whose calls have ended be silent for long, and nobody else."""
        await asyncio.gather(*self._calls, return_exceptions=True)
        assert self.board is not None
        self.board._regrouped_s -= 2 * HANG_S
        self.board._entries[epoch].heard_s -= HANG_S + 1.0

    async def _call(self, method: str, *arguments: Any) -> Any:
        is_refused = method == "follow" and arguments[0].kind == self.unreachable
        if self.board is None or is_refused:
            raise UnavailableError("the board is gone")
        call = asyncio.ensure_future(getattr(self.board, method)(*arguments))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return await self._answer(call)


def hold_regrouping(board: Board, is_over: asyncio.Event) -> None:
    """Lets a board regroup until an event is set: a time might be over before all members have called."""

    async def regroup() -> None:
        if board._has_former and not is_over.is_set():
            board._regrouped_s = time.monotonic() + NEVER_S
            await is_over.wait()
            board._regrouped_s = min(board._regrouped_s, time.monotonic())

    board._regrouped_s = time.monotonic() + NEVER_S
    board._regroup = regroup  # type: ignore[method-assign]


class Front:
    """A front: its fleet and its orchestrator."""

    def __init__(self, cluster: Cluster, node_id: str = "here", **options: Any) -> None:
        self.fleet = RemoteFleet(
            cluster.board, ProcessAddress(HOST, node_id), Purpose(topology=cluster.topology)
        )
        self.ended: list[str] = []
        self.fleet.membership.on_ended = self.ended.append
        planner = RequestPlanner(cluster.model, "tiny", group_tokens=16)
        self.service = Orchestrator(self.fleet, planner, patient(options), owner=self.fleet.owner)

    async def ask(self, question: Question, **options: Any) -> Answered:
        answered = Answered()
        references = tuple(map(reference_to, question.media))
        async with (
            self.service.media.sources(f"m{next(_numbers)}", references) as sources,
            aclosing(self.service.answer(question.request(sources, **options))) as answer,
        ):
            async for items in answer:
                answered.take_all(items)
        return answered

    async def ask_all(self, questions: Sequence[Question]) -> list[Answered]:
        return list(await asyncio.gather(*(self.ask(question) for question in questions)))

    async def kill(self) -> None:
        """Ends the front as a killed process does: its links end, and it tells nobody."""
        fleet = self.fleet
        fleet._is_closed = fleet._links.is_closed = fleet.fronts.is_closed = True
        await fleet._loops.close()
        for worker in fleet._links._workers.values():
            if worker.channel is not None:
                worker.channel.close()
        assert fleet.membership._listener is not None
        await fleet.membership._listener.close()


class Cluster:
    """Workers and fronts around one board."""

    def __init__(self, model: Path, topology: str, **settings: Any) -> None:
        self.model = model
        self.topology = topology
        self.board = BoardHere()
        defaults = WorkerSettings(
            model,
            EngineConfig(num_kv_tokens=8192),
            num_embeddings=4096,
            max_batch_patches=512,
            scheduler=PassLimits(max_chunk_tokens=64),
        )
        engine, others = parted(settings, defaults.engine)
        self.settings = replace(defaults, engine=engine, **others)
        self.transport = TransportConfig()
        self.stages: list[WorkerServer] = []
        self.media: list[MediaServer] = []
        self.fronts: list[Front] = []
        self.ended: list[str] = []

    async def start(self, num_fronts: int = 1, num_media: int = 1) -> None:
        num_stages = parse_topology(self.topology).num_workers
        for _ in range(num_stages):
            await self.add_stage()
        for _ in range(num_media):
            await self.add_media()
        for _ in range(num_fronts):
            await self.add_front()

    async def add_stage(self, node_id: str = "here", release: str = "") -> WorkerServer:
        purpose = Purpose(topology=self.topology, release=release)
        config = WorkerServerConfig(self.settings, purpose, transport=self.transport)
        server = WorkerServer(self.board, ProcessAddress(HOST, node_id), config)
        server.membership.on_ended = self.ended.append
        await server.start()
        self.stages.append(server)
        return server

    async def add_media(self, node_id: str = "here") -> MediaServer:
        server = MediaServer(
            self.board, ProcessAddress(HOST, node_id), MediaWorker(MediaSettings(self.model, ANY_FILE))
        )
        await server.start()
        self.media.append(server)
        return server

    async def add_front(self, **options: Any) -> Front:
        front = Front(self, **options)
        await front.service.start()
        share_lead(front.service, front.fleet)
        self.fronts.append(front)
        return front

    async def close(self) -> None:
        for front in self.fronts:
            await front.service.close()
        for server in (*self.stages, *self.media):
            await server.close()
        await self.board.stop()

    def worker(self, name: str) -> WorkerServer:
        return next(each for each in self.stages if each.is_healthy and each.info.name == name)

    def core(self, server: WorkerServer) -> WorkerCore:
        assert server._thread is not None
        assert server._thread.core is not None
        return server._thread.core

    async def kill(self, server: WorkerServer) -> None:
        """Ends a worker as a killed process does. Returns when the board knows, if there is one."""
        server.is_healthy = False
        server.membership._has_left = True
        await server._loops.close()
        assert server._thread is not None
        server._thread.stop()
        for session in server._fronts.values():
            session.channel.close()
        assert server.membership._listener is not None
        await server.membership._listener.close()
        assert server._channels is not None
        server._channels.close()
        await self._until_lost(server.membership.epoch)

    async def kill_media(self, server: MediaServer) -> None:
        """Ends a media worker as a killed process does. Returns when the board knows."""
        server.is_healthy = False
        server.membership._has_left = True
        await server._loops.close()
        for channel in server._fronts.values():
            channel.close()
        assert server.membership._listener is not None
        await server.membership._listener.close()
        await self._until_lost(server.membership.epoch)

    async def _until_lost(self, epoch: str) -> None:
        """Whoever comes before that gets another place."""
        while self.board.knows(epoch):
            await asyncio.sleep(0.001)

    async def silence(self, server: WorkerServer) -> None:
        """Lets a worker hang, as far as the board knows: it calls no more, but its links are open."""
        await server._loops.close()
        await self.board.hears_no_more_of(server.membership.epoch)


@asynccontextmanager
async def clustered(
    model: Path, topology: str, *, num_fronts: int = 1, num_media: int = 1, **options: Any
) -> AsyncIterator[Cluster]:
    cluster = Cluster(model, topology, **options)
    try:
        await cluster.start(num_fronts, num_media)
        yield cluster
    finally:
        await cluster.close()
