"""Starts the other ranks of a worker, tells them its steps, and ends them; `Follower` is another rank.

rank 0      pools | pass | offload | pass | ...        steps, over a socket of the two
a follower  loads its part, says so, and carries out each step in order; replies to the few that ask

start     rank 1 ... load their parts while rank 0 loads its own
tell      a step goes to all of them at once, and rank 0 computes its part
a loss    exchanges end, every rank is ended, and whoever asks gets RankLostError
the end   the others are killed; if rank 0 was, they end with their connections to it
"""

from __future__ import annotations

import logging
import os
import queue
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from epd.encoders import Embeddings
from epd.encoders.names import WeightSet
from epd.errors import EPDError, RankLostError, RequestError, UnsupportedModelError
from epd.stages.decoder.rank_cut import cut_model
from epd.stages.engine.block_moves import PoolMoves
from epd.stages.engine.kv_pool import KVPoolsShape
from epd.stages.engine.model_runner import ModelRunner
from epd.stages.engine.packed_pass import PackedPass
from epd.stages.engine.setup import ServeAdapters
from epd.stages.loading.weight_files import TensorPart
from epd.stages.loading.weights import load_role
from epd.stages.placement import Placement
from epd.stages.rank import Rank
from epd.stages.ranks.communicator import EXCHANGE_S, Communicator, EngineStep
from epd.stages.ranks.shared_pools import (
    Fence,
    PoolPlace,
    ReceiveTokens,
    SharedPools,
    SharePools,
    meet,
    receive_together,
)

logger = logging.getLogger(__name__)
_BOOT = "import sys; sys.path[:] = {path!r}; from epd.stages.ranks.group import main; main({descriptor})"
# Whoever has it may run code in a cluster of Ray, which no other rank needs.
_TOKEN = "RAY_AUTH_TOKEN"
# A part of the weights may be as large as a GPU, and come from a slow disk.
_START_S = 1800.0


class _Follower:
    """Holds rank 0's end of another rank."""

    def __init__(self, settings: FollowerSettings) -> None:
        ours, theirs = socket.socketpair()
        path = [os.path.abspath(each) for each in sys.path if each]
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BOOT.format(path=path, descriptor=theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={name: value for name, value in os.environ.items() if name != _TOKEN},
                start_new_session=True,
            )
        self.connection = Connection(ours.detach())
        self.rank = settings.rank
        self.connection.send(settings)


