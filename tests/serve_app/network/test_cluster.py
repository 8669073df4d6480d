"""Several fronts over one set of workers, over real links: tokens are right, whichever of them is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from epd.errors import OverloadedError
from epd.sampling_params import SamplingParams
from epd.serve_app.network import board as boards
from epd.serve_app.network import remote_fleet
from epd.serve_app.network.connector import TransportConfig
from epd.serve_app.network.link import Address, Link, LinkTimeoutError, connect
from epd.serve_app.network.members import View
from epd.serve_app.network.routes import Route
from epd.serve_app.network.worker_server import WorkerServer
from epd.stages.ranks import group
from epd.topology import TensorParallel, topology_name
from tests.serve_app.deployments import NEVER_S, Question, num_held, undisturbed
from tests.serve_app.held_answers import HeldAnswers
from tests.serve_app.network.cluster import HANG_S, Cluster, Front, clustered
from tests.serve_app.network.test_connector import BETWEEN_MACHINES, WITH_NIXL
from tests.stages.ranks.thread_ranks import StartedThreadRanks

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")

LONG = SamplingParams(max_tokens=40, ignore_eos=True)
KINDS = (("image",), ("video",), (), ("image", "tall_video"))


@pytest.fixture(scope="module")
def model(checkpoints: dict[str, Path]) -> Path:
    return checkpoints["qwen2_5_vl"]


@pytest.fixture(scope="module")
def questions(media: dict[str, Path]) -> list[Question]:
    return [
        Question(tuple(media[name] for name in KINDS[number % len(KINDS)]), f"what {number}?", LONG)
        for number in range(8)
    ]


@pytest.fixture(scope="module")
def expected(model: Path, questions: list[Question]) -> list[tuple[int, ...]]:
    return undisturbed(model, questions)


async def until(is_true: Callable[[], bool], seconds: float = 200.0) -> float:
    """Returns the seconds that it took."""
    start_s = asyncio.get_running_loop().time()
    while not is_true():
        assert asyncio.get_running_loop().time() - start_s < seconds, "it did not happen"
        await asyncio.sleep(0.01)
    return asyncio.get_running_loop().time() - start_s


def topology_seen(front: Front) -> str:
    return topology_name([info.roles for info in front.fleet.workers.values() if info.is_alive])


def has_begun(front: Front) -> bool:
    """Whether an answer of a front is in its middle."""
    return any(each.answer.has_begun for each in front.service.attempts.values())


async def until_all_see(cluster: Cluster, topology: str) -> None:
    """Returns when every front knows workers of that topology."""
    await until(lambda: all(topology_seen(front) == topology for front in cluster.fronts))


def leftovers(cluster: Cluster) -> list[str]:
    left = []
    for server in cluster.stages:
        if server.is_healthy:
            core, name = cluster.core(server), server.info.name
            left += [f"{name} has work"] if core.has_work() else []
            left += [f"{name} uses KV"] if core.load().kv_usage else []
            left += [f"{name} holds embeddings"] if num_held(core) else []
    left += [f"{len(server._kept)} frames" for server in cluster.media if server.is_healthy and server._kept]
    return left


async def settled(cluster: Cluster) -> None:
    try:
        await until(lambda: not leftovers(cluster))
    except AssertionError:
        raise AssertionError(f"left behind: {leftovers(cluster)}") from None
    for server in cluster.stages:
        if server.is_healthy:
            cluster.core(server).check_integrity()


@pytest.mark.parametrize("topology", ["1e1p1d", "2e1pd", "1epd"])
def test_two_fronts_share_workers(
    topology: str, model: Path, questions: list[Question], expected: list[tuple[int, ...]]
) -> None:
    async def run() -> None:
        async with clustered(model, topology, num_fronts=2) as cluster:
            first, second = cluster.fronts
            await until_all_see(cluster, topology)
            answers = await asyncio.gather(first.ask_all(questions), second.ask_all(questions))
            for each in answers:
                assert [answer.tokens for answer in each] == expected
            await settled(cluster)

    asyncio.run(run())


@pytest.mark.parametrize("route", [Route.SHARED_MEMORY, Route.STAGING, Route.LINK, WITH_NIXL], ids=str)
def test_every_transport_gives_the_same_tokens_and_is_shown(
    route: Route, model: Path, questions: list[Question], expected: list[tuple[int, ...]]
) -> None:
    """A prompt needs the room of the transport several times over."""

    async def run() -> None:
        cluster = Cluster(model, "1e1p1d")
        between = route if route in BETWEEN_MACHINES else Route.LINK
        cluster.transport = TransportConfig(1 << 17, 1 << 17, 1 << 13, route is Route.STAGING, between)
        try:
            for number in range(3):
                await cluster.add_stage(f"node {number}" if route in BETWEEN_MACHINES else "here")
            await cluster.add_media()
            front = await cluster.add_front()
            await until_all_see(cluster, "1e1p1d")
            assert [answer.tokens for answer in await front.ask_all(questions)] == expected
            await settled(cluster)
            shown = {each.name: each.transports for each in (await front.service.status()).workers}
            assert {name: shown[name] for name in ["e0", "p0", "d0"]} == {
                "e0": {"p0": route}, "p0": {"d0": route}, "d0": {},
            }  # fmt: skip
        finally:
            await cluster.close()

    asyncio.run(run())


@pytest.mark.parametrize("route", [Route.SHARED_MEMORY, Route.LINK, WITH_NIXL], ids=str)
def test_workers_of_two_ranks_give_the_same_tokens(
    route: Route,
    model: Path,
    questions: list[Question],
    expected: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Keys and values go rank to rank, or in parts to a decode worker of another machine."""
    node_id = "elsewhere" if route in BETWEEN_MACHINES else "here"
    monkeypatch.setattr(group, "ProcessRanks", StartedThreadRanks)

    async def run() -> None:
        cluster = Cluster(model, "1ep1d", tensor_parallel=TensorParallel(2))
        between = route if route in BETWEEN_MACHINES else Route.LINK
        cluster.transport = TransportConfig(between_machines=between)
        try:
            for each in ("here", node_id):
                await cluster.add_stage(each)
            await cluster.add_media()
            front = await cluster.add_front()
            await until_all_see(cluster, "1ep1d")
            assert [answer.tokens for answer in await front.ask_all(questions[:4])] == expected[:4]
            await settled(cluster)
            shown = {each.name: each.transports for each in (await front.service.status()).workers}
            assert shown["ep0"]["d0"] == route
        finally:
            await cluster.close()

    asyncio.run(run())


