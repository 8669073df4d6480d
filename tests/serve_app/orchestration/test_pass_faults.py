"""Exceptions inside the steps of stages: model, sampler, text, joining, encoder. Their request fails alone.

No worker is lost, the others get the tokens that they would have had, and nothing is left anywhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import epd.stages.engine.sequence
from epd.errors import EncodeError, InternalError
from epd.sampling_params import SamplingParams
from epd.serve_app.worker.media_feed import MediaFeeds
from epd.stages.encode.encoder import EncodeStage
from epd.stages.engine.engine import LanguageEngine
from epd.stages.engine.sequence import TokenSequence
from tests.media import write_image
from tests.serve_app.deployments import Deployment, Question, deployed, undisturbed

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")

SHORT = SamplingParams(max_tokens=8, ignore_eos=True)
POISONED = replace(SHORT, top_k=77)
SECRET = "what nobody may see"


@dataclass(frozen=True)
class Place:
    """method: of `owner`, which raises `error` where `is_met` says so of its arguments."""

    owner: Any
    method: str
    is_met: Callable[..., bool]
    error: type[Exception]
    topologies: tuple[str, ...] = ("1e1p1d", "1epd")


def of_request(choice: TokenSequence, *_: Any) -> bool:
    return choice.request.sampling.top_k == POISONED.top_k


PLACES = {
    "segment": Place(TokenSequence, "segment", of_request, ZeroDivisionError),
    "text": Place(TokenSequence, "push", of_request, IndexError),
    "sampler": Place(
        epd.stages.engine.sequence,
        "sample",
        lambda _, rows: any(row.state.params.top_k == 77 for row in rows),
        KeyError,
    ),
    "joining": Place(MediaFeeds, "_feed", lambda _, feed: feed.request.sampling.top_k == 77, RuntimeError),
    "adoption": Place(
        LanguageEngine, "_adopt", lambda _, request, *__: request.sampling.top_k == 77, TypeError, ("1e1p1d",)
    ),
}


def set_fault(place: Place, patch: pytest.MonkeyPatch) -> list[Exception]:
    """What has been raised is in the list."""
    raised: list[Exception] = []
    method = getattr(place.owner, place.method)

    def call(*args: Any) -> Any:
        if place.is_met(*args):
            raised.append(place.error(SECRET))
            raise raised[-1]
        return method(*args)

    patch.setattr(place.owner, place.method, call)
    return raised


@pytest.fixture(scope="module")
def others(media: dict[str, Path]) -> list[Question]:
    kinds = ((media["image"],), (), (media["tall_video"],))
    return [Question(paths, f"what {number}?", SHORT) for number, paths in enumerate(kinds)]


@pytest.fixture(scope="module")
def expected(checkpoints: dict[str, Path], others: list[Question]) -> list[tuple[int, ...]]:
    return undisturbed(checkpoints["qwen2_5_vl"], others)


async def check_others(
    deployment: Deployment,
    others: list[Question],
    expected: list[tuple[int, ...]],
    poisoned: Question,
    error: Any,
) -> None:
    asking = asyncio.create_task(deployment.ask_all(others))
    with pytest.raises(error) as caught:
        await deployment.ask(poisoned)
    assert SECRET not in str(caught.value)
    assert [answer.tokens for answer in await asking] == expected
    assert (await deployment.service.status()).counters.get("workers_lost", 0) == 0
    await deployment.settle()


@pytest.mark.parametrize(
    ("name", "topology"), [(name, each) for name, place in PLACES.items() for each in place.topologies]
)
def test_a_step_that_raises_costs_its_request_alone(
    name: str,
    topology: str,
    checkpoints: dict[str, Path],
    others: list[Question],
    expected: list[tuple[int, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raised = set_fault(PLACES[name], monkeypatch)
    poisoned = Question((write_image(tmp_path / "new.png", seed=9),), "who?", POISONED)

    async def run() -> None:
        async with deployed(checkpoints["qwen2_5_vl"], topology) as deployment:
            await check_others(deployment, others, expected, poisoned, InternalError)

    asyncio.run(run())
    assert raised


def test_an_encoder_that_raises_costs_the_group_alone(
    checkpoints: dict[str, Path],
    others: list[Question],
    expected: list[tuple[int, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An exception that no list of expected ones has."""
    poisoned = Question((write_image(tmp_path / "wide.png", width=300, height=60, seed=9),), "who?", SHORT)
    schedule = EncodeStage._schedule

    def tampered(stage: EncodeStage) -> Any:
        def raise_it() -> Any:
            raise LookupError(SECRET)

        jobs = schedule(stage)
        return [replace(job, frames=raise_it) if _is_wide(job) else job for job in jobs]

    def _is_wide(job: Any) -> bool:
        grid = job.plan.grid
        return bool(grid.w > 2 * grid.h)

    monkeypatch.setattr(EncodeStage, "_schedule", tampered)

    async def run() -> None:
        async with deployed(checkpoints["qwen2_5_vl"], "1e1p1d") as deployment:
            await check_others(deployment, others, expected, poisoned, EncodeError)

    asyncio.run(run())
