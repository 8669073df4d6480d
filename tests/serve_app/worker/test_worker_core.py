"""Single workers, driven message by message on one thread: what they take, refuse, tell and let go of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from epd.sampling_params import SamplingParams
from epd.serve_app.messages import (
    Abort,
    EncodeGroup,
    GroupFailed,
    GroupsArrived,
    HandedOver,
    PeerLost,
    Prefill,
    Redirect,
    Reissue,
    RequestFailed,
    SpanDone,
    WorkerEvent,
)
from epd.serve_app.orchestration.live_answer import AnswerPlan
from epd.serve_app.role_messages import SetRoles, StagesClosed
from tests.serve_app.deployments import MAX_TOKENS, Question
from tests.serve_app.worker.bench import Bench

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")


def kinds(events: Iterable[tuple[str, WorkerEvent]]) -> list[type]:
    return [type(event) for _, event in events]


def test_a_request_goes_through_three_workers(bench: Bench, question: Question) -> None:
    plan = bench.plan(question)
    assert bench.submit("r", plan)
    bench.finish({"r": (question, plan)})
    assert kinds(bench.events).count(HandedOver) == 1
    spans = [event.span for _, event in bench.events if isinstance(event, SpanDone)]
    encoded = {(span.item, span.group) for span in spans if span.stage == "encode"}
    assert len(encoded) == len(plan.groups)
    assert {(span.item, span.group) for span in spans if span.stage == "prefill"} > {(0, 0), (0, 1), (1, 0)}
    arrived = [event for _, event in bench.events if isinstance(event, GroupsArrived)]
    assert sum(len(event.transfer_ids) for event in arrived) == len(plan.groups) > 3
    assert len(bench.tokens("r")) <= MAX_TOKENS
    bench.settle()


def test_groups_of_a_request_share_the_seconds_of_their_batch(bench: Bench, question: Question) -> None:
    plan = bench.plan(question)
    assert bench.submit("r", plan)
    bench.finish({"r": (question, plan)})
    batches: dict[tuple[str, float, float], list[float]] = {}
    for worker, event in bench.events:
        if isinstance(event, SpanDone) and event.span.stage == "encode":
            key = (worker, event.span.start_s, event.span.stop_s)
            batches.setdefault(key, []).append(event.service_s)
    assert max(map(len, batches.values())) > 1
    for (_, start_s, stop_s), seconds in batches.items():
        assert sum(seconds) == pytest.approx(stop_s - start_s)


def test_merged_roles_need_no_other_worker_and_give_the_same_tokens(bench: Bench, question: Question) -> None:
    plan = bench.plan(question)
    assert bench.submit("r", plan)
    bench.finish({"r": (question, plan)})
    merged = Bench(bench.path, "1epd")
    assert merged.submit("r", plan, "epd0")
    merged.finish({"r": (question, plan)}, "epd0")
    assert merged.tokens("r") == bench.tokens("r")
    merged.settle()


def test_each_role_loads_its_own_weights_alone(bench: Bench) -> None:
    assert set(bench.cores["e0"].hosted) == {"encode"}
    assert set(bench.cores["p0"].hosted) == {"prefill"}
    assert bench.cores["p0"].load().kv_usage == 0.0
    assert bench.cores["e0"].load().kv_usage is None


def test_work_for_a_role_that_a_worker_lacks_is_refused(bench: Bench, question: Question) -> None:
    plan = bench.plan(question)
    assert bench.reserve("r", plan, worker="p0") is None
    message = Prefill(plan.generate_request("r"), plan.groups, None)
    assert bench.tell("d0", message) is False
    assert bench.tell("p0", message) is False  # it cannot decode


def test_without_room_prefill_and_decode_refuse(bench: Bench, question: Question) -> None:
    small = Bench(bench.path, "1e1p1d", {"num_kv_tokens": 512})
    plan = small.plan(question)
    taken = [small.submit(f"r{number}", plan) for number in range(8)]
    assert taken[0]
    assert not taken[-1]
    names = [f"r{number}" for number in range(8)]
    small.tell("p0", Abort(tuple(names)))
    small.tell("d0", Abort(tuple(names)))
    small.settle()


def test_an_encoder_without_the_group_wants_frames(bench: Bench, question: Question) -> None:
    plan = bench.plan(question)
    bench.submit("r", plan)
    granted = bench.granted(bench.step(2))[0]
    group = plan.groups[granted.group]
    bare = EncodeGroup("r", granted.ticket, group)
    assert bench.tell("e0", bare) is False
    assert bench.encode(question, plan, granted, "e0")
    bench.step(2)
    assert bench.tell("e0", bare) is True


def test_a_lost_encoder_costs_only_its_groups(bench: Bench, question: Question) -> None:
    plan = bench.plan(question)
    bench.submit("r", plan)
    granted = bench.granted(bench.step(2))
    for place, each in enumerate(granted):
        bench.encode(question, plan, each, f"e{place % 2}")
    lost = tuple(each.ticket.transfer_id for each in granted[1::2])
    bench.lose("e1")
    bench.tell("p0", Reissue((*lost, "never heard of")))
    again = bench.granted(bench.step())
    assert [each.group for each in again] == [each.group for each in granted[1::2]]
    for each in again:
        bench.encode(question, plan, each, "e0")
    bench.finish({"r": (question, plan)})
    assert bench.cores["e0"].load().counters["encoded_groups"] == len(granted)
    bench.settle()


def test_a_group_that_cannot_be_encoded_is_told_and_may_be_granted_again(
    bench: Bench, question: Question
) -> None:
    plan = bench.plan(question)
    bench.submit("r", plan)
    first, *rest = bench.granted(bench.step(2))
    group = plan.groups[first.group]
    message = EncodeGroup("r", first.ticket, group)
    image = bench.pixels(question, plan.groups[-1])
    assert bench.tell("e0", message, image[:, :-3, :-5].copy())  # of no size that the tower could take
    failed = [event for _, event in bench.step(3) if isinstance(event, GroupFailed)]
    assert [(each.request_id, each.group, each.transfer_id) for each in failed] == [
        ("r", first.group, first.ticket.transfer_id)
    ]
    bench.tell("p0", Reissue((first.ticket.transfer_id,)))
    for each in rest:
        bench.encode(question, plan, each, "e0")
    bench.finish({"r": (question, plan)})
    bench.settle()


def test_groups_of_an_aborted_request_are_granted_to_who_still_wants_them(
    bench: Bench, question: Question
) -> None:
    plan = bench.plan(question)
    bench.submit("a", plan)
    bench.submit("b", plan)
    granted = bench.granted(bench.step(3))
    assert {each.request_id for each in granted} == {"a"}
    bench.tell("p0", Abort(("a",)))
    bench.tell("d0", Abort(("a",)))
    again = bench.granted(bench.step())
    assert [(each.request_id, each.group) for each in again] == [("b", each.group) for each in granted]
    for each in again:
        bench.encode(question, plan, each, "e0")
    bench.finish({"b": (question, plan)})
    bench.settle()


def test_a_second_question_is_granted_nothing(bench: Bench, question: Question) -> None:
    first, second = bench.plan(question), bench.plan(replace(question, text="and then?"))
    bench.submit("a", first)
    bench.finish({"a": (question, first)})
    bench.submit("b", second)
    num_events = len(bench.events)
    bench.finish({"b": (question, second)})
    assert not bench.granted(bench.events[num_events:])
    bench.settle()


def test_a_lost_decode_worker_is_redirected_from(bench: Bench, question: Question) -> None:
    plan = bench.plan(question)
    bench.submit("r", plan)
    granted = bench.granted(bench.step(2))
    bench.encode(question, plan, granted[0], "e0")
    bench.step(3)
    bench.lose("d0")
    assert bench.tell("p0", PeerLost("d0", 1)) == ("r",)
    ticket = bench.reserve("r", plan, worker="d1")
    assert ticket is not None
    assert bench.tell("p0", Redirect("r", ticket)) is True
    assert bench.tell("p0", Redirect("unknown", replace(ticket, request_id="unknown"))) is False
    for each in granted[1:]:
        bench.encode(question, plan, each, "e0")
    bench.finish({"r": (question, plan)})
    bench.settle()


def test_a_lost_prefill_worker_leaves_nothing_at_the_others(bench: Bench, question: Question) -> None:
    plan = bench.plan(question)
    bench.submit("r", plan)
    for each in bench.granted(bench.step(2)):
        bench.encode(question, plan, each, "e0")
    bench.lose("p0")
    bench.step()
    assert bench.tell("d0", PeerLost("p0", 1)) == ("r",)
    assert bench.tell("e0", PeerLost("p0", 1)) == ()
    bench.settle()


def test_a_decode_worker_that_forgot_a_request_makes_it_fail_at_prefill(
    bench: Bench, question: Question
) -> None:
    plan = bench.plan(question)
    bench.submit("r", plan)
    bench.tell("d0", Abort(("r",)))
    failed = [event for _, event in bench.step(6) if isinstance(event, RequestFailed)]
    assert [(event.request_id, event.is_final) for event in failed] == [("r", False)]
    bench.settle()


def test_what_a_closed_stage_had_not_taken_fails_at_prefill(bench: Bench, question: Question) -> None:
    """Its decode worker has said so, and closes its stage before that was read."""
    plan = bench.plan(question)
    bench.submit("r", plan)
    for granted in bench.granted(bench.step(2)):
        bench.encode(question, plan, granted, "e0")
    bench.step(2)
    bench.tell("d0", Abort(("r",)))
    for _ in range(3):
        bench.cores["d0"].step()
    bench.tell("p0", StagesClosed("d0", frozenset({"decode"})))
    failed = [event for _, event in bench.step(2) if isinstance(event, RequestFailed)]
    assert [(event.request_id, event.is_final) for event in failed] == [("r", False)]
    bench.settle()


def test_roles_change_without_losing_what_runs(bench: Bench, question: Question) -> None:
    plan = bench.plan(question)
    bench.submit("r", plan)
    granted = bench.granted(bench.step(2))
    for each in granted:
        bench.encode(question, plan, each, "e0")
    bench.tell("e0", SetRoles(frozenset({"decode"})))
    assert set(bench.cores["e0"].hosted) == {"encode", "decode"}
    bench.finish({"r": (question, plan)})
    bench.settle()
    assert set(bench.cores["e0"].hosted) == {"decode"}
    assert bench.cores["e0"].load().num_role_switches == 1
    ticket = bench.reserve("s", plan, worker="e0")
    assert ticket is not None
    assert bench.tell("p0", Prefill(plan.generate_request("s"), plan.groups, ticket))
    bench.finish({"s": (question, plan)}, encoder="e1")
    assert bench.tokens("s") == bench.tokens("r")
    bench.settle()


def submit_ahead(bench: Bench, plan: AnswerPlan) -> bool:
    """Submits a prompt to the prefill worker whose ticket is to come."""
    message = Prefill(plan.generate_request("r"), plan.groups, None, awaits_ticket=True)
    taken: bool = bench.tell("p0", message)
    return taken


@pytest.mark.parametrize("num_steps", [0, 2, 40])
def test_a_ticket_may_come_after_the_prompt(bench: Bench, question: Question, num_steps: int) -> None:
    """Before anything is computed, in the middle, or when all is and waits for it; nothing is cached yet."""
    plan = bench.plan(question)
    assert submit_ahead(bench, plan)
    for _ in range(num_steps):
        for granted in bench.granted(bench.step()):
            assert bench.encode(question, plan, granted, "e0")
    ticket = bench.reserve("r", plan)
    assert ticket is not None
    assert bench.tell("p0", Redirect("r", ticket))
    bench.finish({"r": (question, plan)})
    assert bench.submit("expected", plan)
    bench.finish({"expected": (question, plan)})
    assert bench.tokens("r") == bench.tokens("expected")
    bench.settle()


def test_a_prompt_that_waits_for_its_ticket_can_be_aborted(bench: Bench, question: Question) -> None:
    plan = bench.plan(question)
    assert submit_ahead(bench, plan)
    for _ in range(40):
        for granted in bench.granted(bench.step()):
            assert bench.encode(question, plan, granted, "e0")
    assert bench.cores["p0"].has_work()
    bench.tell("p0", Abort(("r",)))
    bench.settle()
    ticket = bench.reserve("r", plan)
    assert ticket is not None
    assert not bench.tell("p0", Redirect("r", ticket)), "it is gone"
    bench.tell("d0", Abort(("r",)))
    bench.settle()


def test_an_answer_of_one_token_needs_no_ticket(bench: Bench) -> None:
    question = Question((), sampling=SamplingParams(max_tokens=1))
    plan = bench.plan(question)
    assert submit_ahead(bench, plan)
    bench.finish({"r": (question, plan)})
    bench.settle()
