"""Members that are lost are ended, and no others: not those that have left, and not other processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from epd.errors import UnavailableError
from epd.serve_app.fleet import state_after
from epd.serve_app.network import board as boards
from epd.serve_app.network.board import Board
from epd.serve_app.network.link import Address
from epd.serve_app.network.members import (
    Credentials,
    Hello,
    Kind,
    KnownFronts,
    Member,
    ProcessAddress,
    View,
)
from epd.serve_app.network.membership import Membership, end_process, start_ticks
from epd.serve_app.role_messages import SetRoles
from epd.serve_app.worker_info import WorkerInfo
from epd.topology import role_letters
from tests.serve_app.deployments import NEVER_S

SOON_S = 60.0


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_a_process_that_is_stopped_can_be_ended(process: subprocess.Popen[bytes]) -> None:
    os.kill(process.pid, signal.SIGSTOP)
    end_process(process.pid, start_ticks(process.pid))
    assert process.wait(SOON_S) == -signal.SIGKILL


def test_a_process_with_the_id_of_one_that_is_gone_is_left_alone(process: subprocess.Popen[bytes]) -> None:
    end_process(process.pid, start_ticks(process.pid) - 1)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.2)


def test_a_process_that_is_gone_is_none(process: subprocess.Popen[bytes]) -> None:
    ticks = start_ticks(process.pid)
    process.kill()
    process.wait()
    assert start_ticks(process.pid) == 0
    end_process(process.pid, ticks)


def test_a_front_is_lost_once_and_not_by_a_view_that_is_older_than_it() -> None:
    """A view may be on its way while a front comes, and opens its link."""
    fronts, member = KnownFronts(), Member("f", "front", Address("127.0.0.1", 1), "here", pid=0)
    fronts.add(Hello("front", "f", version=5))
    assert fronts.lost(View(4, {})) == []
    assert fronts.lost(View(5, {"f": member})) == []
    assert [fronts.lost(View(version, {})) for version in (6, 7)] == [["f"], []]


def test_a_front_is_lost_that_no_view_has_shown_to_a_worker() -> None:
    fronts = KnownFronts()
    fronts.add(Hello("front", "f", version=5))
    assert [fronts.lost(View(version, {})) for version in (8, 9)] == [["f"], []]


@pytest.mark.parametrize("kind", ["front", "media"])
def test_members_that_leave_are_not_ended(
    kind: Kind, process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another member of the machine, told of two that are gone: one has left, one is lost."""
    ended: list[int] = []
    monkeypatch.setattr("epd.serve_app.network.membership.end_process", lambda pid, _ticks: ended.append(pid))

    async def run() -> None:
        board, place = Board(hang_s=NEVER_S), ProcessAddress("127.0.0.1", "here")
        leaves, is_lost, watches = (Membership(board, kind, place) for _ in range(3))
        for number, each in enumerate((leaves, is_lost, watches)):
            await each.join(lambda _link: None)
            await each.update(pid=1_000_000 + number)
        await watches.update()
        following = asyncio.create_task(watches.run())
        async with asyncio.timeout(SOON_S):
            while len({member.pid for member in watches.view.members.values()}) < 3:
                await asyncio.sleep(0.01)
            await leaves.leave()
            await is_lost.accuse(is_lost.epoch, "it does not answer")
            while len(watches.view.members) > 1:
                await asyncio.sleep(0.01)
        await is_lost.leave()
        await watches.leave()
        await following
        await board.close()

    asyncio.run(run())
    assert ended == [1_000_001]


def test_a_member_follows_a_restarted_board_before_it_accuses_others_there() -> None:
    """The board judges seconds after all have called it, and takes back none that calls later."""
    told: list[str] = []

    class Ending(Board):
        async def accuse(self, epoch: str, reason: str, accuser: str = "") -> None:  # noqa: ARG002
            assert not told, "it waits for the next board"
            told.append(epoch)
            raise UnavailableError("the board is gone")

    async def run() -> None:
        member = Membership(Ending(hang_s=NEVER_S), "front", ProcessAddress("127.0.0.1", "here"))
        await member.accuse("other", "its link has ended")

    asyncio.run(run())
    assert told == ["other"]


