"""The OpenAPI schema: what it names, when it is written, and that any JSON in any field gets no 5xx.

What is drawn of all its operations is asked of real workers: see `test_openapi_real.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance
from starlette.types import Message

from epd.serve_app.http.address import HostCheck
from epd.serve_app.http.page import Pages
from epd.video import FetchPolicy
from tests.openapi_file import FILE
from tests.serve_app.conftest import QUESTION, Front, media_settings, running_front
from tests.serve_app.fakes import FakeService
from tests.serve_app.server import START_S

CHECKS = [not_a_server_error, status_code_conformance, response_schema_conformance]
NUM_DRAWN = 300 if "EPD_SOAK" in os.environ else 30
DRAWN = settings(
    max_examples=NUM_DRAWN,
    deadline=None,
    database=None,
    derandomize=True,  # else, now and then, all that is drawn is an empty conversation or the like
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
OPERATIONS = {
    "POST /v1/chat/completions", "POST /v1/completions", "POST /v1/responses",
    "GET /v1/models", "GET /v1/models/{name}", "GET /v1/epd/status",
    "POST /v1/epd/roles", "GET /v1/epd/load", "POST /v1/epd/estimate",
    "POST /v1/epd/picture",
    "POST /v1/files", "GET /v1/files", "GET /v1/files/{file_id}", "GET /v1/files/{file_id}/content",
    "DELETE /v1/files/{file_id}", "POST /v1/batches", "GET /v1/batches", "GET /v1/batches/{batch_id}",
    "POST /v1/batches/{batch_id}/cancel",
    "POST /v1/uploads", "GET /v1/uploads/{upload_id}", "POST /v1/uploads/{upload_id}/parts",
    "POST /v1/uploads/{upload_id}/complete", "POST /v1/uploads/{upload_id}/cancel",
    "POST /tokenize", "POST /detokenize", "POST /invocations",
    "GET /health", "GET /load", "GET /metrics", "GET /ping", "POST /ping", "GET /version",
}  # fmt: skip


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """A front that asks no host for media."""
    policy = FetchPolicy(allowed_hosts=frozenset(), max_s=1.0)
    media = media_settings(policy, tmp_path_factory.mktemp("spool"))
    with running_front(FakeService(), media=media) as front:
        yield front


def test_nothing_waits_while_the_schema_is_written() -> None:
    """It takes a second, which all others would wait. It is written once, whoever asks meanwhile."""
    is_open, written = threading.Event(), list[str]()

    def schema(root: str) -> bytes:
        written.append(root)
        assert is_open.wait(START_S)
        return b"{}"

    async def ask() -> None:
        pages = Pages(HostCheck(has_key=False), schema)

        async def get(path: str) -> list[Any]:
            sent = list[Any]()

            async def send(message: Message) -> None:
                sent.append(message)

            scope = {"type": "http", "method": "GET", "path": path, "headers": []}
            page = pages.found(scope)
            assert page is not None
            await page(scope, receive, send)
            return sent

        asking = [asyncio.create_task(get("/openapi.json")) for _ in range(3)]
        await asyncio.sleep(0)
        assert (await get("/"))[0]["status"] == 200
        assert not any(task.done() for task in asking)
        is_open.set()
        assert [(await each)[1]["body"] for each in asking] == [b"{}"] * 3

    async def receive() -> Message:
        raise NotImplementedError

    asyncio.run(ask())
    assert written == [""]


def test_the_schema_is_written_once_for_each_prefix(offline: Front) -> None:
    app = offline.server.app
    written = app.openapi_under("/team")  # type: ignore[attr-defined]
    assert app.openapi_under("/team") is written  # type: ignore[attr-defined]
    assert json.loads(written) == {"servers": [{"url": "/team"}]} | app.openapi()


def test_the_file_of_the_schema_is_what_a_server_gives(offline: Front) -> None:
    given = offline.http.get("/openapi.json").json()
    assert json.loads(FILE.read_text(encoding="utf-8")) == given, "run python -m tests.openapi_file"


@cache
def operations(url: str) -> dict[str, schemathesis.APIOperation]:
    """Each operation of the server's schema, by its label."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json", timeout=START_S)
    found = [one.ok() for one in schema.get_all_operations()]
    return {operation.label: operation for operation in found}


def test_drawn_conversations_are_answered_as_promised(offline: Front) -> None:
    operation = operations(offline.server.url)["POST /v1/chat/completions"]
    seen = set()

    @given(case=operation.as_strategy(generation_mode=GenerationMode.POSITIVE))
    @DRAWN
    def ask(case: Case) -> None:
        response = case.call(timeout=START_S)
        case.validate_response(response, checks=CHECKS)
        seen.add(response.status_code)

    ask()
    assert seen & {200, 403, 404}, seen
    assert offline.ask().status_code == 200


def test_the_schema_names_every_operation(offline: Front) -> None:
    assert set(operations(offline.server.url)) == OPERATIONS


@given(
    changes=st.dictionaries(
        st.sampled_from(
            ["temperature", "n", "stop", "seed", "logprobs", "stream", "messages", "epd", "model"]
        ),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
            lambda inner: (
                st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
            ),
            max_leaves=6,
        ),
        min_size=1,
        max_size=3,
    )
)
@settings(DRAWN, max_examples=100)
def test_any_json_in_any_field(shared_front: Front, changes: dict[str, object]) -> None:
    response = shared_front.http.post(
        "/v1/chat/completions",
        content=json.dumps({**QUESTION, **changes}),
        headers={"content-type": "application/json"},
    )
    assert response.status_code < 500, (changes, response.text)
    if response.status_code >= 400:
        assert response.json()["error"]["message"]
