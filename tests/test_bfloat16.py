"""The pipeline in bfloat16 on a CPU: tokens equal those of `generate` in the same type."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from transformers import AutoProcessor

from epd.engine_config import EngineConfig
from epd.reduction import METHODS, ReductionPolicy
from epd.stages.placement import Placement
from tests.colocated import ColocatedPipeline
from tests.positions import trained_positions_in
from tests.reference import processor_inputs
from tests.serve_app.deployments import Question
from tests.serve_app.worker.bench import Bench
from tests.tiny_models import load_reference

CPU_BFLOAT16 = Placement(torch.device("cpu"), torch.bfloat16)
NUM_EQUAL = 16
# bfloat16 has 8 bits: the nearest logits of the largest size differ by 2**-7 of it, a step. Tokens of random
# weights that are within two are equal too: with AVX2 1.3 were seen.
MAX_ROUNDING = 2**-6
QUESTIONS = ("Which colour?", "how many")
CASES = {"text": (), "image": ("image",), "media": ("video", "wide_image")}


def exact_logits(path: Path, inputs: Mapping[str, torch.Tensor], tokens: list[int]) -> torch.Tensor:
    """The next token's logits after a prompt and these tokens: the same weights, computed in float32."""
    model = load_reference(path, torch.bfloat16).float()
    added = {"input_ids": torch.tensor([tokens]), "attention_mask": torch.ones(1, len(tokens))}
    whole = {
        name: torch.cat([each, added.get(name, torch.zeros(1, len(tokens))).to(each.dtype)], 1)
        if each.shape == inputs["input_ids"].shape
        else each.float() if each.is_floating_point() else each
        for name, each in inputs.items()
    }  # fmt: skip
    with torch.inference_mode(), trained_positions_in(model):
        return model(**whole).logits[0, -1]  # type: ignore[no-any-return]


@pytest.mark.parametrize("names", CASES.values(), ids=CASES)
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "shapes-vl"])
def test_the_first_tokens_equal_generate(
    checkpoints: dict[str, Path], media: dict[str, Path], name: str, names: tuple[str, ...]
) -> None:
    """Two tokens are equal too whose logits, computed in float32, this type cannot tell apart.

    Random weights have such; the trained ones have none. The logits of `generate` in this type are no measure
    of it: they are up to three steps from those in float32 themselves.
    """
    path, paths = checkpoints[name], [media[each] for each in names]
    pipeline = ColocatedPipeline.load(path, EngineConfig(device="cpu", dtype="bfloat16"))
    assert {cache.dtype for cache in pipeline.engine.pools.layer(0)} == {torch.bfloat16}
    model, processor = load_reference(path, torch.bfloat16), AutoProcessor.from_pretrained(path)
    for question in QUESTIONS:
        inputs = processor_inputs(processor, paths, question)
        with torch.inference_mode(), trained_positions_in(model):
            found = model.generate(**inputs, max_new_tokens=NUM_EQUAL, do_sample=False)
        expected = found[0, inputs["input_ids"].shape[1] :].tolist()
        answer = pipeline.ask(paths, question, max_tokens=NUM_EQUAL).token_ids
        pairs = enumerate(zip(answer, expected, strict=False))
        differing = next((place for place, (ours, theirs) in pairs if ours != theirs), None)
        if differing is None:
            assert len(answer) == len(expected)
            continue
        ours, theirs = answer[differing], expected[differing]
        logits = exact_logits(path, inputs, expected[:differing])
        assert name != "shapes-vl"
        assert float(logits[theirs] - logits[ours]) <= MAX_ROUNDING * float(logits.abs().max())


@pytest.mark.parametrize("method", METHODS)
def test_every_reduction_works_in_it(
    checkpoints: dict[str, Path], media: dict[str, Path], method: str
) -> None:
    pipeline = ColocatedPipeline.load(checkpoints["qwen2_5_vl"], EngineConfig(device="cpu", dtype="bfloat16"))
    policy = ReductionPolicy(method, 0.5)
    context = pipeline.prefill_media([media["video"]], num_frames=8, reduction=policy)
    first, again = (pipeline.answer(context, QUESTIONS[0], max_tokens=8) for _ in range(2))
    assert first.token_ids == again.token_ids
    assert 0 < first.usage.visual_tokens < first.usage.visual_tokens_before


def test_separate_workers_give_the_same_tokens(checkpoints: dict[str, Path], media: dict[str, Path]) -> None:
    """Embeddings, keys and values are handed over in it."""
    path, question = checkpoints["qwen2_5_vl"], Question((media["video"], media["image"]))
    found = []
    for topology, worker in (("1e1p1d", "p0"), ("1epd", "epd0")):
        bench = Bench(path, topology, {"device": "cpu", "dtype": "bfloat16"})
        plan = bench.plan(question)
        assert bench.submit("r", plan, worker)
        bench.finish({"r": (question, plan)}, worker if topology == "1epd" else "e0")
        found.append(bench.tokens("r"))
        bench.settle()
    assert found[0] == found[1]
    assert len(found[0]) > 4
