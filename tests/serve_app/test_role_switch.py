"""Workers that change roles under load: every answer ends with the tokens it would have had, none is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from epd.routing import Stage
from epd.sampling_params import SamplingParams
from serve_app.role_switch import SwitchLimits
from tests.serve_app.orchestration import LETTERS, Deployment, Question, deployed

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")

MEDIA = (("image",), ("video",), (), ("image", "tall_video"))
KINDS = ("e->p", "p->d", "d->e", "e->d", "d->p", "p->e")


def roles(letters: str) -> frozenset[Stage]:
    return frozenset(LETTERS[letter] for letter in letters)


def params(number: int) -> SamplingParams:
    """Greedy and drawn, with penalties, and some with several answers, which are not moved."""
    return SamplingParams(
        max_tokens=40,
        ignore_eos=True,
        temperature=number % 3 / 2,
        presence_penalty=number % 2 / 2,
        seed=number,
        n=2 if number % 6 == 5 else 1,
    )


@pytest.fixture(scope="module")
def questions(media: dict[str, Path]) -> list[Question]:
    return [
        Question(tuple(media[name] for name in MEDIA[number % len(MEDIA)]), f"what {number}?", params(number))
        for number in range(12)
    ]


@pytest.fixture(scope="module")
def expected(checkpoints: dict[str, Path], questions: list[Question]) -> list[tuple[int, ...]]:
    """What comes of the questions when nothing happens."""

    async def run() -> list[tuple[int, ...]]:
        async with deployed(checkpoints["qwen2_5_vl"], "1epd") as deployment:
            return [answer.tokens for answer in await deployment.ask_all(questions)]

    return asyncio.run(run())


async def until_busy(deployment: Deployment, worker: str) -> None:
    books = deployment.service.router.books(worker)
    while not (books.encode_patches or books.num_prefills or books.num_decodes):
        await asyncio.sleep(0.002)


@pytest.mark.parametrize("kind", KINDS)
def test_a_switch_under_load_changes_no_token(
    kind: str, checkpoints: dict[str, Path], questions: list[Question], expected: list[tuple[int, ...]]
) -> None:
    before, after = kind.split("->")
    worker = f"{before}0"

    async def run() -> None:
        async with deployed(checkpoints["qwen2_5_vl"], "2e2p2d") as deployment:
            asking = asyncio.create_task(deployment.ask_all(questions))
            await until_busy(deployment, worker)
            await asyncio.sleep(0.1)
            switch = await deployment.service.switch_roles(worker, roles(after))
            print(switch.line())
            assert [answer.tokens for answer in await asking] == expected
            assert deployment.fleet.workers[worker].roles == roles(after)
            assert [answer.tokens for answer in await deployment.ask_all(questions)] == expected
            await deployment.settle()
            assert set(deployment.fleet.core(worker).hosted) == roles(after)
            status = await deployment.service.status()
            assert (switch.kind, switch.error) == (kind, "")
            assert status.switches == (switch,)
            assert status.counters.get("retries", 0) == status.counters["refused"] == 0

    asyncio.run(run())
