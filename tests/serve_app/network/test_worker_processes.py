"""Workers in processes of their own, as on other machines: tokens are right by TCP and by NIXL."""

from __future__ import annotations

import asyncio
import secrets
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from epd.sampling_params import SamplingParams
from epd.serve_app.network.calls import Answer, Channel
from epd.serve_app.network.connector import TransportConfig
from epd.serve_app.network.link import Address, Link, connect, listen
from epd.serve_app.network.members import ProcessAddress, Purpose
from epd.serve_app.network.routes import Route
from epd.serve_app.network.worker_server import WorkerServer, WorkerServerConfig
from tests.serve_app.deployments import Question, undisturbed
from tests.serve_app.network.board_calls import BoardCalls
from tests.serve_app.network.cluster import HOST, BoardHere, Cluster
from tests.serve_app.network.test_cluster import settled, until_all_see
from tests.serve_app.network.test_connector import WITH_NIXL
from tests.serve_app.network.test_two_processes import WORKERS

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")


class BoardThere(BoardCalls):
    """The board of the process that started this one."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def _call(self, method: str, *arguments: Any) -> Any:
        return await self._answer(self._channel.call((method, arguments)))


class BoardLink:
    """Answers calls of workers of other processes to a board of this one."""

    def __init__(self, board: BoardHere) -> None:
        self._board = board
        self._tasks: set[asyncio.Task[None]] = set()

    def accept(self, link: Link) -> None:
        Channel(link).on_call = self._take

    def _take(self, call: tuple[str, tuple[Any, ...]], answer: Answer) -> None:
        task = asyncio.ensure_future(self._pass_on(call, answer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, call: tuple[str, tuple[Any, ...]], answer: Answer) -> None:
        method, arguments = call
        answer(await getattr(self._board, method)(*arguments))


def serve_stages(
    pipe: Connection, board: Address, key: bytes, node_id: str, config: WorkerServerConfig
) -> None:
    """Runs one worker until the pipe ends."""

    async def run() -> None:
        channel = Channel(await connect(board, key))
        server = WorkerServer(BoardThere(channel), ProcessAddress(HOST, node_id), config)
        await server.start()
        pipe.send(server.info.name)
        await asyncio.to_thread(pipe.poll, None)
        await server.close()

    asyncio.run(run())


@pytest.mark.parametrize("route", [Route.LINK, WITH_NIXL], ids=str)
def test_workers_of_other_machines_give_the_same_tokens(
    route: Route, checkpoints: dict[str, Path], media: dict[str, Path]
) -> None:
    model, sampling = checkpoints["qwen2_5_vl"], SamplingParams(max_tokens=12, ignore_eos=True)
    questions = [
        Question((media["image"],), "what?", sampling),
        Question((media["video"],), "and when?", sampling),
        Question((media["image"], media["tall_video"]), "both?", sampling),
    ]
    expected = undisturbed(model, questions)

    async def run() -> None:
        cluster, key = Cluster(model, "1e1p1d"), secrets.token_bytes(32)
        transport = TransportConfig(1 << 17, 1 << 17, 1 << 13, between_machines=route)
        config = WorkerServerConfig(cluster.settings, Purpose(topology="1e1p1d"), transport=transport)
        listener = await listen(HOST, key, BoardLink(cluster.board).accept)
        workers = []
        for number in range(3):
            pipe, theirs = WORKERS.Pipe()
            arguments = (theirs, listener.address, key, f"node {number}", config)
            process = WORKERS.Process(target=serve_stages, args=arguments, daemon=True)
            process.start()
            theirs.close()
            workers.append((pipe, process))
        try:
            names = [await asyncio.to_thread(pipe.recv) for pipe, _ in workers]
            assert sorted(names) == ["d0", "e0", "p0"]
            await cluster.add_media()
            front = await cluster.add_front()
            await until_all_see(cluster, "1e1p1d")
            assert [answer.tokens for answer in await front.ask_all(questions)] == expected
            await settled(cluster)
            shown = {each.name: each.transports for each in (await front.service.status()).workers}
            assert (shown["e0"], shown["p0"]) == ({"p0": route}, {"d0": route})
            for pipe, process in workers:
                pipe.close()
                await asyncio.to_thread(process.join)
                assert process.exitcode == 0
        finally:
            for _, process in workers:
                process.kill()
            await cluster.close()
            await listener.close()

    asyncio.run(run())