class ProcessRanks:
    """Holds rank 0 of processes that share a language model. For one thread; `close` is for any."""

    def __init__(
        self,
        model_path: Path,
        placement: Placement,
        size: int,
        *,
        num_threads: int = 1,
    ) -> None:
        """Starts the other ranks, which begin to load; `connect` waits for them.

        placement: of rank 0; on GPUs, the others have those after it.
        num_threads: of torch, for each of them.
        Raises RequestError for more ranks than there are GPUs.
        """
        self.rank = Rank(0, size)
        self.weight_bytes: tuple[int, ...] = ()
        self._placement = placement
        placements = [_placement(placement, index, size) for index in range(1, size)]
        self._folder = Path(tempfile.mkdtemp(prefix="epd-ranks-"))
        self._communicator: Communicator | None = None
        self._lost = ""
        self._followers: list[_Follower] = []
        self._end = weakref.finalize(self, _end, self._followers, self._folder)
        for index, placed in enumerate(placements, start=1):
            rank, meeting = Rank(index, size), self._folder / "meeting"
            settings = FollowerSettings(model_path, placed, rank, meeting, num_threads)
            self._followers.append(_Follower(settings))

    def connect(self) -> None:
        """Waits until all ranks have loaded their parts.

        Raises what one of them refuses, or RankLostError.
        """
        self.weight_bytes = tuple(self._ready(follower).weight_bytes for follower in self._followers)
        with self.computing():
            self._communicator = Communicator(self.rank, self._folder / "meeting", self._placement.device)
        if not self._placement.is_cuda:  # gloo does not meet again
            shutil.rmtree(self._folder, ignore_errors=True)
        for follower in self._followers:
            threading.Thread(target=_watch, args=(weakref.ref(self), follower), daemon=True).start()

    def _ready(self, follower: _Follower) -> Ready:
        with self.computing():
            if not follower.connection.poll(_START_S):
                raise TimeoutError(f"rank {follower.rank.index} has not loaded within {_START_S:.0f} s")
            reply = follower.connection.recv()
        if isinstance(reply, EPDError):
            self.close()
            raise reply
        assert isinstance(reply, Ready)
        return reply

    def tell(self, step: object) -> None:
        with self.computing():
            for follower in self._followers:
                follower.connection.send(step)

    def ask(self, step: object) -> list[Any]:
        self.tell(step)
        with self.computing():
            return [self._reply(follower) for follower in self._followers]

    @staticmethod
    def _reply(follower: _Follower) -> Any:
        if not follower.connection.poll(EXCHANGE_S):
            raise TimeoutError(f"rank {follower.rank.index} has not replied within {EXCHANGE_S:.0f} s")
        return follower.connection.recv()

    def check(self) -> None:
        """Raises RankLostError if one of the ranks is lost."""
        if self._lost:
            raise RankLostError(self._lost)

    @contextmanager
    def computing(self) -> Iterator[None]:
        self.check()
        try:
            yield
        except RankLostError:
            raise
        except Exception as error:
            self.lose(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
            raise RankLostError(self._lost or "the processes that share the model were ended") from error

    def lose(self, reason: str) -> None:
        """Ends all ranks, since one is lost or at another step. From any thread."""
        if self._lost or not self._end.alive:
            return
        self._lost = (
            f"one of {self.rank.size} processes that share the language model is lost ({reason}); the worker "
            "ends with it; start it again, and see the log of the processes"
        )
        logger.info("%s", self._lost)
        if self._communicator is not None:
            with suppress(Exception):  # whatever a broken group still raises
                self._communicator.abort()
        self.close()

    def add_up(self, tensor: Tensor) -> None:
        self._connected.add_up(tensor)

    def share(self, tensor: Tensor) -> None:
        self._connected.share(tensor)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        return self._connected.gather(tensor)

    @property
    def _connected(self) -> Communicator:
        if self._communicator is None:
            raise RankLostError("the ranks are not connected; wait for them first")
        return self._communicator

    @property
    def process_ids(self) -> list[int]:
        return [follower.process.pid for follower in self._followers]

    def close(self) -> None:
        """Ends the other ranks. Nothing is left of them."""
        self._end()


def _watch(group: weakref.ref[ProcessRanks], follower: _Follower) -> None:
    """Waits for the end of another rank, which ends the group: exchanges over NCCL would go on waiting."""
    status = follower.process.wait()
    held = group()
    if held is not None:
        held.lose(f"rank {follower.rank.index} has ended with status {status}")


def _end(followers: Sequence[_Follower], folder: Path) -> None:
    for follower in followers:  # they hold nothing that is to be kept
        follower.connection.close()
        follower.process.kill()
    for follower in followers:
        follower.process.wait()
    shutil.rmtree(folder, ignore_errors=True)


def _placement(placement: Placement, index: int, size: int) -> Placement:
    """Returns where another rank is. Raises RequestError for a GPU that is not there."""
    if not placement.is_cuda:
        return placement
    first, num_gpus = placement.device.index or 0, torch.cuda.device_count()
    if first + size > num_gpus:
        raise RequestError(
            f"received a tensor parallel size of {size} on '{placement.device}'; allowed: up to "
            f"{num_gpus - first}, the GPUs from there on that this process sees; set a smaller one"
        )
    return replace(placement, device=torch.device("cuda", first + index))


def load_with_ranks(
    path: Path, role: WeightSet, placement: Placement, size: int, *, with_draft_head: bool = False
) -> tuple[Any, ProcessRanks | None]:
    """Loads a model, or rank 0's part of it and the other ranks; None with a size of 1.

    The vision tower is rank 0's, whole. Raises as `load_role` does, RequestError for more ranks than GPUs,
    UnsupportedModelError for a language model that so many ranks cannot share, and RankLostError.
    """
    if size == 1:
        return load_role(path, role, placement, with_draft_head=with_draft_head).model, None
    if with_draft_head:
        raise UnsupportedModelError(
            f"received the draft mtp with a tensor parallel size of {size}; allowed: 1, since ranks have no "
            "part of the head; use another --draft"
        )
    started: list[ProcessRanks] = []

    def cut(model: nn.Module) -> dict[str, TensorPart]:
        """Cuts the model, and then starts the others: what cannot be shared is refused before."""
        parts = cut_model(model, Rank(0, size))
        started.append(ProcessRanks(path, placement, size, num_threads=torch.get_num_threads()))
        return parts

    try:
        model = load_role(path, role, placement, cut=cut).model
        started[0].connect()
    except BaseException:
        for ranks in started:
            ranks.close()
        raise
    return model, started[0]


@dataclass(frozen=True, slots=True)
class FollowerSettings:
    """Says what a rank loads and where it meets the others. num_threads: of torch."""

    model_path: Path
    placement: Placement
    rank: Rank
    meeting: Path
    num_threads: int


@dataclass(frozen=True, slots=True)
class Ready:
    """Reports a rank that has loaded its part. weight_bytes: in its memory."""

    weight_bytes: int


def main(descriptor: int) -> None:
    """Runs a rank until rank 0 closes the connection, whose end is `descriptor`."""
    connection = Connection(descriptor)
    settings: FollowerSettings = connection.recv()
    steps: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, steps), daemon=True).start()
    try:
        follower = Follower(settings)
    except EPDError as error:
        connection.send(error)
        return
    connection.send(Ready(follower.weight_bytes))
    follower.connect()
    while True:
        reply = follower.carry_out(steps.get())
        if reply is not None:
            connection.send(reply)


