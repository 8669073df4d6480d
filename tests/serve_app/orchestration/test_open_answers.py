"""An answer whose length nobody named goes on to the end of the context, as with OpenAI and vLLM."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from epd.sampling_params import TYPICAL_TOKENS, SamplingParams
from tests.serve_app.conftest import QUESTION, Front
from tests.serve_app.deployments import Question, deployed

CONTEXT = 2 * TYPICAL_TOKENS


@pytest.fixture(scope="module")
def small_context(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a context that a test can fill."""
    path = tmp_path_factory.mktemp("model") / "small"
    shutil.copytree(checkpoints["qwen2_5_vl"], path)
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = CONTEXT
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("topology", ["1epd", "1e1p1d"])
def test_it_ends_with_the_context(small_context: Path, topology: str) -> None:
    question = Question((), "How many?", SamplingParams(ignore_eos=True))

    async def run() -> None:
        async with deployed(small_context, topology) as deployment:
            answered = await deployment.ask(question)
        assert answered.end is not None
        usage = answered.end.usage
        assert usage.completion_tokens == len(answered.tokens) > TYPICAL_TOKENS
        assert usage.prompt_tokens + usage.completion_tokens == CONTEXT

    asyncio.run(run())


@pytest.mark.parametrize("more", [{}, {"max_tokens": None}, {"max_completion_tokens": None}])
def test_a_request_that_names_none_sets_none(front: Front, more: dict[str, None]) -> None:
    body = {name: value for name, value in QUESTION.items() if "max" not in name}
    assert front.ask(body, **more).status_code == 200
    assert front.service.requests[-1].sampling.max_tokens is None
