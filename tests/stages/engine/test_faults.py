"""Exceptions drawn at every place of a step: their request fails, the others' tokens are right."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import epd.stages.engine.sequence
from epd.errors import InternalError, RankLostError
from epd.kv.drafting import DraftConfig
from epd.sampling_params import SamplingParams
from epd.stages.engine.engine import LanguageEngine
from epd.stages.engine.generation import MAX_FAULTS_IN_A_ROW, RequestFault, StepResult, run_apart
from epd.stages.engine.model_runner import ModelRunner
from epd.stages.engine.sequence import TokenSequence
from tests.stages.conftest import Subject
from tests.stages.prompts import Drive
from tests.stages.test_split_stages import Deployment, feed

CULPRIT = "r2"
KINDS = (RuntimeError, ValueError, KeyError, IndexError, MemoryError, ZeroDivisionError, TypeError)


@pytest.fixture
def subject(subjects: Callable[[str], Subject]) -> Subject:
    return subjects("qwen2_5_vl")


class Trap:
    """Raises each time that a place is passed for the culprit, but for the first `moment` times."""

    def __init__(self, moment: int) -> None:
        self.moment = moment
        self.num_raised = 0
        self._num_passed = 0
        self._rng = random.Random(moment)

    def check(self, request_id: str) -> None:
        if request_id.partition("#")[0] != CULPRIT:
            return
        self._num_passed += 1
        if self._num_passed > self.moment:
            self.num_raised += 1
            raise self._rng.choice(KINDS)("a secret of the server")


def set_runner(trap: Trap, patch: pytest.MonkeyPatch) -> None:
    """The model runner, at once for all that are in the pass."""
    owners: dict[int, tuple[Any, str]] = {}
    cut, run = TokenSequence.segment, ModelRunner.run

    def segment(choice: TokenSequence, *args: Any) -> Any:
        made = cut(choice, *args)
        owners[id(made)] = made, choice.request_id
        return made

    def run_some(runner: ModelRunner, segments: Any) -> torch.Tensor:
        logits = run(runner, segments)
        for each in segments:
            trap.check(owners[id(each)][1])
        return logits

    patch.setattr(TokenSequence, "segment", segment)
    patch.setattr(ModelRunner, "run", run_some)


def set_sampler(trap: Trap, patch: pytest.MonkeyPatch) -> None:
    sample = epd.stages.engine.sequence.sample

    def sample_rows(logits: torch.Tensor, rows: Any) -> Any:
        for row in rows:
            trap.check(CULPRIT if row.state.params.top_k == 77 else "")
        return sample(logits, rows)

    patch.setattr(epd.stages.engine.sequence, "sample", sample_rows)


def set_method(name: str) -> Callable[[Trap, pytest.MonkeyPatch], None]:
    def set_trap(trap: Trap, patch: pytest.MonkeyPatch) -> None:
        method = getattr(TokenSequence, name)

        def call(choice: TokenSequence, *args: Any) -> Any:
            trap.check(choice.request_id)
            return method(choice, *args)

        patch.setattr(TokenSequence, name, call)

    return set_trap


PLACES = {
    "model runner": set_runner,
    "sampler": set_sampler,
    "segment": set_method("segment"),
    "text": set_method("push"),
    "draft": set_method("draft"),
    "admission": set_method("forget_tables"),
}


class FaultyDrive(Drive):
    """Also takes faults."""

    def __init__(self, engine: LanguageEngine, seed: int) -> None:
        super().__init__(engine, seed)
        self.faults: list[RequestFault] = []

    def step(self) -> None:
        result = self.engine.step()
        self.faults += result.faults
        for output in result.outputs:
            self.outputs.setdefault((output.request_id, output.choice), []).append(output)
        self.engine.check_integrity()


@pytest.mark.parametrize("moment", [0, 1, 5])
@pytest.mark.parametrize("place", PLACES)
def test_an_exception_costs_its_request_alone(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, place: str, moment: int
) -> None:
    prompts = subject.mix(6)
    engine = subject.engine(drafting=DraftConfig("prompt-lookup", 2), enable_prefix_caching=True)
    drive = FaultyDrive(engine, seed=moment)
    request = type(prompts[CULPRIT]).request

    def request_of(prompt: Any, name: str, **options: Any) -> Any:
        top_k = 77 if name == CULPRIT else 0
        sampling = SamplingParams(max_tokens=12, top_k=top_k, n=3 if name == CULPRIT else 1)
        return request(prompt, name, sampling=sampling)

    monkeypatch.setattr(type(prompts[CULPRIT]), "request", request_of)
    trap = Trap(moment)
    PLACES[place](trap, monkeypatch)
    tokens = drive.run(prompts)
    assert [fault.request_id for fault in drive.faults] == [CULPRIT] * bool(trap.num_raised)
    assert trap.num_raised or (place, moment) in {("admission", 1), ("admission", 5)}
    for fault in drive.faults:
        assert isinstance(fault.error, InternalError)
        assert "secret" not in str(fault.error)
    others = {name: prompt.expected for name, prompt in prompts.items() if name != CULPRIT}
    assert {name: tokens[name] for name in others} == others
    assert engine.kv.usage == 0


@pytest.mark.parametrize("place", ["model runner", "text"])
@pytest.mark.parametrize("moment", [0, 2, 4])
def test_split_workers_forget_what_has_failed(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, place: str, moment: int
) -> None:
    """Wherever it happens: in prefill, while keys and values are being handed over, or in decode."""
    deployment = Deployment(subject, 1, random.Random(moment), chunk=16)
    prompts = subject.mix(5)
    PLACES[place](Trap(moment), monkeypatch)
    failed: list[str] = []
    take = deployment.take

    def take_all(result: StepResult) -> None:
        failed.extend(fault.request_id for fault in result.faults)
        for fault in result.faults:  # what an orchestrator would do
            deployment.prefill.abort(fault.request_id)
            deployment.decode["d0"].abort(fault.request_id)
        take(result)

    monkeypatch.setattr(deployment, "take", take_all)
    feed(deployment, prompts)
    others = [name for name in prompts if name != CULPRIT]
    for _ in range(600):
        deployment.step()
        if failed and all(deployment.is_over(name) for name in others):
            break
    assert failed == [CULPRIT]
    assert {name: deployment.tokens(name) for name in others} == {
        name: prompts[name].expected for name in others
    }
    deployment.settle()


def test_broken_books_end_the_worker(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = subject.engine()
    engine.add(subject.prompts[0].request(CULPRIT))
    PLACES["text"](Trap(0), monkeypatch)
    monkeypatch.setattr(engine.scheduler, "remove", lambda *_, **__: None)
    with pytest.raises(AssertionError):
        engine.step()


def test_a_worker_that_fails_everybody_ends(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """One success between them and the requests were to blame."""
    engine = subject.engine()
    monkeypatch.setattr(ModelRunner, "run", lambda *_: 1 / 0)
    for number in range(MAX_FAULTS_IN_A_ROW):
        engine.add(subject.prompts[0].request(f"r{number}"))
        assert len(engine.step().faults) == 1
    engine.add(subject.prompts[0].request("last"))
    with pytest.raises(ZeroDivisionError):
        engine.step()


def test_parts_are_run_in_halves() -> None:
    """Of 64 parts with one culprit: 2 runs for each halving, and each of the others has run."""
    runs: list[int] = []
    done: list[int] = []
    failed: list[int] = []

    def run(parts: Any) -> None:
        runs.append(len(parts))
        if 37 in parts:
            raise ValueError
        done.extend(parts)

    run_apart(range(64), run, lambda part, _: failed.append(part))
    assert (failed, done) == ([37], [each for each in range(64) if each != 37])
    assert len(runs) == 13


def test_a_lost_rank_costs_the_worker_and_no_request() -> None:
    def run(_parts: Any) -> None:
        raise RankLostError("one of 2 processes")

    failed: list[object] = []
    with pytest.raises(RankLostError):
        run_apart([1, 2], run, lambda part, _: failed.append(part))
    assert not failed
