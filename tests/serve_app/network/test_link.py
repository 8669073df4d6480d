"""Links: what arrives, in which order, and who gets none."""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from epd.errors import RequestError
from epd.serve_app.network.calls import Answer, Channel, Channels
from epd.serve_app.network.link import SILENT_S, Address, Link, LinkClosedError, Listener, connect, listen

KEY = secrets.token_bytes(32)
HOST = "127.0.0.1"


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[Link, Link]]:
    accepted: asyncio.Future[Link] = asyncio.get_running_loop().create_future()
    listener = await listen(HOST, KEY, accepted.set_result)
    try:
        mine = await connect(listener.address, KEY)
        yield mine, await accepted
        mine.close()
    finally:
        await listener.close()


async def received(link: Link, number: int, send: Callable[[], None]) -> list[Any]:
    messages: list[Any] = []
    is_done = asyncio.Event()

    def take(message: Any) -> None:
        messages.append(message)
        if len(messages) == number:
            is_done.set()

    link.on_message = take
    send()
    await is_done.wait()
    return messages


def run(work: Callable[[], Awaitable[Any]]) -> Any:
    async def all_of_it() -> Any:
        return await work()

    return asyncio.run(all_of_it())


def test_links_work_in_the_event_loop_of_replicas() -> None:
    """Serve runs replicas in uvloop, whose transports are no `asyncio.Transport`."""
    frames = np.arange(3_000_000, dtype=np.uint8)

    async def pass_frames() -> list[Any]:
        async with linked() as (mine, theirs):
            return await received(theirs, 2, lambda: [mine.send(each) for each in ("small", frames)])  # type: ignore[func-returns-value]

    small, large = uvloop.run(pass_frames())
    assert small == "small"
    assert np.array_equal(large, frames)


@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_link_that_was_closed_here_sends_no_more(runner: Callable[..., Any]) -> None:
    """Its end is noted in a later turn; from Python 3.12 on, its transport raises TypeError until then."""

    async def send_late() -> list[Any]:
        messages: list[Any] = []
        async with linked() as (mine, theirs):
            ended = asyncio.Event()
            theirs.on_message, theirs.on_close = messages.append, lambda _reason: ended.set()
            mine.send("in time")
            mine.close()
            mine.send("late")
            await ended.wait()
        return messages

    assert runner(send_late()) == ["in time"]


SIZES = st.lists(st.one_of(st.integers(0, 200), st.integers(60_000, 140_000)), min_size=1, max_size=12)


@given(sizes=SIZES, arrays=st.lists(st.integers(0, 3), min_size=12, max_size=12))
@settings(max_examples=40, deadline=None)
def test_messages_of_any_size_arrive_whole_and_in_order(sizes: list[int], arrays: list[int]) -> None:
    rng = np.random.default_rng(len(sizes))
    messages = [
        (number, secrets.token_bytes(size), [rng.integers(0, 255, size, np.uint8) for _ in range(num)])
        for number, (size, num) in enumerate(zip(sizes, arrays, strict=False))
    ]

    async def work() -> None:
        async with linked() as (mine, theirs):
            for sender, receiver in ((mine, theirs), (theirs, mine)):
                got = await received(receiver, len(messages), lambda s=sender: [s.send(m) for m in messages])
                assert [(number, data) for number, data, _ in got] == [(n, d) for n, d, _ in messages]
                for (_, _, sent), (_, _, came) in zip(messages, got, strict=True):
                    assert len(sent) == len(came)
                    assert all(np.array_equal(a, b) for a, b in zip(sent, came, strict=True))

    run(work)


def test_a_received_array_is_writable_and_of_its_own() -> None:
    async def work() -> None:
        async with linked() as (mine, theirs):
            array = np.arange(1_000_000, dtype=np.float32).reshape(1000, 1000)
            (came,) = await received(theirs, 1, lambda: mine.send(array))
            came[0, 0] = 7
            assert came.flags.writeable
            assert array[0, 0] == 0
            assert np.array_equal(came[1:], array[1:])

    run(work)


def test_who_lacks_the_key_is_refused_before_anything_is_read() -> None:
    async def work() -> None:
        accepted: list[Link] = []
        listener = await listen(HOST, KEY, accepted.append)
        with pytest.raises(LinkClosedError, match="no member answers"):
            await connect(listener.address, secrets.token_bytes(32))
        assert accepted == []
        # A client that says nothing, or whatever else, gets nothing but a nonce.
        reader, writer = await asyncio.open_connection(HOST, listener.address.port)
        writer.write(b"x" * 64)
        assert len(await reader.read(-1)) == 32
        writer.close()
        assert accepted == []
        await listener.close()

    run(work)


def test_a_link_that_has_ended_is_held_no_longer_than_until_the_next() -> None:
    """It has memory of its own: of a message that did not come whole, up to 1 GiB."""

    async def work() -> None:
        accepted: list[Link] = []
        listener = await listen(HOST, KEY, accepted.append)
        for number in range(1, 4):
            mine = await connect(listener.address, KEY)
            while len(accepted) < number:
                await asyncio.sleep(0.01)
            assert list(listener._links) == accepted[-1:]
            mine.close()
            while accepted[-1].is_open:
                await asyncio.sleep(0.01)
        await listener.close()

    run(work)


