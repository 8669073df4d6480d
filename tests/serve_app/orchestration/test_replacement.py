"""A stage that nobody serves, and nobody will: a worker that others can spare takes its place."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from epd.errors import InfeasibleError
from epd.serve_app.composition import vacated
from epd.serve_app.network.link import Address
from epd.serve_app.network.members import Member, View
from epd.serve_app.orchestration import replacement as replacements
from epd.serve_app.orchestration.replacement import Replacement
from epd.serve_app.worker.worker_core import WorkerCore
from epd.serve_app.worker_info import EVERY_STAGE, WorkerInfo
from epd.topology import ROLE_LETTERS, Stage
from tests.serve_app.deployments import Deployment, Question, core_of, deployed, undisturbed
from tests.serve_app.orchestration.parts import shared_parts

STAGES: dict[str, Stage] = {letter: stage for stage, letter in ROLE_LETTERS.items()}
ENCODE: frozenset[Stage] = frozenset({"encode"})
EP: frozenset[Stage] = frozenset({"encode", "prefill"})


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
        (view(info("ep0", lent=ENCODE), info("d0"), info("d1"), info("d2")), "e"),
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


# Where no encoder is left


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0.002)


def returned_when(deployment: Deployment, is_allowed: asyncio.Event) -> None:
    """Lost workers are started again once it is allowed."""
    restart = deployment.fleet._restart

    async def restarted(name: str) -> None:
        await is_allowed.wait()
        await restart(name)

    deployment.fleet._restart = restarted  # type: ignore[method-assign]


@pytest.mark.parametrize("topology", ["1e1p1d", "2e2pd"])
def test_a_worker_that_prefills_encodes_until_an_encoder_is_back(
    topology: str, checkpoints: dict[str, Path], media: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replacements, "_LOOK_S", 0.01)
    path = checkpoints["qwen2_5_vl"]
    asked = [Question((media[name],), f"what is {name}?") for name in ("video", "image", "tall_video")]
    expected = undisturbed(path, asked)

    async def run() -> None:
        async with deployed(path, topology, encode_fallback_s=0.03) as deployment:
            workers, is_back = deployment.fleet.workers, asyncio.Event()
            returned_when(deployment, is_back)
            encoders = [name for name, each in workers.items() if each.roles == ENCODE]
            asking = asyncio.create_task(deployment.ask_all(asked))
            await until(lambda: bool(deployment.service.num_tickets))
            for name in encoders:
                deployment.fleet.kill(name)
            assert [answer.tokens for answer in await asking] == expected
            helpers = [each for each in workers.values() if each.lent]
            assert [each.lent for each in helpers] == [ENCODE]
            helper = helpers[0].name
            again = await deployment.ask(asked[0], wants_spans=True)
            assert {span.worker for span in again.spans if span.stage == "encode"} <= {helper}
            status = await deployment.service.status()
            assert (status.is_ready, status.counters["encode_fallbacks"]) == (True, 1)

            is_back.set()
            await until(lambda: workers[helper].own_roles == workers[helper].roles)
            assert "encode" not in workers[helper].roles
            assert [answer.tokens for answer in await deployment.ask_all(asked)] == expected
            await deployment.settle()
            assert "encode" not in core_of(deployment.fleet, helper).hosted, "its tower is given up"
            assert (await deployment.service.status()).counters["encode_fallbacks"] == 1

    asyncio.run(run())


def test_a_worker_without_room_for_a_tower_goes_on_as_before(
    checkpoints: dict[str, Path], media: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not asked again at once. The requests wait for the encoder."""
    monkeypatch.setattr(replacements, "_LOOK_S", 0.01)
    path, tries = checkpoints["qwen2_5_vl"], list[str]()
    onload = WorkerCore._onload

    def full(core: WorkerCore, roles: frozenset[Stage]) -> Any:
        if roles == EP:
            tries.append(core.name)
            raise InfeasibleError("the stages do not fit; this is a test")
        return onload(core, roles)

    monkeypatch.setattr(WorkerCore, "_onload", full)
    asked = [Question((media["image"],)), Question((), "and two?")]
    expected = undisturbed(path, asked)

    async def run() -> None:
        async with deployed(path, "1e1p1d", encode_fallback_s=0.01) as deployment:
            workers, is_back = deployment.fleet.workers, asyncio.Event()
            returned_when(deployment, is_back)
            deployment.fleet.kill("e0")
            asking = asyncio.create_task(deployment.ask(asked[0]))
            await until(lambda: bool(tries))
            assert (await deployment.ask(asked[1])).tokens == expected[1]
            looks = deployment.service.replacement
            await until(lambda: -replacements._PAUSE_LOOKS < looks._num_without < 0)
            assert (workers["p0"].roles, workers["p0"].lent) == ({"prefill"}, set())
            is_back.set()
            assert (await asking).tokens == expected[0]
            await deployment.settle()
            counters = (await deployment.service.status()).counters
            assert (tries, counters.get("encode_fallbacks", 0)) == (["p0"], 0)

    asyncio.run(run())


def test_without_the_option_requests_wait(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replacements, "_LOOK_S", 0.001)

    async def run() -> None:
        async with deployed(checkpoints["qwen2_5_vl"], "1e1p1d") as deployment:
            is_back = asyncio.Event()
            returned_when(deployment, is_back)
            deployment.fleet.kill("e0")
            await until(lambda: not deployment.fleet.workers["e0"].is_alive)
            deployment.service.replacement.look()
            assert deployment.service.replacement._looking is None
            is_back.set()
            await deployment.settle()

    asyncio.run(run())
