"""Slots are shared by owners: nobody has more than allowed, and nobody waits behind one who has many."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from epd.serve_app.fair_threads import FairShare, FairThreads, LoopTurns


def test_one_owner_leaves_slots_to_others() -> None:
    share: FairShare[str, str] = FairShare(4, 2)
    for number in range(8):
        share.ask("greedy", f"g{number}")
    assert share.admit() == ["g0", "g1"]
    share.ask("other", "o0")
    assert share.admit() == ["o0"]


def test_owners_take_turns() -> None:
    share: FairShare[str, str] = FairShare(1, 1)
    for ticket in ("a0", "a1", "a2"):
        share.ask("a", ticket)
    assert share.admit() == ["a0"]
    share.ask("b", "b0")
    share.release("a")
    assert share.admit() == ["a1"]
    share.release("a")
    assert share.admit() == ["b0"]
    share.ask("c", "c0")
    share.leave("a", "a2")
    share.release("b")
    assert share.admit() == ["c0"]


def test_whoever_has_fewest_is_next() -> None:
    share: FairShare[str, str] = FairShare(3, 3)
    for ticket in ("a0", "a1", "a2", "a3"):
        share.ask("a", ticket)
    assert share.admit() == ["a0", "a1", "a2"]
    share.ask("b", "b0")
    share.release("a")
    assert share.admit() == ["b0"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["ask", "release"])), max_size=60))
def test_never_more_than_there_are_and_none_idle(steps: list[tuple[str, str]]) -> None:
    share: FairShare[str, tuple[str, int]] = FairShare(3, 2)
    held: list[str] = []
    for number, (owner, step) in enumerate(steps):
        if step == "ask":
            share.ask(owner, (owner, number))
        elif owner in held:
            held.remove(owner)
            share.release(owner)
        held += [ticket[0] for ticket in share.admit()]
        assert len(held) == share.num_held <= 3
        assert all(held.count(each) <= 2 for each in "abc")
        assert not (share.num_waiting and len(held) < 3 and len(set(held)) == 3)


def test_few_things_begin_in_a_turn_of_the_loop_though_each_ends_at_once() -> None:
    """Twenty that wait for nothing: what else is ready has its turn after every four."""

    async def begun() -> Counter[int]:
        turns, number, counts = LoopTurns(4, 4), 0, Counter[int]()

        async def page() -> None:
            async with turns.turn("one address"):
                counts[number] += 1

        pages = asyncio.gather(*(page() for _ in range(20)))
        while not pages.done():
            await asyncio.sleep(0)
            number += 1
        return counts

    counts = asyncio.run(begun())
    assert counts.total() == 20
    assert max(counts.values()) == 4


def test_clients_of_owners_take_turns_and_none_has_the_last_thread() -> None:
    """Ten requests of one client, three pieces of work each, beside two of another."""
    begun: list[str] = []
    gates = {name: threading.Semaphore(0) for name in ("many", "one")}

    def work(name: str) -> None:
        begun.append(name)
        gates[name].acquire()

    async def until(count: int) -> None:
        while len(begun) < count:
            await asyncio.sleep(0.001)

    async def run() -> None:
        threads = FairThreads("test", 4, max_per_owner=1, num_for_others=1)

        def asked(name: str, request: int, *, count: int) -> list[asyncio.Future[None]]:
            run = threads.run
            return [
                asyncio.ensure_future(run(request, lambda: work(name), client=name)) for _ in range(count)
            ]

        alone = asked("many", 0, count=3)
        await until(1)
        assert threads.num_busy == 1, "one of each request"
        work_of_many = [each for request in range(1, 10) for each in asked("many", request, count=3)]
        await until(3)
        work_of_one = asked("one", 10, count=1) + asked("one", 11, count=1)
        await until(4)
        assert begun == ["many", "many", "many", "one"]
        gates["many"].release()
        await until(5)
        assert begun[4:] == ["one"], "its turn comes before those that came first"
        for gate in gates.values():
            gate.release(100)
        await asyncio.gather(*alone, *work_of_many, *work_of_one)
        assert threads.num_busy == 0
        threads.close()

    asyncio.run(run())
    assert Counter(begun) == {"many": 30, "one": 2}
