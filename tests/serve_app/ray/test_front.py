"""Fronts that listen themselves: at one address together, and each until its requests are answered."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import warnings
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from epd.errors import RequestError
from epd.serve_app.app_args import AppArgs
from epd.serve_app.http.address import HttpAddress
from epd.serve_app.ray.front import FrontListener, FrontReplica
from tests.ports import free_port
from tests.serve_app.server import START_S

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Ray's own, when it is imported
    from ray.serve._private.build_app import build_app as built

    from epd.serve_app.app import application

NUM_ASKED = 40


class App(FastAPI):
    """Says its name, and streams until it may end."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.may_end = asyncio.Event()
        self.num_asked = 0

        @self.get("/name")
        async def answer() -> str:
            self.num_asked += 1
            return name

        @self.get("/stream")
        async def stream() -> StreamingResponse:
            return StreamingResponse(self._pieces())

    async def _pieces(self) -> AsyncIterator[bytes]:
        yield b"begun\n"
        await self.may_end.wait()
        yield b"whole\n"


class Front(FrontReplica):
    """A front as Serve runs it."""

    def __init__(self, name: str = "one", drain_s: float = 20.0) -> None:
        self.app = App(name)
        self.listener = FrontListener(self.app, drain_s)

    @asynccontextmanager
    async def running(self, address: HttpAddress) -> AsyncIterator[Front]:
        async with self.app.router.lifespan_context(self.app):
            await self.reconfigure(address.config)
            yield self


@pytest.fixture
def address() -> HttpAddress:
    return free_address()


def free_address() -> HttpAddress:
    return HttpAddress(port=free_port())


async def ask(address: HttpAddress, path: str = "/name") -> str:
    """Asks over a connection of its own."""
    async with patient_client() as client:
        return (await client.get(address.url + path)).text


def patient_client() -> httpx.AsyncClient:
    """Reads no certificates, which would take longer than all that is asked."""
    return httpx.AsyncClient(trust_env=False, verify=False, timeout=START_S)


def test_what_waits_for_a_front_behind_the_proxy_has_an_end() -> None:
    """Serve's default is no limit. More is refused by the proxy; what is answered is limited by the front."""
    built_app = built(application(AppArgs(max_requests=7)), name="epd")
    (front,) = [each for each in built_app.deployments if each.name == "Front"]
    assert front._deployment_config.max_queued_requests == 1024
    assert 7 < front._deployment_config.max_ongoing_requests < 16384


def test_fronts_share_an_address(address: HttpAddress) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as running:
            fronts = [
                await running.enter_async_context(Front(name).running(address)) for name in ("one", "two")
            ]
            answers = await asyncio.gather(*(ask(address) for _ in range(NUM_ASKED)))
            assert set(answers) == {'"one"', '"two"'}
            assert sum(front.app.num_asked for front in fronts) == NUM_ASKED

    asyncio.run(scenario())


def test_a_front_that_stops_answers_what_it_has_and_others_the_rest(address: HttpAddress) -> None:
    async def scenario() -> None:
        async with Front("stays").running(address):
            leaves = Front("leaves")
            async with leaves.running(address), patient_client() as client:
                while not leaves.app.num_asked:
                    await ask(address)
                lines = await _begun_at(leaves, client, address)
                server = leaves.listener._server
                assert server is not None
                leaving = asyncio.create_task(leaves.listener.close())
                while any(each.is_serving() for each in server.servers):
                    await asyncio.sleep(0.01)
                answers = await asyncio.gather(*(ask(address) for _ in range(NUM_ASKED)))
                assert set(answers) == {'"stays"'}
                assert not leaving.done()
                leaves.app.may_end.set()
                assert await anext(lines) == "whole"
                await leaving

    asyncio.run(scenario())


async def _begun_at(front: Front, client: httpx.AsyncClient, address: HttpAddress) -> AsyncIterator[str]:
    """The rest of a stream at this front, tried until a connection is its own."""
    while True:
        before = front.listener.num_connections
        sent = await client.send(client.build_request("GET", f"{address.url}/stream"), stream=True)
        lines = sent.aiter_lines()
        assert await anext(lines) == "begun"
        if front.listener.num_connections > before:
            return lines


def test_the_end_of_its_lifespan_waits_for_requests(address: HttpAddress) -> None:
    async def scenario() -> None:
        front = Front()
        async with patient_client() as client:
            async with front.running(address):
                sent = await client.send(client.build_request("GET", f"{address.url}/stream"), stream=True)
                lines = sent.aiter_lines()
                await anext(lines)
                asyncio.get_running_loop().call_later(0.3, front.app.may_end.set)
            assert await anext(lines) == "whole"
        with pytest.raises(httpx.ConnectError):
            await ask(address)

    asyncio.run(scenario())


def test_it_listens_where_serve_says(address: HttpAddress) -> None:
    async def scenario() -> None:
        other, front = free_address(), Front()
        async with front.running(address):
            await front.reconfigure(other.config)
            assert await ask(other) == '"one"'
            with pytest.raises(httpx.ConnectError):
                await ask(address)
            await front.reconfigure({})
            with pytest.raises(httpx.ConnectError):
                await ask(other)
            await front.check_health()

    asyncio.run(scenario())


def test_a_front_that_has_stopped_to_listen_is_not_healthy(address: HttpAddress) -> None:
    async def scenario() -> None:
        front = Front()
        async with front.running(address):
            await front.check_health()
            assert front.listener._serving is not None
            front.listener._serving.cancel()
            await asyncio.wait([front.listener._serving])
            with pytest.raises(RuntimeError, match="does not listen"):
                await front.check_health()
            with contextlib.suppress(asyncio.CancelledError):
                await front.listener.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "config",
    [{"port": 0}, {"port": "8000"}, {"port": 70_000}, {"host": 7}, {"prot": 8000}],
    ids=lambda config: str(config),
)
def test_a_wrong_address_is_refused(config: Mapping[str, object]) -> None:
    with pytest.raises(RequestError, match="allowed: host, an address of the machine, port"):
        HttpAddress.of(config)


def test_a_reserved_address_is_for_those_who_share_it(address: HttpAddress) -> None:
    with address.reserved():
        with pytest.raises(RequestError, match="cannot listen"):
            address.listen()
        with pytest.raises(RequestError, match="cannot listen"), address.reserved():
            pass
        address.listen(is_shared=True).close()
    address.listen().close()


def test_an_address_that_others_share_cannot_be_reserved(address: HttpAddress) -> None:
    with (
        address.listen(is_shared=True),
        pytest.raises(RequestError, match="cannot listen"),
        address.reserved(),
    ):
        pass


def test_connections_of_a_killed_front_come_to_the_others(address: HttpAddress) -> None:
    """Its process ends at once, with its listening socket; nobody has to notice it."""
    code = (
        "import sys, time; from epd.serve_app.http.address import HttpAddress;"
        f"held = HttpAddress(port={address.port}).listen(is_shared=True); print(flush=True); time.sleep(60)"
    )

    async def scenario(other: subprocess.Popen[bytes]) -> None:
        async with Front("stays").running(address):
            other.kill()
            other.wait()
            assert set(await asyncio.gather(*(ask(address) for _ in range(NUM_ASKED)))) == {'"stays"'}

    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with contextlib.suppress(ProcessLookupError):
            asyncio.run(scenario(other))
