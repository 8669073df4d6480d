"""Runs a rank that repeats what rank 0 tells it: a process that ends with the connection to rank 0.

rank 0      pools | pass | offload | pass | ...        steps, over a socket of the two
this rank   loads its part, says so, and carries out each step in order; replies to the few that ask
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from epd.encoders import Embeddings
from epd.errors import EPDError
from epd.stages.decoder.rank_cut import cut_model
from epd.stages.engine.block_moves import PoolMoves
from epd.stages.engine.kv_pool import KVPoolsShape
from epd.stages.engine.model_runner import ModelRunner
from epd.stages.engine.packed_pass import PackedPass
from epd.stages.engine.setup import ServeAdapters
from epd.stages.loading.weights import load_role
from epd.stages.placement import Placement
from epd.stages.rank import Rank
from epd.stages.ranks.communicator import Communicator
from epd.stages.ranks.engine_ranks import EngineStep
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
