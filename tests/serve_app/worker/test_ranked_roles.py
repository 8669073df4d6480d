"""Workers of two ranks change roles: both ranks together, without losing what runs, and back if it fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from epd.serve_app.messages import Prefill
from epd.serve_app.role_messages import Onload, SetRoles
from epd.stages.ranks.group import Follower
from epd.topology import TensorParallel
from tests.serve_app.deployments import Question
from tests.serve_app.worker.bench import Bench
from tests.stages.ranks.thread_ranks import StartedThreadRanks

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")

PREFILL, DECODE, ENCODE = (frozenset({stage}) for stage in ("prefill", "decode", "encode"))


@pytest.fixture
def ranked(checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr("epd.stages.ranks.group.ProcessRanks", StartedThreadRanks)
    bench = Bench(checkpoints["qwen2_5_vl"], "2e1p1d", {"tensor_parallel": TensorParallel(2)})
    yield bench
    for core in bench.cores.values():
        core.close()


def expected_of(path: Path, question: Question) -> list[int]:
    """The tokens of workers of one rank."""
    bench = Bench(path, "1e1p1d")
    plan = bench.plan(question)
    assert bench.submit("r", plan)
    bench.finish({"r": (question, plan)})
    return bench.tokens("r")


def answer(bench: Bench, name: str, question: Question, prefill: str, decode: str) -> list[int]:
    """The answer of these two workers, whose media the second encoder encodes."""
    plan = bench.plan(question)
    ticket = bench.reserve(name, plan, sender=prefill, worker=decode)
    assert ticket is not None
    assert bench.tell(prefill, Prefill(plan.generate_request(name), plan.groups, ticket))
    bench.finish({name: (question, plan)}, encoder="e1")
    bench.settle()
    return bench.tokens(name)


def follower_of(bench: Bench, worker: str) -> Follower:
    """The other rank, once it has done all that it was told."""
    ranks = bench.cores[worker]._builder._ranks
    assert isinstance(ranks, StartedThreadRanks)
    ranks.close()
    return ranks.follower


def test_an_encoder_becomes_two_ranks_while_answers_run(ranked: Bench, question: Question) -> None:
    expected = expected_of(ranked.path, question)
    plan = ranked.plan(question)
    ranked.submit("r", plan)
    for granted in ranked.granted(ranked.step(2)):
        ranked.encode(question, plan, granted, "e0")
    ranked.tell("e0", SetRoles(DECODE))
    assert ranked.cores["e0"]._builder._ranks is not None
    ranked.finish({"r": (question, plan)})
    ranked.settle()
    assert ranked.tokens("r") == expected
    assert answer(ranked, "s", question, "p0", "e0") == expected
    ranked.tell("e0", SetRoles(ENCODE))
    ranked.settle()
    assert ranked.cores["e0"]._builder._ranks is None, "an encoder is one process"
    assert answer(ranked, "t", question, "p0", "d0") == expected


def test_a_switch_that_is_taken_back_leaves_the_engine_at_both_ranks(
    ranked: Bench, question: Question
) -> None:
    expected = expected_of(ranked.path, question)
    ranked.tell("p0", Onload(DECODE))
    ranked.tell("p0", SetRoles(PREFILL))
    ranked.step(2)
    assert answer(ranked, "r", question, "p0", "d0") == expected
    assert set(follower_of(ranked, "p0")._engines) == {"p0.prefill"}


def test_prefill_and_decode_workers_change_places(ranked: Bench, question: Question) -> None:
    expected = expected_of(ranked.path, question)
    assert answer(ranked, "r", question, "p0", "d0") == expected
    for worker, roles in (("p0", DECODE), ("d0", PREFILL)):
        ranked.tell(worker, SetRoles(roles))
    ranked.step(2)
    assert answer(ranked, "s", question, "d0", "p0") == expected
    assert set(follower_of(ranked, "d0")._engines) == {"d0.prefill"}
