"""Worker threads: what they answer, what costs them a message, and what ends them."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from epd.errors import EPDError, ModelError, WorkerFaultError, http_status
from epd.serve_app.messages import Abort, CancelTickets, Redirect
from epd.serve_app.worker.worker_roles import EncodeRole
from epd.serve_app.worker.worker_settings import WorkerSettings
from epd.serve_app.worker.worker_thread import Call
from epd.stages.encode.encoder_pool import EncoderPoolShape
from tests.serve_app.worker.threads import KeepingThread

SOON_S = 60.0


class NoTransport:
    """For an encoder that nobody asks anything of."""

    def embeddings(self, _name: str, shape: EncoderPoolShape, _device: Any) -> Any:
        return shape.build(), SilentConnector()

    def kv(self, _name: str, _shape: Any, _device: Any, _sharing: Any = None) -> Any:
        raise NotImplementedError

    def weights(self, _path: Path, _placement: Any) -> None: ...

    def routes(self) -> dict[str, str]:
        return {}

    def close(self, _name: str) -> None: ...


class SilentConnector:
    name = "e0.encode"
    is_broken = False

    def poll(self) -> list[Any]:
        if self.is_broken:
            raise KeyError("a bug")
        return []


def encoder(path: Path) -> KeepingThread:
    settings = WorkerSettings(path, num_embeddings=64)
    return KeepingThread("e0", frozenset({"encode"}), settings, NoTransport())


async def handled(thread: KeepingThread, message: Any) -> Any:
    reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    thread.put(Call(message, None, reply))
    return await asyncio.wait_for(reply, SOON_S)


def test_a_thread_answers_and_goes_on_after_refusals(checkpoints: dict[str, Path]) -> None:
    async def run() -> None:
        thread = encoder(checkpoints["qwen2_5_vl"])
        await thread.start()
        assert await handled(thread, CancelTickets(("none",))) is None
        with pytest.raises(EPDError, match="no role 'prefill'"):
            await handled(thread, Redirect("r", None))  # type: ignore[arg-type]
        assert await handled(thread, Abort(("none",))) is None
        assert not any(report.events or report.outputs for report in await thread.take_reports(0.01))
        assert thread.failure == ""
        thread.stop()

    asyncio.run(run())


@pytest.mark.parametrize(("before_s", "after_s"), [(0.005, 0.0005), (0.00025, 0.00025)])
def test_threads_beside_it_give_up_pythons_lock_soon(
    checkpoints: dict[str, Path], before_s: float, after_s: float
) -> None:
    async def run() -> None:
        thread = encoder(checkpoints["qwen2_5_vl"])
        await thread.start()
        thread.stop()

    kept_s = sys.getswitchinterval()
    sys.setswitchinterval(before_s)
    try:
        asyncio.run(run())
        assert sys.getswitchinterval() == pytest.approx(after_s)
    finally:
        sys.setswitchinterval(kept_s)


def raise_bug(*_: Any) -> None:
    raise ZeroDivisionError("a bug")


def test_a_handler_that_raises_refuses_its_message_and_keeps_the_worker(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        thread = encoder(checkpoints["qwen2_5_vl"])
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
        thread = encoder(checkpoints["qwen2_5_vl"])
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
        thread = encoder(checkpoints["qwen2_5_vl"])
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
        thread = encoder(tmp_path / "none")
        with pytest.raises(ModelError):
            await thread.start()

    asyncio.run(run())
