"""Formats are checked in turns over clients, and each client has a bounded number of them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from epd.errors import OverloadedError
from epd.serve_app.http import chat_answers
from epd.serve_app.http.chat_answers import FormatChecks
from epd.stages.grammar.formats import AnswerFormat, format_of
from tests.serve_app.server import NEVER_S

STEP_S = 0.1


@pytest.fixture
def may_go_on() -> Iterator[threading.Event]:
    """What checks wait for."""
    may_go_on = threading.Event()
    may_go_on.set()
    yield may_go_on
    may_go_on.set()


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch, may_go_on: threading.Event) -> Iterator[FormatChecks]:
    """Checks that take `STEP_S` each, once they may go on."""

    def slowly(wanted: AnswerFormat) -> str:
        assert may_go_on.wait(NEVER_S)
        time.sleep(STEP_S)
        return wanted.text

    checks = FormatChecks()
    monkeypatch.setattr(checks._checker, "_verdict", slowly)
    yield checks
    checks.close()


def test_a_client_with_many_formats_holds_up_no_other(
    checks: FormatChecks, may_go_on: threading.Event
) -> None:
    """Thirty formats of one client beside five of another, which come later and are done first."""
    done: list[str] = []
    may_go_on.clear()

    async def ask(client: str, name: str) -> None:
        done.append(await checks.checked(format_of("regex", name), client))

    async def scenario() -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(30):
                group.create_task(ask("many", f"m{number}"))
            while checks._num_waiting["many"] < 30:
                await asyncio.sleep(0)
            for number in range(5):
                group.create_task(ask("few", f"f{number}"))
            while checks._num_waiting["few"] < 5:
                await asyncio.sleep(0)
            may_go_on.set()

    asyncio.run(scenario())
    assert len(done) == 35
    assert [name for name in done if name[0] == "f"] == [f"f{number}" for number in range(5)]
    assert max(place for place, name in enumerate(done) if name[0] == "f") < 15


def test_a_flood_is_turned_away_alone(checks: FormatChecks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_answers, "_MAX_WAITING_PER_CLIENT", 3)
    monkeypatch.setattr(chat_answers, "_MAX_WAITING", 4)

    async def scenario() -> list[str | BaseException]:
        clients = ["flood"] * 5 + ["other", "third"]
        asked = [checks.checked(format_of("regex", f"a{n}"), client) for n, client in enumerate(clients)]
        return await asyncio.gather(*asked, return_exceptions=True)

    replies = asyncio.run(scenario())
    assert replies[:3] == ["a0", "a1", "a2"]
    assert [type(each) for each in replies[3:]] == [OverloadedError, OverloadedError, str, OverloadedError]
    assert "4 formats are being checked" in str(replies[-1])
    assert "3 formats of this client" in str(replies[3])
    assert not checks._num_waiting


def test_known_formats_wait_for_nothing(checks: FormatChecks, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> str:
        await checks.checked(format_of("regex", "known"), "a")
        monkeypatch.setattr(chat_answers, "_MAX_WAITING", 0)
        return await checks.checked(format_of("regex", "known"), "b")

    assert asyncio.run(scenario()) == "known"