def test_a_front_that_is_lost_takes_only_its_own_requests_with_it(
    model: Path, questions: list[Question], expected: list[tuple[int, ...]]
) -> None:
    async def run() -> None:
        held = HeldAnswers()
        async with clustered(model, "1e1p1d", num_fronts=2, pace=held) as cluster:
            lost, kept = cluster.fronts
            await until_all_see(cluster, "1e1p1d")
            held.is_on = True
            dead = asyncio.create_task(lost.ask_all(questions))
            alive = asyncio.create_task(kept.ask_all(questions))
            await until(lambda: len(lost.service.attempts) + len(kept.service.attempts) >= 10)
            await until(lambda: all(map(has_begun, cluster.fronts)))
            await lost.kill()
            dead.cancel()
            held.is_on = False
            assert [answer.tokens for answer in await alive] == expected
            assert (await kept.service.status()).counters.get("workers_lost", 0) == 0
            await settled(cluster)

    asyncio.run(run())


def test_a_front_hears_of_its_loss_before_its_links_end(model: Path) -> None:
    """From each worker: the board cannot tell it. So it takes none of them for lost."""

    async def run() -> None:
        async with clustered(model, "1epd") as cluster:
            await until_all_see(cluster, "1epd")
            (front,) = cluster.fronts
            await front.fleet._loops.close()
            await cluster.board.accuse(front.fleet.owner, "it was silent")
            links = front.fleet._links._workers.values()
            await until(lambda: not any(each.channel and each.channel.is_open for each in links))
            assert front.ended == ["it was declared lost"] * 2
            assert (await front.service.status()).counters.get("workers_lost", 0) == 0
            assert all(each.is_alive for each in front.fleet.workers.values())
            assert all(cluster.board.knows(each.membership.epoch) for each in cluster.stages)

    asyncio.run(run())


