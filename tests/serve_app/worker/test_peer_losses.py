"""Losses of other workers that several orchestrators announce, early or late: each is handled once."""

from __future__ import annotations

import pytest

from epd.serve_app.messages import EncodeGroup, PeerLost, Prefill, Redirect
from epd.serve_app.role_messages import StagesClosed
from epd.serve_app.worker import peer_losses
from epd.serve_app.worker.peer_losses import NamedPeer, PeerLosses
from tests.serve_app.deployments import Question
from tests.serve_app.worker.bench import Bench

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")


def restart(bench: Bench, name: str) -> None:
    roles = bench.cores[name].roles
    bench.lose(name)
    bench.cores[name] = bench.new(name, roles)


def test_each_loss_is_handled_once_and_answered_alike() -> None:
    handled: list[str] = []

    def drop(name: str) -> tuple[str, ...]:
        handled.append(name)
        return (f"r{len(handled)}",)

    losses = PeerLosses(drop)
    assert losses.meet(NamedPeer("d0", 1))
    assert losses.meet(NamedPeer("d0", 0))
    assert handled == []
    assert losses.lose(NamedPeer("d0", 1)) == losses.lose(NamedPeer("d0", 1)) == ("r1",)
    assert losses.meet(NamedPeer("d0", 2))
    assert not losses.meet(NamedPeer("d0", 1))
    assert losses.meet(NamedPeer("d0", 5))  # so 2, 3 and 4 are lost
    assert [losses.lose(NamedPeer("d0", each)) for each in (1, 2, 3, 4)] == [
        ("r1",),
        ("r2",),
        ("r2",),
        ("r2",),
    ]
    assert losses.lose(NamedPeer("d1", 1)) == ("r3",)
    assert handled == ["d0", "d0", "d1"]


def test_a_loss_that_could_not_be_handled_is_handled_when_it_is_announced_again() -> None:
    replies = iter([ZeroDivisionError("a bug"), ("r",)])

    def drop(_: str) -> tuple[str, ...]:
        reply = next(replies)
        if isinstance(reply, Exception):
            raise reply
        return reply

    losses = PeerLosses(drop)
    with pytest.raises(ZeroDivisionError):
        losses.lose(NamedPeer("d0", 1))
    assert losses.lose(NamedPeer("d0", 1)) == ("r",)


def test_only_the_last_replies_are_kept() -> None:
    losses = PeerLosses(lambda name: (name,))
    for number in range(peer_losses._MAX_KEPT + 10):
        losses.lose(NamedPeer(f"d{number}", 1))
    assert len(losses._kept) == peer_losses._MAX_KEPT
    assert losses.lose(NamedPeer("d0", 1)) == ()
    assert losses.lose(NamedPeer("d10", 1)) == ("d10",)


def test_a_late_announcement_does_not_touch_the_next_incarnation(bench: Bench, question: Question) -> None:
    """Two owners lose the same decode worker; one redirects to its next incarnation before the other asks."""
    plan = bench.plan(question)
    for name in ("a/r#1", "b/r#1"):
        assert bench.submit(name, plan)
    bench.step(2)
    restart(bench, "d0")
    lost = bench.tell("p0", PeerLost("d0", 1))
    assert set(lost) == {"a/r#1", "b/r#1"}
    ticket = bench.reserve("a/r#1", plan)
    assert ticket is not None
    assert bench.tell("p0", Redirect("a/r#1", ticket, 2)) is True
    assert bench.tell("p0", PeerLost("d0", 1)) == lost
    other = bench.reserve("b/r#1", plan)
    assert other is not None
    assert bench.tell("p0", Redirect("b/r#1", other, 2)) is True
    assert bench.tell("p0", PeerLost("d0", 1)) == lost
    for granted in bench.granted(bench.events):
        assert bench.encode(question, plan, granted, "e0")
    bench.finish(dict.fromkeys(("a/r#1", "b/r#1"), (question, plan)))
    assert bench.tokens("a/r#1") == bench.tokens("b/r#1")
    bench.settle()


def test_a_message_that_names_the_next_incarnation_announces_the_loss(
    bench: Bench, question: Question
) -> None:
    plan = bench.plan(question)
    assert bench.submit("a/r#1", plan)
    for granted in bench.granted(bench.step(2)):
        bench.encode(question, plan, granted, "e0")
    restart(bench, "p0")
    assert bench.reserve("b/r#1", plan, incarnation=2) is not None
    assert bench.cores["d0"].hosted["decode"].stage.arriving == ("b/r#1",)  # type: ignore[attr-defined]
    assert bench.tell("d0", PeerLost("p0", 1)) == ("a/r#1",)
    assert bench.cores["e0"].has_work()
    bench.tell("e0", StagesClosed("p0", frozenset(), 2))
    assert not bench.cores["e0"].has_work()


def test_what_comes_after_the_loss_is_refused(bench: Bench, question: Question) -> None:
    """From an orchestrator that does not know of it yet: nothing would clean up for it."""
    plan = bench.plan(question)
    old = bench.reserve("r", plan)
    assert old is not None
    assert bench.submit("s", plan)
    granted = bench.granted(bench.step(2))[0]
    for name in ("p0", "e0", "d1"):
        bench.cores[name].lose_peer("d0", 1)
        bench.cores[name].lose_peer("p0", 1)
    assert bench.tell("p0", Prefill(plan.generate_request("r"), plan.groups, old, 1)) is False
    assert bench.tell("p0", Redirect("s", old, 1)) is False
    assert bench.reserve("t", plan, worker="d1", incarnation=1) is None
    message = EncodeGroup("s", granted.ticket, plan.groups[granted.group], 1)
    assert bench.tell("e0", message) is True
    for name in ("p0", "e0", "d1"):
        assert name == "p0" or not bench.cores[name].has_work()
    assert bench.cores["p0"].hosted["prefill"].stage.request_ids == {"s"}  # type: ignore[attr-defined]


def test_a_lost_encoder_takes_nothing_with_it(bench: Bench, question: Question) -> None:
    plan = bench.plan(question)
    assert bench.submit("r", plan)
    assert [bench.tell(name, PeerLost("e1", 1)) for name in ("e0", "p0", "d0")] == [(), (), ()]
    bench.finish({"r": (question, plan)})
    bench.settle()
