"""Lays out prompts without answering them: what they would use, and texts as tokens and back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor

from epd.serve_app.orchestration.live_answer import AnswerPlan
from epd.serve_app.orchestration.request_planner import RequestPlanner
from epd.serve_app.service import AnswerRequest, Estimate, MediaSize


class Prompts:
    """Implements PromptService. Nothing is encoded, and no worker of a stage hears of it."""

    def __init__(
        self,
        planner: RequestPlanner,
        plan: Callable[[AnswerRequest], Awaitable[AnswerPlan]],
        threads: Executor,
    ) -> None:
        """Stands on an orchestrator's parts. plan: as for an answer. threads: run the tokenizer."""
        self._planner = planner
        self._plan = plan
        self._threads = threads

    async def estimate(self, request: AnswerRequest) -> Estimate:
        """See `PromptService`."""
        plan = await self._plan(request)
        return Estimate(
            plan.usage(0),
            plan.retention,
            plan.sampling.max_tokens or 0,
            tuple(plan.prompt.token_ids.tolist()),
            tuple(
                MediaSize(each.kind, each.num_frames, *each.resized, each.num_tokens) for each in plan.media
            ),
        )

    async def tokens(self, text: str, *, with_special: bool) -> tuple[int, ...]:
        """See `PromptService`."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._planner.tokens_of, text, with_special)

    async def text(self, token_ids: Sequence[int]) -> str:
        """See `PromptService`."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._planner.text_of, token_ids)

    async def names(self, token_ids: Sequence[int]) -> tuple[str, ...]:
        """See `PromptService`."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._planner.names_of, token_ids)