def test_frames_of_a_lost_machine_are_not_waited_for(
    model: Path, questions: list[Question], expected: list[tuple[int, ...]]
) -> None:
    """A link to a machine without power does not end by itself."""

    async def run() -> None:
        async with clustered(model, "1e1p1d", num_fronts=1) as cluster:
            await until_all_see(cluster, "1e1p1d")
            silent, asked = cluster.media[0], list[object]()
            silent._kept.give = lambda call, _answer: asked.append(call)  # type: ignore[method-assign]
            asking = asyncio.create_task(cluster.fronts[0].ask_all(questions))
            await until(lambda: bool(asked))
            await cluster.board.accuse(silent.membership.epoch, "its machine has no power")
            await cluster.add_media()
            assert [answer.tokens for answer in await asking] == expected

    asyncio.run(run())


@pytest.mark.parametrize("late", ["e0", "d0"])
def test_a_worker_that_hears_late_of_another_one_loses_nothing(
    late: str, model: Path, questions: list[Question], expected: list[tuple[int, ...]]
) -> None:
    """Fronts know a new prefill worker before another one does, whose messages to it would be dropped.

    The late one also declares the old prefill worker lost when the new one has its name already.
    """

    async def run() -> None:
        async with clustered(model, "1e1p1d", num_fronts=1) as cluster:
            await until_all_see(cluster, "1e1p1d")
            delay_views(cluster.worker(late))
            await cluster.kill(cluster.worker("p0"))
            await cluster.add_stage()
            await until_all_see(cluster, "1e1p1d")
            answers = await cluster.fronts[0].ask_all(questions)
            assert [answer.tokens for answer in answers] == expected
            await settled(cluster)

    asyncio.run(run())


def delay_views(server: WorkerServer, seconds: float = 4.0) -> None:
    """Lets a worker see what it acknowledges at the board only so much later."""
    loop, take = asyncio.get_running_loop(), server.membership.on_view

    def take_later(view: View) -> None:
        loop.call_later(seconds, take, view)

    server.membership.on_view = take_later


