"""An application in virtual time: a board, media workers, stage workers and fronts, each a process."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from epd.control.routing import InFlight
from epd.engine_config import EngineConfig
from epd.errors import UnavailableError
from epd.kv.pass_limits import PassLimits
from epd.serve_app.composition import share_lead
from epd.serve_app.fleet import has_all_roles
from epd.serve_app.media.media_worker import MediaSettings
from epd.serve_app.messages import Message
from epd.serve_app.network.board import Board
from epd.serve_app.network.connector import ProcessConnector
from epd.serve_app.network.media_server import MediaServer
from epd.serve_app.network.members import ProcessAddress, Purpose
from epd.serve_app.network.remote_fleet import RemoteFleet
from epd.serve_app.network.worker_server import WorkerServer, WorkerServerConfig
from epd.serve_app.orchestration.config import OrchestratorConfig
from epd.serve_app.orchestration.orchestrator import Orchestrator
from epd.serve_app.orchestration.request_planner import RequestPlanner
from epd.serve_app.worker.worker_core import WorkerCore
from epd.serve_app.worker.worker_settings import WorkerSettings
from epd.topology import parse_topology
from tests.faults.network import Network
from tests.faults.plan import FaultPlan
from tests.faults.virtual_time import Clock, Process, VirtualLoop, process_now
from tests.faults.workers import SimulatedMedia, SimulatedThread
from tests.serve_app.deployments import num_held
from tests.serve_app.media_fleet import ANY_FILE
from tests.serve_app.network.board_calls import BoardCalls

HANG_S = 10.0  # silence after which the board declares a member lost
_RESTART_S = (0.1, 4.0)
_MAX_START_S = 120.0


class Trace:
    """Hashes what happens, and when: equal for two runs of a seed. is_printed: as it comes."""

    def __init__(self, clock: Clock, *, is_printed: bool = False) -> None:
        self._clock = clock
        self._hash = hashlib.blake2b(digest_size=8)
        self._is_printed = is_printed

    def note(self, *words: object) -> None:
        line = f"{self._clock.elapsed_s:.6f} " + " ".join(map(str, words))
        self._hash.update(line.encode())
        if self._is_printed:
            print(line, flush=True)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()


class _Board(BoardCalls):
    """Reaches the board from any process. One that is killed fails the calls that wait, as an actor does."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._calls: dict[asyncio.Future[Any], Process] = {}

    def fail_calls(self) -> None:
        error = UnavailableError("the board is gone")
        for answer, process in list(self._calls.items()):
            process.context.copy().run(_fail, answer, error)

    async def _call(self, method: str, *arguments: Any) -> Any:
        world = self._world
        source, board = process_now(), world.boards[-1]
        assert source is not None
        if world.board_process.is_dead:
            await asyncio.sleep(0.01)
            raise UnavailableError("the board is gone")
        answer: asyncio.Future[Any] = world.loop.create_future()
        self._calls[answer] = source
        try:
            world.network.call(answer, world.board_process, lambda: getattr(board, method)(*arguments))
            return await answer
        finally:
            del self._calls[answer]


def _fail(answer: asyncio.Future[Any], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)


@dataclass(eq=False)
class Part:
    """A process of the application. server: what runs in it. is_wanted: whether another one replaces it.

    died: set once it is dead
    """

    process: Process
    server: Any = None
    front: Orchestrator | None = None
    is_ready: bool = False
    is_wanted: bool = True
    died: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def name(self) -> str:
        """Returns the name of a worker, or of the process."""
        info = None if self.server is None else self.server.membership._member
        return self.process.name if info is None or info.info is None else str(info.info.name)


