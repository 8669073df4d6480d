"""Long answers of a model shaped like shapes-vl 2 are `generate`'s: alone, drafted, moved in their middle.

Its weights are random: what counts is its shape, with numbers of one token, no deepstack and three visual
tokens for two frames.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoProcessor

from encoders import FrameSampling
from epd.cli.options import draft_config
from epd.sampling_params import SamplingParams
from stages.colocated import ColocatedPipeline
from tests import reference
from tests.serve_app.deployments import LETTERS, Question, deployed, until_decoding
from tests.tiny_models import load_reference
from training.qwen3_checkpoint import build_model, build_tokenizer, save_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")

QUESTION = "Describe the video."
NUM_TOKENS, NUM_FRAMES = 120, 9


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = build_model(build_tokenizer())
    for parameter in model.model.language_model.layers.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.1)
    folder = tmp_path_factory.mktemp("lanes") / "model"
    save_checkpoint(model, folder)
    return folder


@pytest.fixture(scope="module")
def expected(checkpoint: Path, media: dict[str, Path]) -> tuple[int, ...]:
    """What transformers answers about an image and a video."""
    processor = AutoProcessor.from_pretrained(checkpoint, local_files_only=True)
    paths, sampling = [media["image"], media["video"]], FrameSampling(num_frames=NUM_FRAMES)
    inputs = reference.processor_inputs(processor, paths, QUESTION, sampling)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(reference, "MAX_TOKENS", NUM_TOKENS)
        tokens = reference.generated(load_reference(checkpoint), inputs)
    assert len(tokens) == NUM_TOKENS
    return tokens


@pytest.mark.parametrize("method", ["none", "prompt-lookup", "recycling"])
def test_long_answers_equal_generate_with_drafts_or_without(
    checkpoint: Path, media: dict[str, Path], expected: tuple[int, ...], method: str
) -> None:
    pipeline = ColocatedPipeline.load(checkpoint, num_threads=1, drafting=draft_config(method, 5))
    paths = [media["image"], media["video"]]
    answer = pipeline.ask(paths, QUESTION, num_frames=NUM_FRAMES, max_tokens=NUM_TOKENS)
    assert answer.token_ids == expected
    assert (pipeline.engine.counts.num_accepted_tokens > 0) == (method != "none")


def test_a_long_answer_that_moves_in_its_middle_stays_the_same(
    checkpoint: Path, media: dict[str, Path], expected: tuple[int, ...]
) -> None:
    question = Question(
        (media["image"], media["video"]),
        QUESTION,
        SamplingParams(max_tokens=NUM_TOKENS),
        FrameSampling(num_frames=NUM_FRAMES),
    )

    async def run() -> None:
        async with deployed(checkpoint, "1e1p2d") as deployment:
            asking = [asyncio.create_task(deployment.ask(question)) for _ in range(2)]
            await until_decoding(deployment, "d0", 1)
            switch = await deployment.service.switch_roles("d0", frozenset({LETTERS["e"]}))
            assert switch.num_moved > 0
            assert [(await each).tokens for each in asking] == [expected] * 2
            await deployment.settle()

    asyncio.run(run())