def _read(connection: Connection, steps: queue.SimpleQueue[Any]) -> None:
    """Ends the process with the connection, whatever it computes or waits for."""
    while True:
        try:
            steps.put(connection.recv())
        except (EOFError, OSError):
            os._exit(0)


class _Engine:
    """Holds a rank's pools, and what computes with them."""

    def __init__(self, model: Any, shape: KVPoolsShape, device: torch.device, ranks: Communicator) -> None:
        self.pools = SharedPools(shape, device)
        self.runner = ModelRunner(model, None, self.pools, ranks=ranks)
        self.moves = PoolMoves(self.pools)


class Follower:
    """Holds a rank's part of the model, and its pools."""

    def __init__(self, settings: FollowerSettings) -> None:
        """Loads its part. Raises ModelError, InfeasibleError."""
        torch.set_num_threads(settings.num_threads)
        cut = partial(cut_model, rank=settings.rank)
        loaded = load_role(settings.model_path, "language", settings.placement, cut=cut)
        self._model: Any = loaded.model
        self.weight_bytes = sum(each.nbytes for each in loaded.model.parameters())
        self._settings = settings
        self._ranks: Communicator | None = None
        self._engines: dict[str, _Engine] = {}

    def connect(self) -> None:
        settings = self._settings
        self._ranks = Communicator(settings.rank, settings.meeting, settings.placement.device)

    @torch.inference_mode()
    def carry_out(self, step: object) -> PoolPlace | None:
        """Carries out a step of rank 0: a new engine's pools, adapters, a pass, moves of blocks, hand-overs.

        Returns what rank 0 has asked for.
        """
        assert self._ranks is not None
        name = ""
        if isinstance(step, EngineStep):
            name, step = step.engine, step.step
        if step is None or isinstance(step, KVPoolsShape):
            self._engines.pop(name, None)  # its memory is free before
        if step is None:
            return None
        if isinstance(step, KVPoolsShape):
            shape, device = replace(step, rank=self._settings.rank), self._settings.placement.device
            self._engines[name] = _Engine(self._model, shape, device, self._ranks)
            return None
        engine = self._engines[name]
        pools = engine.pools
        match step:
            case PackedPass():
                engine.runner.run_packed(step, self._visual(step))
            case ServeAdapters(modules):
                engine.runner.serve_adapters(self._model, modules)
            case SharePools(num_readers):
                return pools.place(num_readers)
            case Fence():
                meet(self._ranks, pools.device)
            case ReceiveTokens():
                receive_together(self._ranks, pools, step)
            case _:
                engine.moves.carry_out(step)  # type: ignore[arg-type] # there are no other steps
        return None

    def _visual(self, packed: PackedPass) -> Embeddings | None:
        if not len(packed.visual_rows):
            return None
        assert self._ranks is not None
        weight = self._model.get_input_embeddings().weight
        shape = (1 + packed.num_deepstack, len(packed.visual_rows), weight.shape[1])
        received = torch.empty(shape, dtype=weight.dtype, device=weight.device)
        for rows in received:
            self._ranks.share(rows)
        return Embeddings(received[0], tuple(received[1:]))
