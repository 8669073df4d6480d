"""A client that asks about something new each time leaves what others have cached where it is."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from epd.sampling_params import SamplingParams
from epd.serve_app.worker.worker_roles import EncodeRole
from tests.serve_app.deployments import Question, deployed

NUM_KV_TOKENS = 1024
NUM_OTHERS = 24


@pytest.mark.parametrize(("client", "is_kept"), [("ann", True), ("bob", False)], ids=["two", "one"])
def test_a_prompt_stays_cached_beside_a_greedy_client(
    checkpoints: dict[str, Path], media: dict[str, Path], client: str, is_kept: bool
) -> None:
    """Fails if nothing would go without shares: the same questions of one client drop the first."""
    ours = Question((media["image"],), "What is shown? " * 8, SamplingParams(max_tokens=2))

    async def cached_shares() -> list[float]:
        async with deployed(
            checkpoints["qwen2_5_vl"], "1e1p1d", settings={"num_kv_tokens": NUM_KV_TOKENS}
        ) as deployment:
            ends = [(await deployment.ask(ours, client=client)).end]
            for number in range(NUM_OTHERS):
                other = Question((), f"{number} is a number. " * 20, SamplingParams(max_tokens=2))
                await deployment.ask(other, client="bob")
            ends.append((await deployment.ask(ours, client=client)).end)
            return [0.0 if end is None else end.cached_tokens / end.usage.prompt_tokens for end in ends]

    before, after = asyncio.run(cached_shares())
    assert (before > 0.5, after > 0.5) == (False, is_kept)


def test_embeddings_count_as_those_of_who_asked_first(
    checkpoints: dict[str, Path], media: dict[str, Path]
) -> None:
    question = Question((media["image"],), "What is shown?", SamplingParams(max_tokens=2))

    async def owners() -> set[str]:
        async with deployed(checkpoints["qwen2_5_vl"], "1e1pd") as deployment:
            for client in ("ann", "bob"):
                await deployment.ask(question, client=client)
            encoder = next(core.hosted["encode"] for core in deployment.cores() if "encode" in core.hosted)
            assert isinstance(encoder, EncodeRole)
            return {key.client for key in encoder.stage.cache.eviction_order()}

    assert asyncio.run(owners()) == {"ann"}
