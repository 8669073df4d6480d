"""Messages over a transport that loses, repeats and reorders what it likes: all come, in order, each once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from epd.serve_app.network.peer_links import IncomingChannel, OutgoingChannel

NUM_MESSAGES = 12
# What happens next: a message is pushed, what is due is sent, a copy arrives, an acknowledgement arrives.
STEPS = st.lists(
    st.tuples(st.sampled_from(["push", "send", "arrive", "answer"]), st.integers(0, 99), st.booleans()),
    max_size=120,
)


class Wire:
    """Copies on their way in both directions; now_s goes on with every step."""

    def __init__(self, max_in_flight: int) -> None:
        self.sender = OutgoingChannel[int](max_in_flight=max_in_flight)
        self.receiver = IncomingChannel[int](max_early=max_in_flight)
        self.messages: list[tuple[int, int]] = []
        self.answers: list[int] = []
        self.taken: list[int] = []
        self.num_pushed = 0
        self.now_s = 0.0

    def step(self, kind: str, which: int, *, is_harmed: bool) -> None:
        """is_harmed: what is sent gets lost, what arrives stays on its way to arrive again."""
        self.now_s += 0.3
        if kind == "push" and self.num_pushed < NUM_MESSAGES:
            self.sender.push(self.num_pushed)
            self.num_pushed += 1
        elif kind == "send":
            due = self.sender.due(self.now_s)
            self.messages += [] if is_harmed else due
        elif kind == "arrive" and self.messages:
            place = which % len(self.messages)
            number, message = self.messages[place] if is_harmed else self.messages.pop(place)
            self.taken += self.receiver.take(number, message)
            self.answers.append(self.receiver.next)
        elif kind == "answer" and self.answers:
            place = which % len(self.answers)
            self.sender.acknowledge(self.answers[place] if is_harmed else self.answers.pop(place))


@given(STEPS, st.integers(1, 5))
def test_every_message_is_taken_once_and_in_order(
    steps: list[tuple[str, int, bool]], max_in_flight: int
) -> None:
    wire = Wire(max_in_flight)
    for kind, which, is_harmed in steps:
        wire.step(kind, which, is_harmed=is_harmed)
        assert wire.taken == list(range(len(wire.taken)))
    while wire.num_pushed < NUM_MESSAGES:
        wire.step("push", 0, is_harmed=False)
    for _ in range(40 * NUM_MESSAGES):  # a transport that works again
        for kind in ("send", "arrive", "answer"):
            wire.step(kind, 0, is_harmed=False)
    assert wire.taken == list(range(NUM_MESSAGES))
    assert len(wire.sender) == 0


def test_what_is_not_acknowledged_is_sent_again_ever_more_seldom() -> None:
    sender = OutgoingChannel[str](resend_s=1.0, max_resend_s=4.0)
    sender.push("a")
    sent_s = [tick / 2 for tick in range(60) if sender.due(tick / 2)]
    assert sent_s[:6] == [0.0, 1.0, 3.0, 7.0, 11.0, 15.0]
    sender.acknowledge(1)
    assert sender.due(100.0) == []


def test_a_message_is_sent_again_for_days() -> None:
    sender = OutgoingChannel[str]()
    sender.push("a")
    sent_s = [8.0 * tick for tick in range(20_000) if sender.due(8.0 * tick)]
    assert len(sent_s) == 20_000
