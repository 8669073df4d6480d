"""Encoding beside a worker's turns: nothing waits for the tower, and nothing is lost on the way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from epd.encode.encoder_cache import EncoderCacheManager, GroupSpec
from epd.encoders.groups import FrameEncoder
from epd.stages.connectors.mailbox import InProcessHub
from epd.stages.encode.beside import BesideThread
from epd.stages.encode.encoder import EncodeJob, EncodeStage
from epd.stages.encode.encoder_pool import EmbeddingLayout, EmbeddingReceiver, EncoderPool
from epd.transfer.connectors import Ticket
from tests.encoders.fakes import NUM_CHANNELS, FakeFamily, fake_frames, fake_key, fake_plan
from tests.fake_cuda import FakeCuda, fake_cuda

LAYOUT = EmbeddingLayout(NUM_CHANNELS, torch.float32)
SOON_S = 60.0
CPU = torch.device("cpu")


class Held:
    """An encoder in a thread whose tower goes on when it is told to, and a receiver."""

    def __init__(self) -> None:
        self.hub = InProcessHub()
        self.woken = threading.Event()
        self.lane: BesideThread[Any] = BesideThread("encode", CPU, self.woken.set)
        pools = [EncoderPool(4, 2, LAYOUT) for _ in range(2)]
        caches = [EncoderCacheManager(4, 2) for _ in range(2)]
        end = self.hub.connect("e", pools[0])
        encoder = FrameEncoder(FakeFamily(), nn.Identity(), max_patches=100)
        self.stage = EncodeStage(encoder, caches[0], pools[0], end)
        self.stage.lane = self.lane
        self.receiver = EmbeddingReceiver(caches[1], pools[1], self.hub.connect("p", pools[1]))
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()

    def ask(self, request_id: str, value: int, frames: Callable[[], Tensor] | None = None) -> Ticket:
        self.receiver.open(request_id, [GroupSpec(fake_key(value, 2), 2, 2)])
        (grant,) = self.receiver.grant()
        self.stage.submit(EncodeJob(grant.ticket, fake_plan(2), frames or self.frames(value), request_id))
        return grant.ticket

    def frames(self, value: int) -> Callable[[], Tensor]:
        def wait() -> Tensor:
            self.has_begun.set()
            assert self.may_go_on.wait(SOON_S)
            return fake_frames(value, 2)

        return wait

    def begin(self) -> None:
        """A turn that starts a batch, which is in the tower then."""
        assert self.stage.step() == []
        assert self.has_begun.wait(SOON_S)
        self.stage.check_integrity()

    def end(self) -> int:
        """Lets the batch end, and the next turn commit it; returns how many groups did not fail."""
        self.may_go_on.set()
        assert self.woken.wait(SOON_S)
        self.woken.clear()
        done = self.stage.step()
        self.stage.check_integrity()
        return sum(each.num_encoded for each in done)

    def taken(self, request_id: str) -> list[float]:
        self.receiver.poll()
        return [float(embeddings.rows[0, 0]) for _, embeddings, _ in self.receiver.take(request_id)]


@pytest.fixture
def held() -> Iterator[Held]:
    held = Held()
    yield held
    held.may_go_on.set()
    held.lane.close()


def test_turns_go_on_while_the_tower_works(held: Held) -> None:
    held.ask("a", 1)
    held.begin()
    held.ask("b", 2)
    assert [held.stage.step() for _ in range(3)] == [[], [], []]
    assert held.stage.is_encoding
    assert held.stage.has_work()
    assert held.stage.num_waiting == 2
    assert held.stage.outstanding_patches == 4
    assert held.taken("a") == []
    assert held.end() == 1
    assert held.taken("a") == [1.0]
    assert held.end() == 1
    assert held.taken("b") == [2.0]
    held.stage.step()
    assert not held.stage.has_work()


@pytest.mark.parametrize("how", ["cancel", "cancel_requests", "drop_receiver"])
def test_what_is_forgotten_in_the_tower_is_cached_and_not_offered(held: Held, how: str) -> None:
    ticket = held.ask("a", 1)
    held.begin()
    assert held.stage.has_work()
    held.receiver.close("a")
    forget: dict[str, Callable[[], None]] = {
        "cancel": lambda: held.stage.cancel(ticket.transfer_id),
        "cancel_requests": lambda: held.stage.cancel_requests(lambda each: each == "a"),
        "drop_receiver": lambda: held.stage.drop_receiver("p"),
    }
    forget[how]()
    assert held.end() == 1
    assert held.stage.cache.num_held == 0
    assert len(held.stage.outbox) == 0
    assert held.stage.cache.is_ready(fake_key(1, 2))


def test_a_group_that_fails_in_the_tower_costs_itself_alone(held: Held) -> None:
    def fail() -> Tensor:
        raise ValueError("no frames")

    ticket = held.ask("bad", 1, fail)
    held.ask("good", 2)
    held.begin()
    assert held.end() == 1
    assert held.taken("good") == [2.0]
    assert held.stage.cache.num_held == 1  # the good one's offer
    assert held.stage.counts.num_batches == 1
    assert ticket.key not in held.stage.cache


def test_what_is_no_error_of_a_group_ends_the_turn_that_takes_it(held: Held) -> None:
    def end() -> Tensor:
        assert held.may_go_on.wait(SOON_S)
        raise SystemExit("the tower ends")

    held.ask("a", 1, end)
    assert held.stage.step() == []
    held.may_go_on.set()
    assert held.woken.wait(SOON_S)
    with pytest.raises(SystemExit, match="the tower ends"):
        held.stage.step()


def test_a_tower_that_hangs_is_seen(held: Held) -> None:
    assert held.lane.busy_s == 0
    held.ask("a", 1)
    held.begin()
    first = held.lane.busy_s
    held.stage.step()
    assert held.lane.busy_s > first > 0
    held.end()
    assert held.lane.busy_s == 0


class Stream:
    """A stream of the fake device; notes what is queued, with the launches before it."""

    def __init__(self, name: str, told: list[str], cuda: FakeCuda) -> None:
        self.name, self._told, self._cuda = name, told, cuda

    def record_event(self) -> Any:
        self._told += [f"{len(self._cuda.launches)} launches", f"{self.name} records"]
        return self

    def wait_event(self, event: Any) -> None:
        self._told.append(f"{self.name} waits for {event.name}")

    def synchronize(self) -> None:
        self._told.append(f"the thread waits for {self.name}")


class HereAtOnce(BesideThread[Any]):
    """Does its work in the thread that starts it: fake devices are of one thread."""

    def start(self, work: Callable[[], Any]) -> None:
        assert self._stream is not None
        self._done = self._run(work, self._stream.launched())


def test_on_a_gpu_a_batch_is_over_once_its_stream_has_done_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream begins behind what the worker had launched, and all of the batch is before its event."""
    with fake_cuda() as cuda:
        told: list[str] = []
        streams = [Stream(name, told, cuda) for name in ("worker", "encode")]

        @contextmanager
        def on(stream: Stream) -> Iterator[None]:
            told.append(f"on {stream.name}")
            yield
            told.append("back")

        monkeypatch.setattr(torch.cuda, "Stream", lambda _: streams[1])
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: streams[0])
        monkeypatch.setattr(torch.cuda, "stream", on)
        lane = HereAtOnce("encode", torch.device("cuda"), lambda: None)
        memory = torch.zeros(4, device="cuda")
        lane.start(lambda: memory.add_(1).mul_(2))
        assert lane.finish() is memory
        lane.close()
    assert told == [
        "1 launches", "worker records", "on encode", "encode waits for worker",
        "3 launches", "encode records", "the thread waits for encode", "back",
    ]  # fmt: skip
