"""A server below a path of its address: over real HTTP, as clients and the page reach it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from epd.client.endpoint import parse_endpoints
from epd.errors import RequestError
from epd.serve_app.http.address import HostCheck, HttpAddress, checked_prefix
from epd.serve_app.http.guard.http_guard import RequestEdge
from epd.serve_app.observability.record import record_of
from epd.serve_app.ray.front import FrontListener
from tests.ports import free_port
from tests.serve_app.server import START_S

ANSWERS = "/v1/chat/completions"


def app() -> FastAPI:
    made = FastAPI()

    @made.get("/v1/models")
    async def models() -> str:
        return "models"

    @made.get("/")
    async def page() -> str:
        return "page"

    return made


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    record = record_of(Request(scope))
    await JSONResponse([record.is_answer, record.request_id])(scope, receive, send)


@asynccontextmanager
async def listening(prefix: str) -> AsyncIterator[httpx.AsyncClient]:
    address = HttpAddress(port=free_port(), prefix=prefix)
    made, edge_of = app(), {"answers": {ANSWERS: answer}, "host_check": HostCheck()}
    made.add_middleware(RequestEdge, on_finished=lambda _record: None, **edge_of)
    listener = FrontListener(made, drain_s=1.0)
    await listener.listen(address)
    try:
        async with httpx.AsyncClient(
            base_url=address.url, trust_env=False, follow_redirects=True, timeout=START_S
        ) as http:
            yield http
    finally:
        await listener.close()


@pytest.mark.parametrize("prefix", ["/", "/team", "/a/b.c"])
def test_routes_are_below_the_prefix(prefix: str) -> None:
    async def scenario() -> None:
        async with listening(prefix) as http:
            assert (await http.get("/v1/models")).json() == "models"
            assert (await http.get("")).json() == "page"
            assert (await http.get("/")).json() == "page"
            # An answer is known as one, which is what takes the short way and is measured.
            is_answer, request_id = (await http.post(ANSWERS)).json()
            assert is_answer
            assert request_id.startswith("chatcmpl-")

    asyncio.run(scenario())


def test_what_is_not_below_the_prefix_is_not_found() -> None:
    async def scenario() -> None:
        async with listening("/team") as http:
            root = str(http.base_url).removesuffix("/team/")
            for path in ("/v1/models", "/teams/v1/models", "/", "/tea"):
                missing = await http.get(f"{root}{path}")
                assert missing.status_code == httpx.codes.NOT_FOUND
                assert "below /team/" in missing.text

    asyncio.run(scenario())


@pytest.mark.parametrize("prefix", ["a", "/a/", "//", "/{x}", "/a b", "/a?b", "", "/" + "a" * 300, "/ä"])
def test_a_wrong_prefix_is_refused(prefix: str) -> None:
    with pytest.raises(RequestError, match="allowed: / or a path such as /team") as raised:
        checked_prefix(prefix)
    assert len(str(raised.value)) < 500


def test_the_address_of_a_front_keeps_its_prefix() -> None:
    address = HttpAddress("127.0.0.1", 8001, "/team")
    assert HttpAddress.of(address.config) == address
    assert HttpAddress.of({"port": 8001}).prefix == "/"
    (endpoint,) = parse_endpoints([f"{address.url}/v1"])
    assert endpoint.url == "http://127.0.0.1:8001/team"
    with pytest.raises(RequestError, match="route prefix"):
        HttpAddress.of({"port": 8001, "prefix": "team"})
