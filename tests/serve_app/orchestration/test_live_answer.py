"""What the consumer of an answer gets at once: everything that has come since it last looked."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest

from epd.errors import UnavailableError
from epd.serve_app.orchestration.live_answer import LiveAnswer
from epd.serve_app.service import AnswerEnd, TokenDelta
from epd.stages.engine.generation import TokenOutput
from epd.types import Usage


class _Plan(SimpleNamespace):
    thinks = False

    def usage(self, num_tokens: int) -> Usage:
        return Usage(0, 0, 2, num_tokens, 0)


def answer_of(*, streams: bool = True) -> LiveAnswer:
    """One choice, without logprobs."""
    request: Any = SimpleNamespace(request_id="q", wants_spans=False, streams=streams, media=())
    plan: Any = _Plan(
        plan_s=0.0, sampling=SimpleNamespace(n=1, logprobs=None), groups=(), retention=1.0, prompt=(1,)
    )
    substituted: Any = SimpleNamespace(total=lambda _keys: 0)
    return LiveAnswer(request, plan, Any, lambda: 1.0, substituted)  # type: ignore[arg-type]


def push(answer: LiveAnswer, index: int, reason: Any = None) -> None:
    token: Any = SimpleNamespace(token_id=index)
    answer.take([TokenOutput("q#1", 0, index, token, str(index), reason)])


def texts(items: Any) -> list[str]:
    return [item.text if isinstance(item, TokenDelta) else "end" for item in items]


def test_tokens_that_wait_are_given_together_and_stay_apart() -> None:
    async def scenario() -> None:
        answer = answer_of()
        async with aclosing(answer.items.all()) as items:  # type: ignore[type-var]
            push(answer, 0)
            assert texts(await anext(items)) == ["0"]
            for index in (1, 2, 3):
                push(answer, index)
            assert texts(await anext(items)) == ["1", "2", "3"]
            waiting = asyncio.ensure_future(anext(items))
            await asyncio.sleep(0)
            push(answer, 4)
            push(answer, 5, "stop")
            answer.finish("d0")
            assert texts(await waiting) == ["4", "5", "end"]
            assert [one async for one in items] == []

    asyncio.run(scenario())


def test_nobody_is_woken_for_the_tokens_of_an_answer_that_is_not_streamed() -> None:
    async def scenario() -> None:
        answer = answer_of(streams=False)
        async with aclosing(answer.items.all()) as items:  # type: ignore[type-var]
            waiting = asyncio.ensure_future(anext(items))
            await asyncio.sleep(0)
            push(answer, 0)
            assert texts(await waiting) == ["0"]
            waiting = asyncio.ensure_future(anext(items))
            for index in (1, 2, 3):
                await asyncio.sleep(0)
                push(answer, index)
            push(answer, 4, "stop")
            await asyncio.sleep(0)
            assert not waiting.done()
            answer.finish("d0")
            assert texts(await waiting) == ["1", "2", "3", "4", "end"]

    asyncio.run(scenario())


def test_a_long_answer_that_is_not_streamed_is_taken_in_pieces() -> None:
    async def scenario() -> None:
        answer = answer_of(streams=False)
        async with aclosing(answer.items.all()) as items:  # type: ignore[type-var]
            push(answer, 0)
            await anext(items)
            waiting = asyncio.ensure_future(anext(items))
            for index in range(1, 65):
                assert not waiting.done()
                await asyncio.sleep(0)
                push(answer, index)
            assert len(await waiting) == 64

    asyncio.run(scenario())


def test_what_came_before_an_error_is_given_before_it() -> None:
    async def scenario() -> None:
        answer = answer_of()
        push(answer, 0)
        answer.items.fail(UnavailableError("the first"))
        answer.items.fail(UnavailableError("the second"))
        async with aclosing(answer.items.all()) as items:  # type: ignore[type-var]
            assert texts(await anext(items)) == ["0"]
            with pytest.raises(UnavailableError, match="the first"):
                await anext(items)

    asyncio.run(scenario())


def test_an_error_wakes_the_consumer_and_one_after_the_end_is_nobodys() -> None:
    async def scenario() -> None:
        failed, ended = answer_of(), answer_of()
        waiting = asyncio.ensure_future(anext(failed.items.all()))
        await asyncio.sleep(0)
        failed.items.fail(UnavailableError("gone"))
        with pytest.raises(UnavailableError, match="gone"):
            await waiting
        push(ended, 0, "stop")
        ended.finish("d0")
        ended.items.fail(UnavailableError("late"))
        given = [items async for items in ended.items.all()]
        assert [texts(items) for items in given] == [["0", "end"]]
        assert isinstance(given[0][-1], AnswerEnd)

    asyncio.run(scenario())
