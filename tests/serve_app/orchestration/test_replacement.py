"""A stage that nobody serves, and nobody will: a worker that others can spare takes its place."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from epd.serve_app.composition import vacated
from epd.serve_app.network.link import Address
from epd.serve_app.network.members import Member, View
from epd.serve_app.orchestration import replacement as replacements
from epd.serve_app.orchestration.replacement import Replacement
from epd.serve_app.worker_info import EVERY_STAGE, WorkerInfo
from epd.topology import ROLE_LETTERS, Stage
from tests.serve_app.orchestration.parts import shared_parts

STAGES: dict[str, Stage] = {letter: stage for stage, letter in ROLE_LETTERS.items()}


def info(name: str, **state: Any) -> WorkerInfo:
    """`ep0` has encode and prefill."""
    return WorkerInfo(name, frozenset(STAGES[letter] for letter in name if letter.isalpha()), **state)


def view(*infos: WorkerInfo, loading: str = "", topology: str = "1e1p2d") -> View:
    members = [
        Member(
            each.name,
            "stage",
            Address("127.0.0.1", 1),
            "here",
            pid=0,
            topology=topology,
            info=each,
            is_known=each.name != loading,
        )
        for each in infos
    ]
    return View(1, {member.epoch: member for member in members})


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (view(info("p0"), info("d0"), info("d1"), info("d2")), "e"),
        (view(info("p0"), info("d0"), info("d1")), ""),  # another one comes
        (view(info("p0"), info("d0"), info("d1"), info("d2"), loading="d2"), ""),
        (view(info("e0"), info("p0"), info("d0"), info("d1")), ""),
        (view(info("e0", leaving=EVERY_STAGE), info("p0"), info("d0"), info("d1")), ""),  # it leaves
        (view(info("p0"), info("d0"), info("d1"), info("d2"), info("e0", leaving=EVERY_STAGE)), "e"),
        (view(info("d0"), info("d1"), topology="1ep1d"), "ep"),
        (view(), ""),
    ],
)
def test_a_place_is_vacated_when_all_are_there_and_a_stage_has_nobody(seen: View, expected: str) -> None:
    assert vacated(seen, "") == {STAGES[letter] for letter in expected}
    assert vacated(seen, "another model") == set()


@pytest.mark.parametrize(("leads", "expected"), [(True, [("d0", {"encode"})]), (False, [])])
def test_a_worker_that_others_can_spare_takes_a_vacated_place_once(
    leads: bool, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replacements, "_LOOK_S", 0.001)

    async def run() -> list[Any]:
        infos = [info("e0", is_alive=False), info("p0"), info("d0"), info("d1"), info("d2")]
        fleet, switched = SimpleNamespace(workers={each.name: each for each in infos}), list[Any]()

        async def switch(worker: str, roles: frozenset[Stage]) -> Any:
            switched.append((worker, roles))
            fleet.workers[worker] = WorkerInfo(worker, roles)

        replacement = Replacement(shared_parts(fleet), switch, lambda: leads)
        replacement.look()  # a lost worker comes back, as far as is known
        await asyncio.sleep(0.05)
        assert switched == []
        replacement.fill(frozenset({"encode"}))
        await asyncio.sleep(0.05)
        while len(switched) < len(expected):
            await asyncio.sleep(0.001)
        replacement.fill(frozenset())
        assert replacement._looking is not None
        await asyncio.wait([replacement._looking])
        return switched

    assert asyncio.run(run()) == expected