class World:
    """Starts, kills and replaces the processes of one application."""

    def __init__(self, loop: VirtualLoop, clock: Clock, plan: FaultPlan, model: Path, trace: Trace) -> None:
        seed = plan.seed
        self.rng = Random(f"{seed} world")
        self.loop, self.clock, self.model, self.trace = loop, clock, model, trace
        self.network = loop.network = Network(loop, seed)
        self.is_deadly: Callable[[Message[Any]], bool] = lambda _message: False
        self.on_turn: Callable[[Part, object], None] = lambda _part, _message: None
        self.on_poisoned: Callable[[Part, object], None] = lambda _part, _message: None
        self.counts: Counter[str] = Counter()
        self.topology = "1epd"
        self.options: dict[str, Any] = {}
        self.parts: list[Part] = []
        self._num_processes: Counter[str] = Counter()
        self.num_deaths = 0  # of workers
        self.harmed: set[str] = set()  # processes that were silent, or cut off, for a while
        self.ended_whole: list[str] = []  # others, that were declared lost
        self._ends_lost = plan.ends_lost
        self.unreadable_until_s: dict[Process, float] = {}  # for which others' pools are not readable
        self.board_process = Process(loop, "board", "m0")
        self.boards = [self.board_process.context.copy().run(lambda: Board(hang_s=HANG_S))]
        self._board = _Board(self)
        self._settings = WorkerSettings(
            model,
            EngineConfig(num_kv_tokens=plan.num_kv_tokens, draft="none"),
            num_embeddings=2048,
            max_batch_patches=512,
            scheduler=PassLimits(max_chunk_tokens=64),
        )
        self._media = MediaSettings(model, ANY_FILE, num_read_threads=1)
        self._supervisors: list[asyncio.Task[None]] = []

    # Processes

    async def start(self, topology: str, num_fronts: int, num_media: int, **options: Any) -> None:
        """Starts the application. options: of OrchestratorConfig."""
        self.topology, self.options = topology, options
        num_stages = parse_topology(topology).num_workers
        kinds = ["stage"] * num_stages + ["media"] * num_media + ["front"] * num_fronts
        for number, kind in enumerate(kinds):
            self.add(kind, f"m{number % 3}")
        end_s = self.loop.time() + _MAX_START_S
        while not self.is_whole:
            assert self.loop.time() < end_s, "it has not started"
            await asyncio.sleep(0.05)

    def add(self, kind: str, machine: str) -> Part:
        """Starts one more process."""
        self._num_processes[kind] += 1
        part = Part(Process(self.loop, f"{kind}{self._num_processes[kind]}", machine))
        self.parts.append(part)
        part.process.spawn(self._run(kind, part))
        return part

    async def _run(self, kind: str, part: Part) -> None:
        place = ProcessAddress(part.process.name, part.process.machine)
        purpose = Purpose(topology=self.topology, hang_s=HANG_S)
        if kind == "front":
            await self._run_front(part, RemoteFleet(self._board, place, purpose))
            return
        if kind == "stage":
            part.server = WorkerServer(self._board, place, WorkerServerConfig(self._settings, purpose))
        else:
            rng = Random(f"{self.network.seed} {part.process.name}")
            host = SimulatedMedia(self._media, rng, self.kills_process)
            part.server = MediaServer(self._board, place, host, purpose)
        part.server.membership.on_ended = lambda reason: self._end_lost(part, reason)
        await part.server.start()
        part.is_ready = True
        self.trace.note("ready", part.process.name, part.name)

    async def _run_front(self, part: Part, fleet: RemoteFleet) -> None:
        part.server = fleet
        fleet.membership.on_ended = lambda reason: self._end_lost(part, reason)
        planner = RequestPlanner(self.model, "tiny", group_tokens=16)
        part.front = Orchestrator(fleet, planner, OrchestratorConfig(**self.options), owner=fleet.owner)
        await part.front.start()
        share_lead(part.front, fleet)
        part.is_ready = True

    def kills_process(self, message: Message[Any]) -> bool:
        """Ends the process that runs now if a message is deadly. Returns whether it is."""
        process = process_now()
        if process is None or process.is_dead or not self.is_deadly(message):
            return False
        part = self._part_now()
        self.counts["poisoned workers"] += 1
        self.on_poisoned(part, message)
        self._end_soon(part, f"{type(message).__name__} is poison")
        return True

    def _part_now(self) -> Part:
        return next(each for each in self.parts if each.process is process_now())

    def turned(self, message: object) -> None:
        """Notes a message that was handled, or an event that is reported, by the process that runs now."""
        process = process_now()
        if process is not None and not process.is_dead:
            part = self._part_now()
            self.trace.note(part.process.name, type(message).__name__, id_of(message))
            self.on_turn(part, message)

    def later(self, after_s: float, work: Callable[..., object], *arguments: object) -> None:
        """Does something to the world a little later, called from any process."""
        self.loop.call_later(after_s, work, *arguments, context=contextvars.Context())

    def _end_lost(self, part: Part, reason: str) -> None:
        """Ends a process that was declared lost."""
        if part.process.name not in self.harmed:
            self.ended_whole.append(part.name)
        self._end_soon(part, reason)

    def end_beside(self, pid: int, _ticks: int) -> None:
        """Ends a lost process for a member of its machine."""
        for part in [each for each in self.parts if each.process.pid == pid and self._ends_lost]:
            self.counts["ended from beside"] += 1
            self._end_lost(part, "it is lost, and another process has ended it")

    def _end_soon(self, part: Part, reason: str) -> None:
        """Ends a process that runs now, after its callback."""
        self.later(0.0, self.kill, part, reason)

    def kill(self, part: Part, reason: str, *, with_machine: bool = False) -> None:
        """Ends a process as SIGKILL does. with_machine: with its machine, which says nothing any more."""
        if part.process.is_dead:
            return
        self.trace.note("end", part.process.name, part.name, reason)
        part.process.is_dead = True
        self.network.lose(part.process, with_machine=with_machine)
        self.parts.remove(part)
        self.num_deaths += part.front is None
        self._free(part)
        part.died.set()
        if part.is_wanted:
            kind = part.process.name.rstrip("0123456789")
            self.loop.call_later(self.rng.uniform(*_RESTART_S), self.add, kind, part.process.machine)

    def _free(self, part: Part) -> None:
        """Frees what the kernel, or the end of the simulation, would free."""
        if isinstance(part.server, WorkerServer):
            if part.server._thread is not None and part.server._thread.core is not None:
                part.server._thread.core.close()
            if part.server._files is not None:
                part.server._files.release()
        elif isinstance(part.server, MediaServer):
            part.server._host.close()

    def kill_board(self) -> None:
        """Ends the board; another one takes its place after a while."""
        if self.board_process.is_dead:
            return
        self.trace.note("end board")
        self.board_process.is_dead = True
        self.network.lose(self.board_process, with_machine=False)
        self._board.fail_calls()
        self.loop.call_later(self.rng.uniform(0.5, 3.0), self._restart_board)

    def _restart_board(self) -> None:
        self.board_process = Process(self.loop, "board", "m0")
        self.board_process.rng.seed(f"{self.network.seed} board {self.board_process.pid}")
        context = self.board_process.context.copy()
        self.boards.append(context.run(lambda: Board(hang_s=HANG_S, is_restarted=True)))

    # State

    @property
    def fronts(self) -> list[Part]:
        return [part for part in self.parts if part.front is not None and part.is_ready]

    def workers(self, kind: type[Any] = WorkerServer) -> list[Part]:
        return [part for part in self.parts if isinstance(part.server, kind) and part.is_ready]

    @property
    def num_lost(self) -> int:
        """Counts the workers that have died, are silent, or were and continue after their loss."""
        living = [part for part in self.parts if part.front is None]
        return self.num_deaths + sum(map(self._is_lost, living))

    def _is_lost(self, part: Part) -> bool:
        """Returns whether a living worker is silent, or a board has declared it lost.

        It hears of that late where the board ends, and ends then.
        """
        if part.process.is_frozen or part.process.name not in self.harmed:
            return part.process.is_frozen
        return any(part.server.membership.epoch in board._ended for board in self.boards)

    @property
    def is_whole(self) -> bool:
        """Returns whether every process is there and every front reaches every worker."""
        fronts = self.fronts
        if not all(part.is_ready and not part.process.is_frozen for part in self.parts):
            return False
        servers = [*self.workers(), *self.workers(MediaServer)]
        names = {part.name: part.server.membership.info.incarnation for part in servers}
        seen = [
            {info.name: info.incarnation for info in part.server.workers.values() if info.is_alive}
            for part in fronts
        ]
        return bool(fronts) and all(each == names for each in seen)

    def cores(self) -> list[WorkerCore]:
        found = [part.server._thread.core for part in self.workers()]
        return [core for core in found if core is not None]

    async def collect(self) -> None:
        """Frees what only the collector finds, as it does now and then, at a time that the seed decides."""
        gc.collect()
        await asyncio.sleep(0.1)

    def leftovers(self) -> list[str]:
        """Returns what is left of any request anywhere."""
        left = [] if self.is_whole else ["it is not whole"]
        for core in self.cores():
            if core.has_work():
                left += [f"{core.name} has work: {[role.remaining() for role in core.hosted.values()]}"]
            if any(role.load().kv_usage for role in core.hosted.values()):
                left += [f"{core.name} uses keys and values"]
            left += [f"{core.name} holds embeddings"] if num_held(core) else []
        for part in self.workers(MediaServer):
            worker = part.server._host.worker
            held = (worker.num_holds, worker.num_streams, worker.num_pixel_bytes, len(part.server._kept))
            left += [f"{part.name} has {held}"] if any(held) else []
        for part in self.fronts:
            left += self._left_at_front(part)
        infos = [info for part in self.fronts[:1] for info in part.server.workers.values() if info.is_alive]
        left += [f"{info.name} gives up {sorted(info.leaving)}" for info in infos if info.leaving]
        return left if has_all_roles(infos) else [*left, "a stage has no worker"]

    def _left_at_front(self, part: Part) -> list[str]:
        front, name = part.front, part.process.name
        assert front is not None
        left = [f"{name} has attempts"] if front.num_attempts else []
        left += [f"{name} has tickets"] if front.num_tickets else []
        left += [f"{name} has media"] if front.media.num_held else []
        left += [f"{name} has readers"] if any(front.media.reading.values()) else []
        left += [f"{name} looks for room"] if front.requests.redirecting else []
        counts = {worker: front.router.in_flight(worker) for worker in part.server.workers}
        return left + [
            f"{name} counts {has} at {worker}" for worker, has in counts.items() if has != InFlight()
        ]


def simulated_thread(world: World) -> type[SimulatedThread]:
    """Returns the threads of a world's workers."""

    class Thread(SimulatedThread):
        rng = Random(f"{world.network.seed} threads")
        is_deadly = staticmethod(world.kills_process)
        on_turn = staticmethod(world.turned)

    return Thread


def simulated_pool_of(world: World) -> Callable[[ProcessConnector, Any], Any]:
    """Returns what finds the pools that others offer from: none while a process cannot read them."""
    found = ProcessConnector.pool_of

    def pool_of(connector: ProcessConnector, offer: Any) -> Any:
        process = process_now()
        is_read = process is None or world.loop.time() >= world.unreadable_until_s.get(process, 0.0)
        return found(connector, offer) if is_read else None

    return pool_of


def id_of(message: Any) -> str:
    """Returns the id of the attempt that a message is about, or of the first of several; else ""."""
    request_ids = getattr(message, "request_ids", None) or ("",)
    request = getattr(message, "request", None)
    return str(
        getattr(message, "request_id", "")
        or getattr(request, "request_id", "")
        or getattr(message, "stream_id", "")
        or request_ids[0]
    )
