"""Requests of several owners at one worker: what an owner that is gone had is free again, others continue."""

from __future__ import annotations

from dataclasses import replace

import pytest

from epd.sampling_params import SamplingParams
from epd.serve_app.messages import DropOwner, Reserve, attempt_id, endpoint, owner_of
from epd.serve_app.orchestration.live_answer import AnswerPlan
from epd.serve_app.role_messages import Move, Pause
from tests.serve_app.deployments import Question
from tests.serve_app.worker.bench import Bench

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")

LONG = SamplingParams(max_tokens=40, ignore_eos=True)
A, B = attempt_id("a", "the/same", 1), attempt_id("b", "the/same", 1)


def drop(bench: Bench, owner: str) -> None:
    for name in bench.cores:
        bench.tell(name, DropOwner(owner))
        bench.cores[name].check_integrity()


def encode_all(bench: Bench, question: Question, plan: AnswerPlan, owner: str = "") -> None:
    """Serves grants until none comes for a while, those of one owner if it is named."""
    for _ in range(6):
        for granted in bench.granted(bench.step()):
            if owner in ("", owner_of(granted.request_id)):
                assert bench.encode(question, plan, granted, "e0")


def test_what_has_not_begun_is_given_back(bench: Bench, question: Question) -> None:
    plan = bench.plan(question)
    assert bench.submit(A, plan)
    ticket = bench.reserve(attempt_id("a", "another", 2), plan)
    assert ticket is not None
    assert bench.cores["d0"].load().kv_usage
    for granted in bench.granted(bench.step(2)):
        bench.encode(question, plan, granted, "e0")
    drop(bench, "a")
    bench.settle()
    assert bench.cores["e0"].load().counters["encoded_groups"] == 0


def test_what_is_prefilled_and_decoded_is_given_back(bench: Bench, question: Question) -> None:
    plan = bench.plan(replace(question, sampling=LONG))
    assert bench.submit(A, plan)
    encode_all(bench, question, plan)
    bench.step(4)
    assert not bench.is_over(A)
    drop(bench, "a")
    bench.settle()


@pytest.mark.parametrize("is_moving", [False, True])
def test_an_answer_on_its_way_to_another_decode_worker_is_given_back(
    is_moving: bool, bench: Bench, question: Question
) -> None:
    plan = bench.plan(replace(question, sampling=LONG))
    assert bench.submit(A, plan)
    encode_all(bench, question, plan)
    while len(bench.outputs.get(A, {})) < 4:
        bench.step()
    identity, _ = bench.tell("d0", Pause(A))
    message = Reserve(A, endpoint("d0", "decode"), identity, plan.sampling)
    ticket = bench.tell("d1", message)
    assert ticket is not None
    if is_moving:
        assert bench.tell("d0", Move(A, ticket))
    drop(bench, "a")
    bench.settle()


def test_groups_that_others_want_are_granted_to_them(bench: Bench, question: Question) -> None:
    plan = bench.plan(question)
    alone = Bench(bench.path, "1e1p1d")
    assert alone.submit(B, plan)
    alone.finish({B: (question, plan)})
    assert bench.submit(A, plan)
    assert bench.submit(B, plan)
    granted = bench.granted(bench.step(3))
    assert {owner_of(each.request_id) for each in granted} == {"a"}
    bench.encode(question, plan, granted[0], "e0")
    drop(bench, "a")
    assert bench.cores["d0"].hosted["decode"].stage.arriving == (B,)  # type: ignore[attr-defined]
    again = bench.granted(bench.step())
    assert [(each.request_id, each.group) for each in again] == [(B, each.group) for each in granted]
    for each in again:
        bench.encode(question, plan, each, "e0")
    bench.finish({B: (question, plan)})
    assert bench.tokens(B) == alone.tokens(B)
    assert not bench.is_over(A)
    bench.settle()


def test_the_requests_of_others_do_not_notice(bench: Bench, question: Question) -> None:
    """Both are in the middle of their answers, at the same workers; the worker may drop the owner again."""
    plan = bench.plan(question)
    for name in (A, B):
        assert bench.submit(name, plan)
    encode_all(bench, question, plan)
    drop(bench, "a")
    drop(bench, "a")
    drop(bench, "nobody")
    bench.finish({B: (question, plan)})
    alone = Bench(bench.path, "1e1p1d")
    assert alone.submit(B, plan)
    alone.finish({B: (question, plan)})
    assert bench.tokens(B) == alone.tokens(B)
    bench.settle()


def test_merged_roles_drop_an_owner_too(bench: Bench, question: Question) -> None:
    merged = Bench(bench.path, "1epd")
    plan = merged.plan(replace(question, sampling=LONG))
    for name in (A, B):
        assert merged.submit(name, plan, "epd0")
    for granted in merged.granted(merged.step(3)):
        merged.encode(question, plan, granted, "epd0")
    merged.step(12)
    drop(merged, "a")
    merged.finish({B: (question, plan)}, "epd0")
    assert len(merged.tokens(B)) == 40
    merged.settle()
