"""Parts of a fleet of processes that need no Ray: order of messages, processes that end, worker threads."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.errors import EPDError, ModelError, WorkerFaultError, http_status
from serve_app.messages import Abort, CancelTickets, Redirect
from serve_app.network.memory import PoolFiles
from serve_app.ray.process import WatchedProcess
from serve_app.ray.thread import ActorThread
from serve_app.ray.worker import CallSequencer
from serve_app.worker.worker_roles import EncodeRole
from serve_app.worker.worker_stages import WorkerSettings
from serve_app.worker.worker_thread import Call
from stages.encode.encoder_pool import EncoderPoolShape

SOON_S = 10.0


@given(st.permutations(range(8)), st.data())
def test_calls_pass_in_the_order_of_their_numbers(numbers: list[int], data: st.DataObject) -> None:
    """Whatever the order in which they come, and however long each takes before it can pass."""
    naps = data.draw(st.lists(st.integers(0, 3), min_size=8, max_size=8))
    passed: list[int] = []

    async def call(line: CallSequencer, number: int) -> None:
        for _ in range(naps[number]):
            await asyncio.sleep(0)
        await line.wait(number)
        passed.append(number)
        line.passed(number)

    async def run() -> None:
        line = CallSequencer()
        await asyncio.gather(*(call(line, number) for number in numbers))

    asyncio.run(asyncio.wait_for(run(), SOON_S))
    assert passed == list(range(8))


@given(st.permutations(range(8)), st.sets(st.integers(0, 7)))
def test_a_call_that_gives_up_leaves_no_gap(numbers: list[int], given_up: set[int]) -> None:
    """By an error before its turn, or cancelled while it waits for it."""
    passed: list[int] = []

    async def call(line: CallSequencer, number: int) -> None:
        try:
            if number in given_up and number % 2:
                raise ValueError("frames that cannot be read")
            await line.wait(number)
            passed.append(number)
        finally:
            line.passed(number)

    async def run() -> None:
        line = CallSequencer()
        calls = {}
        for number in numbers:
            calls[number] = asyncio.create_task(call(line, number))
            await asyncio.sleep(0)
            if number in given_up:
                calls[number].cancel()
        await asyncio.gather(*calls.values(), return_exceptions=True)

    asyncio.run(asyncio.wait_for(run(), SOON_S))
    assert passed == sorted(passed)
    assert set(passed) >= set(range(8)) - given_up


def test_a_call_that_never_comes_is_not_waited_for_for_ever() -> None:
    async def run() -> None:
        line = CallSequencer()
        with pytest.raises(TimeoutError):
            await line.wait(1, 0.01)

    asyncio.run(asyncio.wait_for(run(), SOON_S))


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_the_end_of_a_process_is_told_at_once(process: subprocess.Popen[bytes]) -> None:
    async def run() -> str:
        told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        watched = WatchedProcess(process.pid, told.set_result)
        process.kill()
        reason = await asyncio.wait_for(told, SOON_S)
        watched.kill()  # it may be given up again
        return reason

    assert asyncio.run(run()) == "its process ended"


def test_a_process_that_is_stopped_can_be_ended(process: subprocess.Popen[bytes]) -> None:
    told: list[str] = []

    async def run() -> None:
        watched = WatchedProcess(process.pid, told.append)
        os.kill(process.pid, signal.SIGSTOP)
        watched.kill()
        await asyncio.to_thread(process.wait, SOON_S)

    asyncio.run(run())
    assert process.returncode == -signal.SIGKILL
    assert told == []


def test_a_process_that_is_gone_cannot_be_watched(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()

    async def run() -> None:
        with pytest.raises(ProcessLookupError):
            WatchedProcess(process.pid, print)

    asyncio.run(run())


class NoTransport:
    """For an encoder that nobody asks anything of."""

    def embeddings(self, _name: str, shape: EncoderPoolShape) -> Any:
        return shape.build(), SilentConnector()

    def kv(self, _name: str, _shape: Any) -> Any:
        raise NotImplementedError

    def weights(self, _path: Path, _dtype: Any) -> None: ...

    def close(self, _name: str) -> None: ...


class SilentConnector:
    name = "e0.encode"
    is_broken = False

    def poll(self) -> list[Any]:
        if self.is_broken:
            raise KeyError("a bug")
        return []


def settings(path: Path) -> WorkerSettings:
    return WorkerSettings(path, num_embeddings=64)


async def handled(thread: ActorThread, message: Any) -> Any:
    reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    thread.put(Call(message, None, reply))
    return await asyncio.wait_for(reply, SOON_S)


def test_a_thread_answers_and_goes_on_after_refusals(checkpoints: dict[str, Path]) -> None:
    async def run() -> None:
        thread = ActorThread("e0", frozenset({"encode"}), settings(checkpoints["qwen2_5_vl"]), NoTransport())
        await thread.start()
        assert await handled(thread, CancelTickets(("none",))) is None
        with pytest.raises(EPDError, match="no role 'prefill'"):
            await handled(thread, Redirect("r", None))  # type: ignore[arg-type]
        assert await handled(thread, Abort(("none",))) is None
        assert not any(report.events or report.outputs for report in await thread.take_reports(0.01))
        assert thread.failure == ""
        thread.stop()

    asyncio.run(run())


def raise_bug(*_: Any) -> None:
    raise ZeroDivisionError("a bug")


def test_a_handler_that_raises_refuses_its_message_and_keeps_the_worker(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        thread = ActorThread("e0", frozenset({"encode"}), settings(checkpoints["qwen2_5_vl"]), NoTransport())
        await thread.start()
        with monkeypatch.context() as patch:
            patch.setattr(EncodeRole, "cancel", raise_bug)
            with pytest.raises(
                WorkerFaultError, match=r"'e0' .* CancelTickets .*ZeroDivisionError"
            ) as caught:
                await handled(thread, CancelTickets(("none",)))
        assert http_status(caught.value) == 500
        assert await handled(thread, CancelTickets(("none",))) is None
        assert thread.failure == ""
        thread.stop()

    asyncio.run(run())


def test_a_handler_that_raises_and_breaks_the_books_ends_the_worker(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        thread = ActorThread("e0", frozenset({"encode"}), settings(checkpoints["qwen2_5_vl"]), NoTransport())
        await thread.start()
        monkeypatch.setattr(EncodeRole, "cancel", raise_bug)
        monkeypatch.setattr(EncodeRole, "check_integrity", lambda _: broken_books())
        with pytest.raises(WorkerFaultError):
            await handled(thread, CancelTickets(("none",)))
        async with asyncio.timeout(SOON_S):
            while not thread.failure:
                await thread.take_reports(SOON_S)
        assert thread.failure == "AssertionError: blocks are missing"

    asyncio.run(run())


def broken_books() -> None:
    raise AssertionError("blocks are missing")


def test_a_bug_in_a_step_ends_the_thread_with_its_reason(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        thread = ActorThread("e0", frozenset({"encode"}), settings(checkpoints["qwen2_5_vl"]), NoTransport())
        await thread.start()
        monkeypatch.setattr(SilentConnector, "is_broken", True)
        thread.wake()
        async with asyncio.timeout(SOON_S):
            while not thread.failure:  # other reports may come before
                await thread.take_reports(SOON_S)
        assert thread.failure == "KeyError: 'a bug'"

    asyncio.run(run())


def test_a_model_that_does_not_load_is_told_at_the_start(tmp_path: Path) -> None:
    async def run() -> None:
        thread = ActorThread("e0", frozenset({"encode"}), settings(tmp_path / "none"), NoTransport())
        with pytest.raises(ModelError):
            await thread.start()

    asyncio.run(run())


def write_whole(path: Path) -> None:
    path.write_bytes(b"whole")


def test_a_shared_file_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.network.memory._MEMORY_FOLDER", tmp_path)
    files = PoolFiles("shared-test")
    written: list[Path] = []

    def write(path: Path) -> None:
        written.append(path)
        time.sleep(0.05)
        write_whole(path)

    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(files.shared, "weights", 7, write) for _ in range(4)]
        paths = {each.result() for each in asked}
    assert len(written) == 1
    assert [path.read_bytes() for path in paths] == [b"whole"]
    files.remove_all()
    assert files.paths() == []


def test_a_shared_file_that_cannot_be_written_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve_app.network.memory._MEMORY_FOLDER", tmp_path)
    files = PoolFiles("shared-test")

    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        files.shared("weights", 7, fail)
    assert files.shared("weights", 7, write_whole).read_bytes() == b"whole"
    files.remove_all()