def test_of_too_many_strangers_the_oldest_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epd.serve_app.network.link._MAX_STRANGERS", 2)

    async def work() -> None:
        listener = await listen("127.0.0.1", KEY, lambda _link: None)
        address, opened = listener.address, []
        for _ in range(3):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            await reader.readexactly(1)  # it is a stranger now
            opened.append((reader, writer))
        ended = [asyncio.ensure_future(reader.read()) for reader, _ in opened]
        await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
        assert [each.done() for each in ended] == [True, False, False]
        await listener.close()
        await asyncio.gather(*ended)
        for _, writer in opened:
            writer.close()

    run(work)


def test_a_server_without_the_key_gets_no_message() -> None:
    async def work() -> None:
        seen = bytearray()

        async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(secrets.token_bytes(32))
            seen.extend(await reader.readexactly(64))
            writer.write(secrets.token_bytes(32))
            seen.extend(await reader.read(-1))
            writer.close()

        server = await asyncio.start_server(pretend, HOST, 0)
        address = Address(HOST, server.sockets[0].getsockname()[1])
        with pytest.raises(LinkClosedError):
            await connect(address, KEY)
        assert len(seen) == 64
        server.close()

    run(work)


def test_a_claimed_size_allocates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with linked() as (mine, theirs):
            ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            theirs.on_close = ended.set_result
            assert mine._transport is not None
            mine._transport.write((1 << 62).to_bytes(8, "big") + bytes(8))
            assert "was announced" in await ended

    run(work)


# Calls


@asynccontextmanager
async def called(on_call: Callable[[Any, Answer], None]) -> AsyncIterator[tuple[Channels, Listener]]:
    served: list[Channel] = []

    def accept(link: Link) -> None:
        channel = Channel(link)
        channel.on_call = on_call
        served.append(channel)

    listener = await listen(HOST, KEY, accept)
    channels = Channels(KEY, "hello")
    try:
        yield channels, listener
    finally:
        channels.close()
        await listener.close()


def test_each_call_gets_its_own_answer_whatever_their_order() -> None:
    async def work() -> None:
        waiting: list[tuple[int, Answer]] = []

        def on_call(value: int, answer: Answer) -> None:
            waiting.append((value, answer))
            if len(waiting) == 20:
                for number, reply in reversed(waiting):
                    reply(number * 2)

        async with called(on_call) as (channels, listener):
            calls = [channels.call(listener.address, number) for number in range(20)]
            assert await asyncio.gather(*calls) == [2 * number for number in range(20)]

    run(work)


def test_errors_of_the_other_end_are_raised_here() -> None:
    async def work() -> None:
        def on_call(value: Any, answer: Answer) -> None:
            if value == "bug":
                raise ValueError("with a secret")
            answer(RequestError("received x; allowed y; send y"))

        async with called(on_call) as (channels, listener):
            with pytest.raises(RequestError, match="allowed y"):
                await channels.call(listener.address, 1)
            with pytest.raises(Exception, match="ValueError") as caught:
                await channels.call(listener.address, "bug")
            assert "secret" not in str(caught.value)

    run(work)


def test_calls_in_flight_end_with_their_link() -> None:
    async def work() -> None:
        async with called(lambda _value, _answer: None) as (channels, listener):
            call = asyncio.ensure_future(channels.call(listener.address, 1))
            while not listener.links:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.01)
            listener.links[0].close()
            with pytest.raises(LinkClosedError):
                await call
            await listener.close()
            with pytest.raises(LinkClosedError):
                await channels.call(listener.address, 2)

    run(work)


NAMESPACE = ("unshare", "--map-root-user", "--net")


def may_cut_a_network() -> bool:
    """Returns whether this user may make a network of its own, in which packets can be dropped."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    return subprocess.run([*NAMESPACE, "ip", "link", "set", "lo", "up"], capture_output=True).returncode == 0


@pytest.mark.skipif(not may_cut_a_network(), reason="needs a network namespace, which is not permitted here")
def test_links_to_a_machine_that_vanishes_end_by_themselves() -> None:
    """No packet says so: idle, with bytes under way, and with a call that is not answered."""
    command = [*NAMESPACE, sys.executable, "-m", "tests.serve_app.network.vanishing", "3", "1", "1"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    ended_s = json.loads(run.stdout)
    assert set(ended_s) == {"idle", "pushes", "calls"}
    assert all(1.0 < each < 60.0 for each in ended_s.values()), ended_s  # by default after many minutes


def test_both_ends_of_a_link_ask_for_signs_of_life() -> None:
    async def work() -> None:
        async with linked() as both:
            for each in both:
                transport = each._transport
                assert transport is not None
                ours = transport.get_extra_info("socket")
                assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                silent_s = ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) + ours.getsockopt(
                    socket.IPPROTO_TCP, socket.TCP_KEEPINTVL
                ) * ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT)
                assert silent_s == SILENT_S
                timeout_ms = ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
                assert timeout_ms == 1000 * SILENT_S

    run(work)
