"""The board is lost together with workers, as with a machine: the next one hears of the survivors alone."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from epd.sampling_params import SamplingParams
from epd.serve_app.network import board
from epd.serve_app.network.board import Board
from epd.serve_app.network.members import Credentials, Member
from epd.serve_app.worker_info import WorkerInfo
from tests.serve_app.deployments import NEVER_S, Question, undisturbed
from tests.serve_app.network.cluster import HOST, clustered, hold_regrouping
from tests.serve_app.network.test_cluster import settled, until, until_all_see

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")

LONG = SamplingParams(max_tokens=40, ignore_eos=True)


@pytest.mark.parametrize(("survivor", "is_new"), [("e0", False), ("p0", True)])
def test_workers_that_were_lost_with_the_board_are_not_taken_for_those_that_come(
    survivor: str,
    is_new: bool,
    checkpoints: dict[str, Path],
    media: dict[str, Path],
) -> None:
    """A survivor that knows a worker as lost refuses what names it, and so must not meet its name again."""
    model = checkpoints["qwen2_5_vl"]
    questions = [
        Question(tuple(media[name] for name in kinds), f"what {number}?", LONG)
        for number, kinds in enumerate([("image",), ("video",), ()])
    ]
    expected = undisturbed(model, questions)

    async def run() -> None:
        async with clustered(model, "1e1p1d", num_fronts=2) as cluster:
            await until_all_see(cluster, "1e1p1d")
            asking = [asyncio.create_task(front.ask_all(questions)) for front in cluster.fronts]
            await asyncio.sleep(0.2)
            await cluster.board.stop()
            lost = [name for name in ("e0", "p0", "d0") if name != survivor]
            for name in lost:
                await cluster.kill(cluster.worker(name))
            all_have_called = cluster.board.restart(is_new=is_new)
            # The survivors, of fronts and media workers too, call sooner than a new process is there.
            await until(lambda: cluster.board.board is not None and len(cluster.board.board._entries) == 4)
            coming = [asyncio.create_task(cluster.add_stage()) for _ in lost]
            await asyncio.sleep(0.1)
            all_have_called.set()
            for answers in await asyncio.gather(*asking):
                assert [answer.tokens for answer in answers] == expected
            for server in await asyncio.gather(*coming):
                assert server.info.name in lost
                assert server.info.incarnation > 1
            await settled(cluster)

    asyncio.run(run())


def test_a_board_on_a_machine_whose_clock_is_behind_follows_what_members_have_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it gives out is newer than all that a former board, with a later clock, has given."""
    monkeypatch.setattr(board, "_REGROUP_S", 0.1)
    seen = int((time.time() + 3600.0) * 1000)
    survivor = Member("s", "front", (HOST, 1), "here", pid=0, is_ready=True)
    newcomer = Member("n", "stage", (HOST, 1), "here", pid=0, topology="1epd")

    async def run() -> None:
        restarted, credentials = Board(hang_s=NEVER_S, is_restarted=True), Credentials(bytes(32), "fleet")
        await asyncio.gather(
            restarted.follow(survivor, seen, credentials), restarted.follow(newcomer, -1, credentials)
        )
        view = await restarted.follow(survivor, seen, credentials)
        assert view is not None
        assert view.version > seen
        [info] = [each.info for each in view.of_kind("stage") if each.info]
        assert info.incarnation > seen
        await restarted.close()

    asyncio.run(run())


def test_a_member_that_calls_when_others_know_it_as_lost_must_end() -> None:
    """It was stopped while the board was started again, and its work is done by others."""
    survivor = Member("s", "front", (HOST, 1), "here", pid=0, is_ready=True)
    info = WorkerInfo("epd0", frozenset({"encode", "prefill", "decode"}))
    stopped = Member("w", "stage", (HOST, 1), "here", pid=0, topology="1epd", info=info, is_ready=True)

    async def run() -> None:
        restarted, credentials = Board(hang_s=NEVER_S, is_restarted=True), Credentials(bytes(32), "fleet")
        hold_regrouping(restarted, is_over := asyncio.Event())
        following = asyncio.create_task(restarted.follow(survivor, 5, credentials))
        while not len(restarted):
            await asyncio.sleep(0)
        is_over.set()
        view = await following
        assert view is not None
        assert set(view.members) == {"s"}
        late = await restarted.follow(stopped, 5, credentials)
        assert late is not None
        assert set(late.members) == {"s"}
        await restarted.close()

    asyncio.run(run())
