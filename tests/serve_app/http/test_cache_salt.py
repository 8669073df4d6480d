"""A cache salt makes what is cached private: the same answer, and nothing found that others left."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from epd.kv.prefix_cache import token_identity
from tests.serve_app.conftest import Front
from tests.serve_app.deployments import Answered, Question, deployed

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")


def test_a_salt_changes_the_first_row_alone() -> None:
    plain, salted = token_identity([5, 6, 7]), token_identity([5, 6, 7], salt=b"0123456789abcdef")
    assert plain.row_bytes(0, 1) != salted.row_bytes(0, 1)
    assert plain.row_bytes(1, 3) == salted.row_bytes(1, 3)
    assert salted.rows[:, 0].tolist() == [5, 6, 7]


@pytest.mark.parametrize("kinds", [(), ("image",), ("video",)], ids=str)
def test_requests_share_only_with_those_of_their_salt(
    checkpoints: dict[str, Path], media: dict[str, Path], kinds: tuple[str, ...]
) -> None:
    text = "What is shown? " * 8
    question = Question(tuple(media[kind] for kind in kinds), text)

    async def ask() -> list[Answered]:
        async with deployed(checkpoints["qwen2_5_vl"], "1e1p1d") as deployment:
            answers = []
            for salt in ("", "", "mine", "mine", "yours", ""):
                answers.append(await deployment.ask(question, cache_salt=salt))
                await deployment.settle()
            return answers

    answers = asyncio.run(ask())
    assert len({answer.tokens for answer in answers}) == 1
    cached = [answer.end.cached_tokens if answer.end else -1 for answer in answers]
    assert [number > 0 for number in cached] == [False, True, False, True, False, True], cached


@pytest.mark.parametrize(("salt", "status"), [("s", 200), ("s" * 1024, 200), ("", 400), ("s" * 1025, 400)])
def test_salts_have_a_length(front: Front, salt: str, status: int) -> None:
    assert front.ask(cache_salt=salt).status_code == status
    assert [request.cache_salt for request in front.service.requests] == ([salt] if status == 200 else [])
