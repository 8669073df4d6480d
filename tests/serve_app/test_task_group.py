"""A wait for the tasks of an owner ends, whichever tasks have ended and whatever they start."""

from __future__ import annotations

import asyncio

from epd.serve_app.task_group import Tasks


def test_a_wait_ends_for_tasks_that_have_ended_a_moment_ago() -> None:
    """Their owner has not been told yet. From Python 3.12 on, gathering such tasks gives the loop no turn."""

    async def wait() -> int:
        tasks = Tasks()
        ended = asyncio.Event()

        async def work() -> None:
            ended.set()

        task = tasks.spawn(work())
        await ended.wait()
        assert task.done()
        await tasks.wait()
        return 7

    assert asyncio.run(wait()) == 7


def test_a_wait_covers_what_tasks_start() -> None:
    done: list[str] = []

    async def wait() -> None:
        tasks = Tasks()

        async def second() -> None:
            await asyncio.sleep(0.01)
            done.append("second")

        async def first() -> None:
            tasks.spawn(second())
            done.append("first")

        tasks.spawn(first())
        await tasks.wait()

    asyncio.run(wait())
    assert done == ["first", "second"]
