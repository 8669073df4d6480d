"""Bodies that get behind the door: drawn from valid ones, and from answered ones that have reached new code.

make soak draws for EPD_GROW_S seconds (ten minutes), and keeps what it finds in the file EPD_CORPUS.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from epd.batch.lines import LineDefaults, LineError, parse_line
from epd.control.routing import Router
from epd.serve_app.http.api import create_api
from epd.serve_app.media.fleet_media import FleetMedia
from tests.serve_app.conftest import QUESTION, media_settings
from tests.serve_app.fakes import FakeService
from tests.serve_app.http.grown_bodies import BATCH_LINE, CHAT, Case, Lines, bent, seeds
from tests.serve_app.media_fleet import MediaFleet

IS_SOAK = "EPD_SOAK" in os.environ
NUM_DRAWN = 150
GROW_S = float(os.environ.get("EPD_GROW_S", "600"))


class Target:
    """The application in this thread over a service that answers from a script."""

    def __init__(self, spool: Path) -> None:
        self.service = FakeService()
        self._fleet = MediaFleet(media_settings(spool_folder=spool))
        self.service.file_of = self._fleet.media["v0"].file_of
        self.app = create_api(self.service, FleetMedia(self._fleet, Router()))
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=None)

    async def close(self) -> None:
        await self.http.aclose()
        self.app.state.server.close()
        self._fleet.close()

    async def stage(self, case: Case) -> str:
        """How far a case gets: refused at the door, behind it, or answered."""
        content = json.dumps(case.body).encode()
        if case.path == BATCH_LINE:
            try:
                parse_line(content, 1, LineDefaults(Path("/nowhere")))
            except LineError:
                return "door"
            return "answered"
        num_before = len(self.service.requests)
        headers = {"content-type": "application/json"}
        response = await self.http.post(case.path, content=content, headers=headers)
        assert response.status_code < 500, (response.text, case.line())
        if response.status_code == 200:
            return "answered"
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        return "behind" if len(self.service.requests) > num_before else "door"


@contextmanager
def kept_cases() -> Iterator[list[Case]]:
    """Cases of earlier runs; new ones are kept for the next."""
    path = Path(os.environ["EPD_CORPUS"]) if "EPD_CORPUS" in os.environ else None
    lines = path.read_text().splitlines() if path is not None and path.exists() else []
    cases = [Case(*json.loads(line)) for line in lines]
    yield cases
    if path is not None:
        path.write_text("".join(f"{case.line()}\n" for case in cases))


def draws(seed: int) -> Iterator[random.Random]:
    end_s = time.monotonic() + GROW_S
    number = 0
    while time.monotonic() < end_s if IS_SOAK else number < NUM_DRAWN:
        yield random.Random(f"{seed} {number}")
        number += 1


@pytest.mark.filterwarnings("ignore:.*coroutine.*was never awaited:RuntimeWarning")
def test_bodies_with_one_thing_bent_are_answered_or_refused(tmp_path: Path) -> None:
    target, lines, stages = Target(tmp_path), Lines(), Counter[str]()

    async def reached(case: Case) -> str:
        with lines.counted():
            return await target.stage(case)

    async def run() -> None:
        corpus = seeds()
        assert {await reached(case) for case in corpus} == {"answered"}
        num_known = len(lines.seen)
        with kept_cases() as kept:
            corpus += [case for case in kept if await reached(case) != "door"]
            for random_ in draws(time.monotonic_ns() if IS_SOAK else 7):
                case = bent(random_, corpus)
                stage = await reached(case)
                stages[stage] += 1
                kept += [case] * bool(lines.num_new)
                corpus += [case] * (bool(lines.num_new) and stage != "door")
            print(f"{len(kept)} cases, {num_known} lines of seeds, {len(lines.seen)} now, {dict(stages)}")
            assert len(lines.seen) > num_known
            assert any(case.path == CHAT for case in kept)
        assert stages["answered"] + stages["behind"] > stages.total() // 4
        assert stages["door"] > stages.total() // 8
        assert (await target.http.post(CHAT, json=QUESTION)).status_code == 200
        assert target.app.state.server.num_requests == 0
        assert target.service.num_open == target.service.num_closed
        await target.close()

    asyncio.run(run())
