"""What the orchestrator learns from the tokens that workers report: a first one, once for each request."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from epd.sampling_params import SamplingParams
from tests.serve_app.deployments import Question, deployed, until_decoding

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")

LONG = SamplingParams(max_tokens=600, ignore_eos=True)


def test_a_first_token_is_recorded_once_and_frees_its_prefill_worker(
    checkpoints: dict[str, Path], media: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Admission predicts TTFT from these records; while answers go on, prompts are counted no longer."""
    questions = [Question((media["image"],), f"what {number}?", LONG) for number in range(2)]

    async def run() -> None:
        async with deployed(checkpoints["qwen2_5_vl"], "1e1p1d") as deployment:
            service, recorded = deployment.service, list[float]()
            monkeypatch.setattr(service.queue, "record_first_token", recorded.append)
            asking = asyncio.create_task(deployment.ask_all(questions))
            await until_decoding(deployment, "d0", 2)
            assert not asking.done()
            assert (service.router.in_flight("p0").num_prefills, len(recorded)) == (0, 2)
            answers = await asking
            await deployment.settle()
        assert [len(answer.tokens) for answer in answers] == [600, 600]
        assert len(recorded) == 2
        assert all(0 < seconds < 120 for seconds in recorded)

    asyncio.run(asyncio.wait_for(run(), 120.0))
