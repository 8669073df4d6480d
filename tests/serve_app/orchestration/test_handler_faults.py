"""Exceptions at every handler of every role, before and after it has acted, of types that nobody expects.

The request that meets one fails with a typed error, or is answered as if nothing had been; its worker lives,
the others get the tokens that they would have had, and nothing of it is left anywhere.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from epd.errors import EPDError, InternalError, http_status
from epd.sampling_params import SamplingParams
from epd.serve_app.media.frame_reader import FrameReader
from epd.serve_app.media.media_worker import MediaWorker
from epd.serve_app.media_messages import (
    CloseStream,
    FetchMedia,
    PlanImages,
    ReadFrames,
    ReadImage,
    ReleaseMedia,
)
from epd.serve_app.messages import (
    Abort,
    CancelTickets,
    EncodeGroup,
    Message,
    PeerLost,
    Prefill,
    Redirect,
    Reissue,
    Reserve,
)
from epd.serve_app.worker.worker_core import WorkerCore
from tests.media import write_image, write_video
from tests.serve_app.deployments import Deployment, Question, deployed, undisturbed, until_busy
from tests.serve_app.media_fleet import reference_to

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")

SHORT = SamplingParams(max_tokens=8, ignore_eos=True)
POISON = "poison"
ERRORS: tuple[type[Exception], ...] = (
    ZeroDivisionError,
    MemoryError,
    KeyError,
    AssertionError,
    ValueError,
    TypeError,
    OverflowError,
    OSError,
    RuntimeError,
    RecursionError,
)
# Messages with work, and those that clean up after a request that is over.
WORK: tuple[type[Message[Any]], ...] = (ReadFrames, EncodeGroup, Reserve, Prefill)
CLEANUP: tuple[type[Message[Any]], ...] = (Abort, CancelTickets, CloseStream)
# Those that media workers handle without a reader of frames.
MEDIA: tuple[type[Message[Any]], ...] = (FetchMedia, PlanImages, ReadImage)
# Those that follow the loss of a worker.
RECOVERY: tuple[type[Message[Any]], ...] = (PeerLost, Reissue, Redirect)


@dataclass
class Fault:
    """Raised by handlers of one kind of message about the poisoned request, or about no one request.

    num_left: how often it is raised from now on.
    """

    kind: type[Message[Any]]
    error: Exception
    is_after: bool
    num_left: int
    num_raised: int = 0

    def is_met_by(self, message: Message[Any]) -> bool:
        is_met = isinstance(message, self.kind) and self.num_left > 0 and is_poisoned(message)
        self.num_left -= is_met
        self.num_raised += is_met
        return is_met


def is_poisoned(message: Any) -> bool:
    """Tickets are of no one request: all of them count."""
    if isinstance(message, Prefill):
        return message.request.request_id.startswith(f"/{POISON}")
    if isinstance(message, Abort):
        return any(each.startswith(f"/{POISON}") for each in message.request_ids)
    if isinstance(message, ReadFrames | CloseStream):
        return message.stream_id.startswith(f"/{POISON}")
    if isinstance(message, FetchMedia | PlanImages | ReleaseMedia | ReadImage):
        hold = message.source.hold if isinstance(message, ReadImage) else message.hold
        return hold.startswith(f"/{POISON}")
    return isinstance(message, (*RECOVERY, CancelTickets)) or message.request_id.startswith(f"/{POISON}")


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> list[Fault]:
    """What is in it is raised."""
    faults: list[Fault] = []
    for handler in (WorkerCore, FrameReader):
        monkeypatch.setattr(handler, "handle", tampered(handler.handle, faults))
    return faults


def tampered(handle: Callable[..., Any], faults: list[Fault]) -> Callable[..., Any]:
    def handle_or_raise(self: Any, message: Message[Any], *bulk: Any) -> Any:
        met = [fault for fault in faults if fault.is_met_by(message)]
        for fault in met:
            if not fault.is_after:
                raise fault.error
        reply = handle(self, message, *bulk)
        for fault in met:
            raise fault.error
        return reply

    return handle_or_raise


@pytest.fixture
def media_faults(monkeypatch: pytest.MonkeyPatch) -> list[Fault]:
    """As `faults`, at media workers, whose handlers return at once and fail later."""
    faults: list[Fault] = []
    submit = MediaWorker.submit

    def submit_or_fail(self: MediaWorker, message: Message[Any], *more: Any) -> Future[Any]:
        met = [fault for fault in faults if fault.is_met_by(message)]
        if not met:
            return submit(self, message, *more)
        failed: Future[Any] = Future()
        if met[0].is_after:
            submit(self, message, *more).add_done_callback(lambda _: failed.set_exception(met[0].error))
        else:
            failed.set_exception(met[0].error)
        return failed

    monkeypatch.setattr(MediaWorker, "submit", submit_or_fail)
    return faults


def drawn_faults(kinds: tuple[type[Message[Any]], ...], num_times: int) -> list[Fault]:
    rng = random.Random(str(kinds))
    return [
        Fault(kind, rng.choice(ERRORS)("drawn"), is_after, num_times)
        for kind in kinds
        for is_after in (False, True)
    ]


async def ask_poison(deployment: Deployment, medium: Path) -> None:
    async with deployment.requested(Question((medium,), "who?", SHORT)) as request:
        poisoned = replace(request, request_id=f"{POISON}{medium.stem}")
        async for _ in deployment.service.answer(poisoned):
            pass


async def ask_poisoned_media(deployment: Deployment, medium: Path) -> None:
    service, references = deployment.service, (reference_to(medium),)
    async with service.media.sources(f"{POISON}{medium.stem}", references) as sources:
        async for _ in service.answer(Question((medium,), "who?", SHORT).request(sources)):
            pass


@pytest.fixture(scope="module")
def others(media: dict[str, Path]) -> list[Question]:
    kinds = ((media["image"],), (), (media["tall_video"],))
    return [Question(paths, f"what {number}?", SHORT) for number, paths in enumerate(kinds)]


@pytest.fixture(scope="module")
def expected(checkpoints: dict[str, Path], others: list[Question]) -> list[tuple[int, ...]]:
    return undisturbed(checkpoints["qwen2_5_vl"], others)


def new_medium(folder: Path, number: int, kind: type[Message[Any]]) -> Path:
    """One that no cache knows."""
    if kind in (ReadFrames, CloseStream):
        return write_video(folder / f"{number}.mp4", num_frames=8, seed=number + 10)
    return write_image(folder / f"{number}.png", seed=number + 10)


async def num_lost(deployment: Deployment) -> float:
    return (await deployment.service.status()).counters.get("workers_lost", 0)


@pytest.mark.parametrize("topology", ["2e2p2d", "1epd"])
def test_work_that_raises_fails_its_request_alone(
    topology: str,
    checkpoints: dict[str, Path],
    others: list[Question],
    expected: list[tuple[int, ...]],
    faults: list[Fault],
    tmp_path: Path,
) -> None:
    async def run() -> None:
        async with deployed(checkpoints["qwen2_5_vl"], topology) as deployment:
            for number, fault in enumerate(drawn_faults(WORK, num_times=1000)):
                if topology == "1epd" and fault.kind is Reserve:
                    continue  # nobody reserves anything there
                faults[:] = [fault]
                asking = asyncio.create_task(deployment.ask_all(others))
                with pytest.raises(InternalError, match=type(fault.error).__name__) as caught:
                    await ask_poison(deployment, new_medium(tmp_path, number, fault.kind))
                assert http_status(caught.value) == 500
                assert fault.num_raised > 0
                assert [answer.tokens for answer in await asking] == expected
                assert await num_lost(deployment) == 0
                await deployment.settle()

    asyncio.run(run())


def test_cleaning_up_that_raises_is_done_all_the_same(
    checkpoints: dict[str, Path],
    others: list[Question],
    expected: list[tuple[int, ...]],
    faults: list[Fault],
    tmp_path: Path,
) -> None:
    """The client leaves in the middle, and what is sent to workers then raises twice."""

    async def run() -> None:
        async with deployed(checkpoints["qwen2_5_vl"], "1e1p1d") as deployment:
            for number, fault in enumerate(drawn_faults(CLEANUP, num_times=2)):
                faults[:] = [fault]
                others_asking = asyncio.create_task(deployment.ask_all(others))
                asking = asyncio.create_task(
                    ask_poison(deployment, new_medium(tmp_path, number, CloseStream))
                )
                while not any(each.startswith(f"/{POISON}") for each in deployment.service.attempts):
                    await asyncio.sleep(0.001)
                await asyncio.sleep(0.03)
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
                assert [answer.tokens for answer in await others_asking] == expected
                assert await num_lost(deployment) == 0
                await deployment.settle()

    asyncio.run(run())


def test_media_handlers_that_raise_fail_their_request_alone(
    checkpoints: dict[str, Path],
    others: list[Question],
    expected: list[tuple[int, ...]],
    media_faults: list[Fault],
    tmp_path: Path,
) -> None:
    async def run() -> None:
        async with deployed(checkpoints["qwen2_5_vl"], "1e1p1d") as deployment:
            for number, fault in enumerate(drawn_faults(MEDIA, num_times=1000)):
                media_faults[:] = [fault]
                asking = asyncio.create_task(deployment.ask_all(others))
                with pytest.raises(InternalError, match=type(fault.error).__name__) as caught:
                    await ask_poisoned_media(deployment, new_medium(tmp_path, number, fault.kind))
                assert http_status(caught.value) == 500
                assert fault.num_raised > 0
                assert [answer.tokens for answer in await asking] == expected
                assert await num_lost(deployment) == 0
                await deployment.settle()

    asyncio.run(run())


def test_media_are_released_although_that_raises(
    checkpoints: dict[str, Path], media_faults: list[Fault], tmp_path: Path
) -> None:
    async def run() -> None:
        async with deployed(checkpoints["qwen2_5_vl"], "1e1p1d") as deployment:
            for number, fault in enumerate(drawn_faults((ReleaseMedia,), num_times=2)):
                media_faults[:] = [fault]
                await ask_poisoned_media(deployment, new_medium(tmp_path, number, fault.kind))
                await deployment.settle()
                assert fault.num_raised > 0
                assert await num_lost(deployment) == 0

    asyncio.run(run())


@pytest.mark.parametrize("victim", ["e0", "d0"])
def test_recovery_that_raises_loses_no_other_worker(
    victim: str,
    checkpoints: dict[str, Path],
    others: list[Question],
    expected: list[tuple[int, ...]],
    faults: list[Fault],
) -> None:
    """A worker is lost, and what others are told then raises once: a request may fail, with a typed error."""

    async def run() -> None:
        async with deployed(checkpoints["qwen2_5_vl"], "2e2p2d", stall_timeout_s=3.0) as deployment:
            for num_losses, fault in enumerate(drawn_faults(RECOVERY, num_times=1), 1):
                faults[:] = [fault]
                asking = [asyncio.create_task(deployment.ask(question)) for question in others]
                killing = asyncio.create_task(until_busy(deployment, victim))
                await asyncio.wait({killing, *asking}, return_when=asyncio.FIRST_COMPLETED)
                deployment.fleet.kill(victim)
                killing.cancel()
                for answer, tokens in zip(
                    await asyncio.gather(*asking, return_exceptions=True), expected, strict=True
                ):
                    assert isinstance(answer, EPDError) or getattr(answer, "tokens", None) == tokens
                await deployment.settle()
                assert await num_lost(deployment) == num_losses

    asyncio.run(run())