def test_a_time_in_which_the_board_had_no_core_is_nobodys_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of that time wait unread. A member that is silent afterwards is lost."""
    monkeypatch.setattr(boards, "_TICK_S", 0.01)

    async def run() -> None:
        board, credentials = Board(hang_s=0.1), Credentials(bytes(32), "fleet")
        member = Member("m", "front", ("127.0.0.1", 1), "here", pid=0)
        for is_ready in (False, True):
            await board.follow(replace(member, is_ready=is_ready), -1, credentials)
        await asyncio.sleep(0.02)
        time.sleep(0.3)  # nothing else runs meanwhile
        await asyncio.sleep(0.03)
        assert len(board) == 1
        while len(board):
            await asyncio.sleep(0.01)
        await board.close()

    asyncio.run(run())


def test_the_board_spreads_the_workers_of_a_stage_over_machines() -> None:
    async def run() -> None:
        board = Board(hang_s=NEVER_S)
        for number, node_id in enumerate(["one", "two"] * 3):
            newcomer = Member(
                f"w{number}", "stage", ("127.0.0.1", 1), node_id, pid=0, topology="2e2p2d", release="r"
            )
            view = await board.follow(newcomer, -1, Credentials(bytes(32), "fleet"))
        assert view is not None
        given = Counter((each.node_id, each.info.name[0]) for each in view.of_kind("stage") if each.info)
        assert given == Counter((node_id, letter) for node_id in ("one", "two") for letter in "epd")
        await board.close()

    asyncio.run(run())


def test_a_worker_of_a_class_fills_a_place_of_its_class_alone() -> None:
    """Both classes encode. A lost worker is replaced under its name, by one of its own class."""

    async def run() -> None:
        board, credentials = Board(hang_s=NEVER_S), Credentials(bytes(32), "fleet")

        async def came(epoch: str, topology: str, worker_class: str) -> tuple[str, str]:
            newcomer = Member(
                epoch, "stage", ("127.0.0.1", 1), "here", pid=0, topology=topology,
                release=f"r {worker_class}", worker_class=worker_class,
            )  # fmt: skip
            view = await board.follow(newcomer, -1, credentials)
            assert view is not None
            info = view.members[epoch].info
            assert info is not None
            return info.name, role_letters(info.roles)

        assert await came("a", "1pd", "") == ("pd0", "pd")
        assert await came("b", "2e", "small") == ("small0", "e")
        assert await came("c", "1e", "large") == ("large0", "e")
        assert await came("d", "2e", "small") == ("small1", "e")
        await board.accuse("b", "its process has ended")
        await board.accuse("c", "its process has ended")
        assert await came("e", "1e", "large") == ("large0", "e")
        assert await came("f", "2e", "small") == ("small0", "e")
        await board.close()

    asyncio.run(run())


def test_a_place_that_another_worker_has_is_not_given_again() -> None:
    """One came before the board heard of the loss, under another name: the next one gets what is lacking."""

    async def run() -> None:
        board, credentials = Board(hang_s=NEVER_S), Credentials(bytes(32), "fleet")

        async def came(epoch: str) -> str:
            newcomer = Member(epoch, "stage", ("127.0.0.1", 1), "here", pid=0, topology="1e1p1d", release="r")
            view = await board.follow(newcomer, -1, credentials)
            assert view is not None
            info = view.members[epoch].info
            assert info is not None
            return info.name

        names = {await came(epoch): epoch for epoch in ("a", "b", "c")}
        assert names.keys() == {"e0", "p0", "d0"}
        early = await came("early")  # for d0, which is there as far as the board knows
        await board.accuse(names["d0"], "its process has ended")
        await board.accuse(names["e0"] if early[0] != "e" else names["p0"], "its process has ended")
        lost = "e0" if early[0] != "e" else "p0"
        assert await came("late") == lost
        await board.close()

    asyncio.run(run())


def test_a_worker_that_encodes_for_others_keeps_its_place_and_leaves_theirs() -> None:
    """Both are lost while one does the work of both. Each is replaced with its own roles."""

    async def run() -> None:
        board, credentials = Board(hang_s=NEVER_S), Credentials(bytes(32), "fleet")

        def member(epoch: str, info: WorkerInfo | None = None) -> Member:
            return Member(
                epoch, "stage", ("127.0.0.1", 1), "here", pid=0, topology="1p1ep1d", release="r", info=info
            )

        async def came(epoch: str) -> WorkerInfo:
            view = await board.follow(member(epoch), -1, credentials)
            assert view is not None
            info = view.members[epoch].info
            assert info is not None
            return info

        infos = {info.name: (epoch, info) for epoch in "abc" if (info := await came(epoch))}
        await board.accuse(infos["ep0"][0], "its process has ended")
        helper = state_after(
            infos["p0"][1], SetRoles(frozenset({"encode", "prefill"}), frozenset({"encode"}))
        )
        assert (helper.own_roles, helper.takes("encode")) == ({"prefill"}, True)
        await board.follow(member(infos["p0"][0], helper), -1, credentials)
        board._vacant.clear()  # as of a board that was restarted
        assert role_letters((await came("d")).roles) == "ep"
        await board.accuse(infos["p0"][0], "its process has ended")
        lost = await came("f")
        assert (lost.name, role_letters(lost.roles)) == ("p0", "p")
        await board.close()

    asyncio.run(run())


def test_members_without_a_topology_come_and_go_while_a_place_is_vacant() -> None:
    """A front, and a worker that has its place already."""

    async def run() -> None:
        board, credentials = Board(hang_s=NEVER_S), Credentials(bytes(32), "fleet")
        here = Member("w", "stage", ("127.0.0.1", 1), "here", pid=0, topology="1e1p1d", release="r")
        own = WorkerInfo("mine", frozenset({"decode"}))
        await board.follow(here, -1, credentials)
        await board.accuse("w", "its process has ended")
        for newcomer in (
            Member("front", "front", ("127.0.0.1", 1), "here", pid=0),
            Member("own", "stage", ("127.0.0.1", 1), "here", pid=0, info=own),
        ):
            view = await board.follow(newcomer, -1, credentials)
            assert view is not None
            assert newcomer.epoch in view.members
        await board.accuse("own", "it was killed")
        view = await board.follow(
            replace(newcomer, epoch="again", info=replace(own, incarnation=1)), -1, credentials
        )
        assert view is not None
        assert view.members.keys() == {"front", "again"}
        await board.close()

    asyncio.run(run())


@pytest.mark.parametrize(("num_there", "is_replaced"), [(2, False), (3, True)])
def test_a_silent_worker_is_replaced_only_by_one_more_than_is_wanted(
    num_there: int, is_replaced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a release comes up on busy cores, Serve gives up the update if one of its workers is ended."""
    monkeypatch.setattr(boards, "_REPLACED_S", 100.0)

    async def run() -> None:
        board, credentials = Board(hang_s=NEVER_S), Credentials(bytes(32), "fleet")
        board._regrouped_s -= 1000.0
        for number in range(num_there + 1):
            for entry in board._entries.values():
                entry.heard_s -= 200.0  # the board hears no more of those that are there
            comes = Member(f"s{number}", "stage", Address("127.0.0.1", 1), "here", pid=0, topology="1e1p1d")
            view = await board.follow(comes, -1, credentials)
            await board.follow(replace(comes, is_ready=True), -1, credentials)
        assert view is not None
        left = range(num_there if is_replaced else 0, num_there + 1)
        assert set(view.members) == {f"s{number}" for number in left}
        await board.close()

    asyncio.run(run())
