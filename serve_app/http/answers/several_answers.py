"""Answers several prompts of one request as if they were choices of one answer.

prompt 0, n 2    choices 0 1      a few prompts are answered at a time, in order of their numbers;
prompt 1, n 2    choices 2 3      their pieces come as they are ready

"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import reduce

from epd.serve_app.service import AnswerEnd, AnswerItem, AnswerRequest, AnswerService, TokenDelta
from epd.types import StageTimings, Usage

NUM_AT_ONCE = 16

_Pieces = asyncio.Queue[Sequence[AnswerItem] | None]


async def answer_all(
    service: AnswerService, requests: Sequence[AnswerRequest]
) -> AsyncGenerator[Sequence[AnswerItem], None]:
    """Yields the pieces of all answers, and one AnswerEnd with what all of them have used as the last.

    requests: at least one, each with the same number of choices.
    Closing it closes all answers. Raises EPDError as the first answer that fails.
    """
    ends: list[AnswerEnd] = []
    pieces: _Pieces = asyncio.Queue()
    waiting = iter(enumerate(requests))
    workers = [
        asyncio.create_task(_answer_next(service, waiting, pieces, ends))
        for _ in range(min(NUM_AT_ONCE, len(requests)))
    ]
    done = asyncio.gather(*workers)
    done.add_done_callback(lambda _: pieces.put_nowait(None))
    try:
        while (items := await pieces.get()) is not None:
            yield items
        await done
        if len(ends) == len(requests):
            yield [_sum_of(ends)]
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(done, *workers, return_exceptions=True)


async def _answer_next(
    service: AnswerService,
    waiting: Iterator[tuple[int, AnswerRequest]],
    pieces: _Pieces,
    ends: list[AnswerEnd],
) -> None:
    """Answers one request after the other until none is waiting. waiting: shared with others."""
    for number, request in waiting:
        first_choice = number * request.sampling.n
        async with aclosing(service.answer(request)) as answer:
            async for items in answer:
                ends += [item for item in items if isinstance(item, AnswerEnd)]
                moved = [_moved(item, first_choice) for item in items if not isinstance(item, AnswerEnd)]
                if moved:
                    pieces.put_nowait(moved)


def _moved(item: AnswerItem, first_choice: int) -> AnswerItem:
    return replace(item, index=item.index + first_choice) if isinstance(item, TokenDelta) else item


def _sum_of(ends: Sequence[AnswerEnd]) -> AnswerEnd:
    """Returns what several answers have used. Seconds of stages add up, their total is the longest."""
    return replace(
        ends[0],
        usage=reduce(Usage.__add__, (end.usage for end in ends)),
        cached_tokens=sum(end.cached_tokens for end in ends),
        num_retries=sum(end.num_retries for end in ends),
        timings=_timings([end.timings for end in ends]),
        queued=_timings([end.queued for end in ends]),
    )


def _timings(timings: Sequence[StageTimings]) -> StageTimings:
    total = reduce(StageTimings.__add__, timings)
    return replace(total, total_s=max(each.total_s for each in timings))
