"""What links pickle comes back as it was, in fewer steps."""

from __future__ import annotations

import pickle
import pickletools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.control.elasticity.cluster import StageSample
from epd.control.routing import InFlight
from epd.encode.encoder_cache import CachedGroup, GroupKey
from epd.errors import InfeasibleError, UnavailableError
from epd.sampling_params import SamplingParams
from epd.serve_app.messages import Admitted, WorkerLoad, WorkerReport
from epd.serve_app.network.calls import Channel
from epd.serve_app.network.pickling import dumps
from epd.serve_app.network.wire import Fetched, ReleaseBulk, WorkerCall
from epd.serve_app.worker_info import WorkerInfo
from epd.stages.engine.generation import TokenOutput
from epd.stages.sampling.sampler import SampledToken
from epd.transfer.connectors import KVChunk, KVSpan, Offer, Receipt, Ticket, TransferOutcome


@dataclass(frozen=True, slots=True)
class Checked:
    """Checks what it is made of, so it is pickled its own way."""

    value: int
    num_checks: list[int] = field(default_factory=list, compare=False)

    def __post_init__(self) -> None:
        self.num_checks.append(1)


@dataclass
class Counted:
    """Has a field that its constructor does not take, and one that can change."""

    name: str
    count: int = field(default=0, init=False)


class Pair(NamedTuple):
    left: object
    right: object


def sent(value: Any) -> Any:
    buffers: list[pickle.PickleBuffer] = []
    pickled = dumps(value, buffers.append)
    return pickle.loads(pickled, buffers=[bytearray(each.raw()) for each in buffers])


LOAD = WorkerLoad(
    num_waiting=1,
    kv_usage=0.5,
    counters={"a": 1.0},
    transports={"p0": "link"},
    stages={"decode": StageSample(1, 0, 2.0, 3, 0.1)},
    work=InFlight(1, 2, 3),
)
TICKET = Ticket("t", "p0.prefill", GroupKey("t", (), (0, 1), (8, 8), "m"), CachedGroup(3, (1, 2)))
VALUES: tuple[Any, ...] = (
    WorkerReport("d0", (Admitted("r", 3),), (TokenOutput("r", 0, 7, SampledToken(5, -0.5), " a"),), LOAD),
    Offer("t", 1, "p0.prefill", "pool", KVChunk((KVSpan(0, 2, 5, (7, 1)),))),
    Receipt("t", 1, TransferOutcome.CANCELLED),
    WorkerInfo("e0", frozenset({"encode", "prefill"})),
    Fetched(TICKET, None),
    ReleaseBulk(4),
    SamplingParams(max_tokens=3, stop=("x",)),
    Pair(TICKET, TransferOutcome.DELIVERED),
    [WorkerInfo, TransferOutcome, len, Channel.push],
)


@pytest.mark.parametrize("value", VALUES, ids=lambda each: type(each).__name__)
def test_what_is_sent_comes_back_equal(value: Any) -> None:
    again = sent(value)
    assert again == value
    assert type(again) is type(value)
    assert sent(again) == value


@given(st.recursive(
    st.none() | st.integers() | st.text() | st.floats(allow_nan=False) | st.binary(),
    lambda inner: st.lists(inner) | st.builds(Pair, inner, inner) | st.builds(Fetched, inner, st.integers())
    | st.builds(WorkerCall, inner) | st.dictionaries(st.text(), inner),
))  # fmt: skip
def test_messages_of_any_content_come_back_equal(value: Any) -> None:
    assert sent((3, 0, value)) == (3, 0, value)


def test_one_object_in_two_places_stays_one() -> None:
    left, right = sent((TICKET, TICKET))
    assert left is right


def test_errors_keep_their_type_and_text() -> None:
    for error in (UnavailableError("gone"), InfeasibleError("no room")):
        again = sent(error)
        assert (type(again), str(again)) == (type(error), str(error))


def test_arrays_are_left_out_of_the_pickle() -> None:
    array = np.arange(100_000, dtype=np.uint8)
    buffers: list[pickle.PickleBuffer] = []
    assert len(dumps(Fetched(array, 1), buffers.append)) < 1000
    assert [each.raw().nbytes for each in buffers] == [100_000]
    assert np.array_equal(sent(WorkerCall(array)).message, array)  # type: ignore[arg-type]


def test_what_has_a_way_of_its_own_keeps_it() -> None:
    checked = sent(Checked(3))
    assert (checked.value, checked.num_checks) == (3, [1])
    counted = Counted("a")
    counted.count = 4
    assert sent(counted) == counted


def test_a_dataclass_is_read_by_its_constructor() -> None:
    """Its own way is a function in Python that sets each field: most of the time that a message takes."""
    pickled = dumps(VALUES[0], lambda _buffer: None)
    opcodes = [opcode.name for opcode, _, _ in pickletools.genops(pickled)]
    assert "BUILD" not in opcodes
    assert "BUILD" in [opcode.name for opcode, _, _ in pickletools.genops(pickle.dumps(VALUES[0], 5))]
