"""A worker with all roles encodes beside its turns: answers go on; it ends, switches and fails as before."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from epd.sampling_params import SamplingParams
from epd.serve_app.role_messages import AskRemaining, SetRoles
from epd.serve_app.worker.worker_core import WorkerCore
from epd.serve_app.worker.worker_roles import EncodeRole
from epd.stages.encode.beside import BesideThread, InTurn
from epd.stages.encode.encoder import EncodeStage
from tests.serve_app.deployments import Question, deployed
from tests.serve_app.worker.bench import Bench

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")
SOON_S = 60.0
W = "epd0"


class Merged(Bench):
    """A worker with all roles whose tower goes on when it is told to."""

    def __post_init__(self) -> None:
        self.woken, self.may_go_on = threading.Event(), threading.Event()
        super().__post_init__()
        role = self.cores[W].hosted["encode"]
        assert isinstance(role, EncodeRole)
        self.stage = role.stage
        encode = self.stage._encoder.encode

        def held(*runs: Any) -> Any:
            assert self.may_go_on.wait(SOON_S)
            return encode(*runs)

        self.stage._encoder.encode = held  # type: ignore[method-assign]

    def new(self, name: str, roles: Any) -> WorkerCore:
        return WorkerCore(name, roles, self.worker_settings, self.transport, wake=self.woken.set)

    def until(self, condition: Callable[[], bool], questions: Any = None) -> None:
        """Steps until a condition holds, with the groups of these questions encoded here."""
        while True:
            for granted in self.granted(self.step()):
                assert self.encode(*questions[granted.request_id], granted, W)
            if condition():
                return
            self.woken.wait(0.005)
            self.woken.clear()

    def num_tokens(self, name: str) -> int:
        return len(self.outputs.get(name, {}))


@pytest.fixture
def merged(checkpoints: dict[str, Path]) -> Iterator[Merged]:
    merged = Merged(checkpoints["qwen2_5_vl"], "1epd")
    yield merged
    merged.may_go_on.set()
    for core in merged.cores.values():
        core.close()


def test_an_answer_goes_on_while_media_are_encoded(
    merged: Merged, question: Question, checkpoints: dict[str, Path]
) -> None:
    """And the tokens are those of a worker that encodes in its turns."""
    text = Question((), sampling=SamplingParams(max_tokens=40, ignore_eos=True))
    questions = {"text": (text, merged.plan(text)), "media": (question, merged.plan(question))}
    for name, (_, plan) in questions.items():
        assert merged.submit(name, plan, W)
    merged.until(lambda: merged.stage.is_encoding, questions)
    before = merged.num_tokens("text")
    merged.until(lambda: merged.num_tokens("text") >= before + 10, questions)
    assert merged.stage.is_encoding
    assert merged.num_tokens("media") == 0
    merged.may_go_on.set()
    merged.until(lambda: all(map(merged.is_over, questions)), questions)
    merged.settle()

    in_turn = Bench(checkpoints["qwen2_5_vl"], "1epd")
    for name, (_, plan) in questions.items():
        assert in_turn.submit(name, plan, W)
    in_turn.finish(questions, W)
    assert all(merged.tokens(name) == in_turn.tokens(name) for name in questions)


def test_a_role_is_given_up_once_its_batch_is_over(merged: Merged, question: Question) -> None:
    plan = merged.plan(question)
    assert merged.submit("media", plan, W)
    merged.until(lambda: merged.stage.is_encoding, {"media": (question, plan)})
    merged.tell(W, SetRoles(frozenset({"prefill", "decode"})))
    merged.step(3)
    assert not merged.tell(W, AskRemaining(frozenset({"encode"}))).is_over
    merged.may_go_on.set()
    merged.until(lambda: merged.is_over("media"), {"media": (question, plan)})
    merged.settle()
    assert "encode" not in merged.cores[W].hosted


@pytest.mark.parametrize(
    ("topology", "settings", "is_beside"),
    [
        ("1epd", {}, True),
        ("1ep1d", {}, True),
        ("1e1pd", {}, False),
        ("1epd", {"encode_beside": False}, False),
    ],
)
def test_only_what_would_stall_others_is_encoded_beside_them(
    topology: str, settings: dict[str, Any], is_beside: bool, checkpoints: dict[str, Path]
) -> None:
    bench = Merged.__new__(Merged)
    bench.woken = threading.Event()
    bench.path, bench.topology, bench.settings = checkpoints["qwen2_5_vl"], topology, settings
    Bench.__post_init__(bench)
    (role,) = (core.hosted["encode"] for core in bench.cores.values() if "encode" in core.hosted)
    assert isinstance(role, EncodeRole)
    assert isinstance(role.stage.lane, BesideThread if is_beside else InTurn)
    for core in bench.cores.values():
        core.close()


def test_a_worker_whose_tower_hangs_is_replaced(
    checkpoints: dict[str, Path], media: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its turns go on meanwhile, so it is the batch that tells."""
    question = Question((media["image"],))
    go_on = threading.Event()
    run, num_hung = EncodeStage._calls, 0

    def hang_once(stage: EncodeStage, batch: Any, places: Any) -> Any:
        nonlocal num_hung
        if num_hung == 0:
            num_hung += 1
            go_on.wait(SOON_S)
        return run(stage, batch, places)

    async def ask() -> tuple[tuple[int, ...], float]:
        async with deployed(checkpoints["qwen2_5_vl"], "1epd", fleet={"hang_s": 8.0}) as deployment:
            (answer,) = await deployment.ask_all([question])
            go_on.set()
            return answer.tokens, (await deployment.service.status()).counters.get("workers_lost", 0)

    expected, _ = asyncio.run(ask())
    go_on.clear()
    monkeypatch.setattr(EncodeStage, "_calls", hang_once)
    assert asyncio.run(ask()) == (expected, 1)