def test_a_worker_that_is_slow_to_open_a_link_is_not_lost(
    model: Path, questions: list[Question], expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A front that starts on a busy machine may itself be what is slow."""
    num_slow = 0

    async def slow(address: Address, key: bytes) -> Link:
        nonlocal num_slow
        num_slow += 1
        if num_slow <= 6:
            raise LinkTimeoutError("no member has answered within 5 s")
        return await connect(address, key)

    async def run() -> None:
        async with clustered(model, "1e1p1d", num_fronts=1) as cluster:
            await until_all_see(cluster, "1e1p1d")
            monkeypatch.setattr(remote_fleet, "connect", slow)
            late = await cluster.add_front()
            await until_all_see(cluster, "1e1p1d")
            assert num_slow > 6
            assert [answer.tokens for answer in await late.ask_all(questions)] == expected
            assert (await cluster.fronts[0].service.status()).counters.get("workers_lost", 0) == 0
            assert cluster.ended == []

    asyncio.run(run())


@pytest.mark.parametrize("name", ["e0", "p0", "d0", "v0"])
def test_a_lost_worker_changes_no_token_of_any_front(
    name: str, model: Path, questions: list[Question], expected: list[tuple[int, ...]]
) -> None:
    async def run() -> None:
        async with clustered(model, "1e1p1d", num_fronts=2) as cluster:
            await until_all_see(cluster, "1e1p1d")
            asking = [asyncio.create_task(front.ask_all(questions)) for front in cluster.fronts]
            await until(lambda: all(front.service.attempts for front in cluster.fronts))
            await asyncio.sleep(0.1)
            if name == "v0":
                await cluster.kill_media(cluster.media[0])
                await cluster.add_media()
                assert cluster.media[-1].membership.info.incarnation == 2
            else:
                await cluster.kill(cluster.worker(name))
                server = await cluster.add_stage()
                assert (server.info.name, server.info.incarnation) == (name, 2)
            for answers in await asyncio.gather(*asking):
                assert [answer.tokens for answer in answers] == expected
            await settled(cluster)

    asyncio.run(run())


@pytest.mark.parametrize("is_new", [False, True])
def test_a_board_that_is_restarted_loses_nobody(
    is_new: bool, model: Path, questions: list[Question], expected: list[tuple[int, ...]]
) -> None:
    async def run() -> None:
        async with clustered(model, "1e1p1d", num_fronts=2) as cluster:
            await until_all_see(cluster, "1e1p1d")
            asking = [asyncio.create_task(front.ask_all(questions)) for front in cluster.fronts]
            await asyncio.sleep(0.2)
            await cluster.board.stop()
            await asyncio.sleep(0.3)
            cluster.board.unreachable = "front"  # they notice later that it is back
            all_have_called = cluster.board.restart(is_new=is_new)
            workers = [*cluster.stages, *cluster.media]
            await until(lambda: all(cluster.board.knows(each.membership.epoch) for each in workers))
            await asyncio.sleep(0.3)
            cluster.board.unreachable = None
            await until(lambda: all(cluster.board.knows(each.fleet.owner) for each in cluster.fronts))
            all_have_called.set()
            for answers in await asyncio.gather(*asking):
                assert [answer.tokens for answer in answers] == expected
            # It knows the names again, and gives new ones.
            server = await cluster.add_stage()
            assert server.info.name not in {"e0", "p0", "d0"}
            await until(lambda: len(cluster.fronts[0].fleet.workers) == 5)
            for front in cluster.fronts:
                assert (await front.service.status()).counters.get("workers_lost", 0) == 0
                assert front.ended == []
            assert cluster.ended == []

    asyncio.run(run())


def test_workers_that_join_get_work_and_those_that_leave_hand_theirs_on(
    model: Path, questions: list[Question], expected: list[tuple[int, ...]]
) -> None:
    async def run() -> None:
        async with clustered(model, "1e1p1d", num_fronts=2) as cluster:
            first = cluster.fronts[0]
            await until(lambda: topology_seen(first) == "1e1p1d")
            old = {name: cluster.worker(name) for name in ("e0", "p0", "d0")}
            asking = [asyncio.create_task(front.ask_all(questions)) for front in cluster.fronts]
            for name, server in old.items():
                # As in a rolling update: the old worker begins to leave while the new one is started.
                draining = asyncio.create_task(server.drain(NEVER_S))
                await until(lambda name=name: bool(first.fleet.workers[name].leaving))
                await asyncio.sleep(0.1)
                new = await cluster.add_stage()
                assert new.info.roles == server.info.roles, name
                assert await draining
                await server.close()
            for answers in await asyncio.gather(*asking):
                assert [answer.tokens for answer in answers] == expected
            for front in cluster.fronts:
                assert (await front.service.status()).counters.get("workers_lost", 0) == 0
            assert [a.tokens for a in await first.ask_all(questions[:4])] == expected[:4]
            await settled(cluster)

    asyncio.run(run())


def test_a_new_release_comes_up_beside_the_old_one(
    model: Path, questions: list[Question], expected: list[tuple[int, ...]]
) -> None:
    """As Serve updates with a surge: all new workers are there before the first old one leaves."""

    async def run() -> None:
        async with clustered(model, "1e1p1d", num_fronts=2) as cluster:
            first = cluster.fronts[0]
            await until(lambda: topology_seen(first) == "1e1p1d")
            old = cluster.stages.copy()
            asking = [asyncio.create_task(front.ask_all(questions)) for front in cluster.fronts]
            new = [await cluster.add_stage(release="next") for _ in old]
            assert topology_name([server.info.roles for server in new]) == "1e1p1d"
            await asyncio.gather(*(server.drain(NEVER_S) for server in old))
            for server in old:
                await server.close()
            for answers in await asyncio.gather(*asking):
                assert [answer.tokens for answer in answers] == expected
            assert [a.tokens for a in await first.ask_all(questions[:4])] == expected[:4]
            await settled(cluster)

    asyncio.run(run())


def test_any_front_switches_roles_and_all_move_their_answers(
    model: Path, questions: list[Question], expected: list[tuple[int, ...]]
) -> None:
    async def run() -> None:
        held = HeldAnswers()
        async with clustered(model, "1e1p2d", num_fronts=2, pace=held) as cluster:
            leader, other = cluster.fronts
            await until_all_see(cluster, "1e1p2d")
            held.is_on = True
            assert (leader.service.switcher.leads, other.service.switcher.leads) == (True, False)
            asking = [asyncio.create_task(front.ask_all(questions)) for front in cluster.fronts]
            await until(
                lambda: all(
                    any(each.decode_worker == "d1" and each.is_handed_over for each in attempts.values())
                    for attempts in (leader.service.attempts, other.service.attempts)
                )
            )
            switch = await other.service.switch_roles("d1", frozenset({"prefill"}))
            held.is_on = False
            assert (switch.before, switch.after) == ("d", "p")
            assert [each.worker for each in leader.service.switcher.last] == ["d1"]
            await until_all_see(cluster, "1e2p1d")
            for answers in await asyncio.gather(*asking):
                assert [answer.tokens for answer in answers] == expected
            # A worker that comes for a lost one takes its roles, also those it was switched to.
            await cluster.kill(cluster.worker("d1"))
            again = await cluster.add_stage()
            assert (again.info.name, again.info.roles) == ("d1", frozenset({"prefill"}))
            # The next front leads once the first is gone.
            await leader.kill()
            await until(lambda: other.service.switcher.leads)
            await until(lambda: topology_seen(other) == "1e2p1d")
            await other.service.switch_roles("d1", frozenset({"decode"}))
            assert [a.tokens for a in await other.ask_all(questions[:4])] == expected[:4]
            await settled(cluster)

    asyncio.run(run())


def test_fronts_queue_as_one(model: Path) -> None:
    """What waits at one front counts against the limit of another."""

    async def run() -> None:
        async with clustered(model, "1e1p1d", num_fronts=2) as cluster:
            first, second = cluster.fronts
            await until_all_see(cluster, "1e1p1d")
            await cluster.kill(cluster.worker("d0"))
            asking = [asyncio.create_task(first.ask(Question((), f"what {n}?"))) for n in range(4)]
            await until(lambda: bool((others := second.service.queue.others) and others.num_waiting == 4))
            second.service.queue.max_waiting = 4
            with pytest.raises(OverloadedError, match="4 requests wait"):
                await second.ask(Question((), "one more"))
            await cluster.add_stage()
            assert all(answer.tokens for answer in await asyncio.gather(*asking))
            await until(lambda: bool((others := second.service.queue.others) and not others.num_waiting))
            assert (await second.ask(Question((), "one more"))).tokens
            await first.kill()
            await until(lambda: second.service.queue.others is None)
            await settled(cluster)

    asyncio.run(run())


def test_a_worker_that_is_silent_is_lost_for_all(model: Path) -> None:
    async def run() -> None:
        async with clustered(model, "1e1p1d") as cluster:
            front = cluster.fronts[0]
            await until(lambda: topology_seen(front) == "1e1p1d")
            await cluster.silence(cluster.worker("d0"))
            await until(lambda: not front.fleet.workers["d0"].is_alive)
            again = await cluster.add_stage()
            assert again.info.name == "d0"
            await until(lambda: front.fleet.workers["d0"].is_alive)

    asyncio.run(run())


def test_a_worker_that_comes_for_a_silent_one_takes_its_place(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serve's own check of a stopped worker may be quicker than the board's."""
    monkeypatch.setattr(boards, "_REPLACED_S", HANG_S)

    async def run() -> None:
        async with clustered(model, "1e1p1d") as cluster:
            front = cluster.fronts[0]
            await until(lambda: topology_seen(front) == "1e1p1d")
            assert cluster.board.board is not None
            cluster.board.board._hang_s = NEVER_S
            await cluster.silence(cluster.worker("p0"))
            again = await cluster.add_stage()
            assert (again.info.name, again.info.incarnation) == ("p0", 2)
            await until(lambda: topology_seen(front) == "1e1p1d")

    asyncio.run(run())
