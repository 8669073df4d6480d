"""What clients have at all fronts together: one minute's amount, and the names of their media."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from epd.errors import RateLimitExceededError, UnavailableError, UnknownUuidError
from epd.serve_app.clients import Client, hash_of
from epd.serve_app.composition import share_clients
from epd.serve_app.http.guard import keyed_clients
from epd.serve_app.http.guard.keyed_clients import KeyedClients, Spent
from epd.serve_app.http.requests.named_media import NameAsked, NamedMedia
from epd.serve_app.network import remote_fleet
from epd.serve_app.network.members import ProcessAddress, Purpose
from epd.serve_app.network.remote_fleet import RemoteFleet
from epd.serve_app.service import MediaReference
from tests.serve_app.deployments import NEVER_S
from tests.serve_app.network.cluster import HOST, BoardHere

SPACE = b"ann"
ALONE = MediaReference("image", "", "image 1", uuid="door")


class Front:
    """A front without workers: its fleet, and what it keeps of its clients."""

    def __init__(self, board: BoardHere, keys: Path, model: str) -> None:
        self.fleet = RemoteFleet(board, ProcessAddress(HOST, "here"), Purpose(model=model))
        self.named = NamedMedia(8, 1000)
        self.clients = KeyedClients(keys)

    async def start(self) -> None:
        await self.fleet.start()
        share_clients(SimpleNamespace(named_media=self.named, clients=self.clients), self.fleet)  # type: ignore[arg-type]

    async def close(self) -> None:
        self.named.close()
        await self.fleet.close()

    def name(self, url: str) -> None:
        self.named.keep(SPACE, (MediaReference("image", url, "image 1", uuid="door"),), "ann")

    async def url(self, space: bytes = SPACE) -> str:
        (found,) = await self.named.completed(space, (ALONE,), "ann")
        return found.url


@asynccontextmanager
async def fronts(tmp_path: Path, *models: str) -> AsyncIterator[list[Front]]:
    """Fronts that know each other. models: of each."""
    keys = tmp_path / "keys.jsonl"
    ann = {"name": "ann", "sha256": hash_of(b"k1"), "requests_per_minute": 4, "tokens_per_minute": 100}
    keys.write_text("\n".join(map(json.dumps, (ann, {"name": "ben", "sha256": hash_of(b"k2")}))))
    board = BoardHere()
    started = [Front(board, keys, model) for model in models]
    try:
        for each in started:
            await each.start()
        while any(len(each.fleet.membership.view.members) < len(models) for each in started):
            await asyncio.sleep(0.01)
        yield started
    finally:
        for each in started:
            await each.close()
        await board.stop()


@pytest.fixture(autouse=True)
def _no_answer_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_fleet, "_ASK_S", NEVER_S)


def test_a_name_is_known_at_each_front_of_its_model(tmp_path: Path) -> None:
    async def run() -> None:
        async with fronts(tmp_path, "a", "a", "a", "b") as (first, second, third, other):
            first.name("data:one")
            assert [await each.url() for each in (second, third)] == ["data:one", "data:one"]
            for front, space in ((other, SPACE), (second, b"ben")):
                with pytest.raises(UnknownUuidError, match="while a front keeps it"):
                    await front.url(space)
            await first.close()  # what another one asked for is its own
            assert await second.url() == "data:one"

    asyncio.run(run())


def test_the_last_medium_of_a_name_counts_wherever_it_was_named(tmp_path: Path) -> None:
    async def run() -> None:
        async with fronts(tmp_path, "a", "a", "a") as (first, second, third):
            first.name("data:one")
            assert await second.url() == "data:one"
            third.name("data:two")
            while len(first.named) or len(second.named):
                await asyncio.sleep(0.01)
            assert [await each.url() for each in (first, second, third)] == ["data:two"] * 3
            asked: list[Any] = []

            second.named.tell_others = asked.append
            second.name("data:two")  # as it is
            assert asked == []
            second.name("data:three")
            assert asked == [NameAsked((SPACE, "image", "door"), is_taken=True)]

    asyncio.run(run())


def test_what_a_front_had_counts_in_the_share_of_its_client() -> None:
    async def run() -> None:
        named = NamedMedia(8, 1000)

        async def ask_others(_: object) -> list[str]:
            return ["data:" + "x" * 100]

        named.ask_others = ask_others
        await named.completed(SPACE, (ALONE,), "ann")
        assert named._client_bytes == {"ann": 109}

    asyncio.run(run())


def test_a_minutes_amount_is_of_all_fronts_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyed_clients, "monotonic", lambda: 1000.0)  # nothing comes back
    monkeypatch.setattr(keyed_clients, "_TELL_AFTER_S", 0.0)

    async def left(front: Front, name: str, wanted: str) -> None:
        while front.clients.headers("ann")[f"x-ratelimit-remaining-{name}"] != wanted:
            await asyncio.sleep(0.01)

    async def run() -> None:
        async with fronts(tmp_path, "a", "a") as (first, second):
            ann, ben = (first.clients.found(key) for key in (b"k1", b"k2"))
            for front in (first, second, first, first):
                front.clients.admit(ann)
                front.clients.admit(ben)
            for front in (first, second):
                await left(front, "requests", "0")
                with pytest.raises(RateLimitExceededError, match="more requests in a minute"):
                    front.clients.admit(ann)
                front.clients.admit(ben)
            first.clients.spend("ann", 30)
            second.clients.spend("ann", 50)
            for front in (first, second):
                await left(front, "tokens", "20")

    asyncio.run(run())


def test_clients_without_limits_are_told_to_nobody(tmp_path: Path) -> None:
    async def run() -> None:
        async with fronts(tmp_path, "a") as (front,):
            told: list[Spent] = []

            front.clients.tell_others = told.append
            front.clients.admit(front.clients.found(b"k2"))
            front.clients.spend("ben", 3)
            front.clients.admit(Client("x", "x", "x", front.clients.found(b"k2").rights, "ann", 0))
            front.clients.spend("ann", 5)
            while not told:
                await asyncio.sleep(0.01)
            assert told == [Spent({"ann": (1, 5)})]

    asyncio.run(run())


def test_a_front_that_does_not_answer_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(_: object) -> None:
        await asyncio.sleep(NEVER_S)

    async def refuses(_: object) -> None:
        raise UnavailableError("not now")

    async def run() -> None:
        async with fronts(tmp_path, "a", "a", "a", "a") as (first, *others):
            for front, answer in zip(others, (never, refuses, others[2].named.answer), strict=True):
                front.fleet.fronts.answers[NameAsked] = answer
            others[2].name("data:one")
            while (SPACE, "image", "door") not in others[2].named._urls:
                await asyncio.sleep(0.01)
            monkeypatch.setattr(remote_fleet, "_ASK_S", 0.5)
            found: list[str] = []
            while not found:  # on a machine that is busy, the one that answers may be late, too
                found = await first.fleet.fronts.ask(NameAsked((SPACE, "image", "door")))
            assert found == ["data:one"]

    asyncio.run(run())
