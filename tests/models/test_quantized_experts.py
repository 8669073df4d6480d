"""Experts in FP8 answer as transformers does with what they stand for, whole and shared by ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoProcessor

from epd.engine_config import EngineConfig
from epd.errors import ModelError, UnsupportedModelError
from epd.profiles.analytic import analytic_profile
from epd.stages.decoder.experts import Experts
from epd.stages.decoder.rank_cut import cut_model
from epd.stages.loading.quantized_experts import QuantizedExperts
from epd.stages.loading.quantized_linear import products_text
from epd.stages.loading.weight_files import num_weight_bytes, write_weights
from epd.stages.loading.weights import WholeModel, load_role
from epd.stages.placement import CPU_FLOAT32
from epd.stages.profiling import Profiler
from epd.stages.rank import Rank
from epd.topology import TensorParallel
from tests.colocated import ColocatedPipeline
from tests.models.quantized import EXPERT_LAYOUTS, Pair, build
from tests.reference import MAX_TOKENS, generated, processor_inputs
from tests.serve_app.worker.bench import answered
from tests.stages.ranks.thread_ranks import StartedThreadRanks
from tests.tiny_models import load_reference

QUESTION = "What is shown?"
BFLOAT16 = replace(CPU_FLOAT32, dtype=torch.bfloat16)

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


@dataclass(frozen=True, slots=True)
class Subject:
    """A checkpoint with experts in FP8, and transformers' model of what it stands for."""

    name: str
    pair: Pair
    model: Any


@pytest.fixture(scope="module", params=EXPERT_LAYOUTS)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    pair = build(request.param, tmp_path_factory.mktemp(request.param), EXPERT_LAYOUTS)
    return Subject(request.param, pair, load_reference(pair.plain))


def test_answers_equal_generate(subject: Subject, media: dict[str, Path]) -> None:
    pipeline = ColocatedPipeline.load(subject.pair.quantized, EngineConfig(device="cpu", dtype="float32"))
    processor = AutoProcessor.from_pretrained(subject.pair.plain)
    # Transformers takes frames of GLM-4.5V's videos for those of images.
    asked = ["image"] if subject.name == "fp8-dynamic-single" else ["video", "image"]
    for names in ([], asked):
        paths = [media[name] for name in names]
        expected = generated(subject.model, processor_inputs(processor, paths, QUESTION))
        assert pipeline.ask(paths, QUESTION, max_tokens=MAX_TOKENS).token_ids == expected


@torch.inference_mode()
def test_experts_are_what_they_stand_for_and_stay_as_small_as_in_the_files(subject: Subject) -> None:
    """Computed by our decoder, of few rows and of many, and as a module of transformers."""
    model = load_role(subject.pair.quantized, "language", CPU_FLOAT32).model
    theirs = dict(subject.model.named_modules())
    found = {name: each for name, each in model.named_modules() if isinstance(each, QuantizedExperts)}
    assert len(found) == sum(name.endswith(".experts") for name in theirs) > 0
    assert f", experts of {len(found)} layers dequantised in their products" in products_text(model)
    for name, ours in found.items():
        num_values = sum(each.numel() for each in theirs[name].parameters())
        assert sum(each.nbytes for each in ours.parameters()) <= 1.05 * num_values
        for num_rows in (1, 9):
            rows = torch.randn(num_rows, theirs[name].down_proj.shape[1])
            weights, chosen = torch.rand(num_rows, 4).topk(2)
            expected = theirs[name](rows, chosen, weights)
            for each in (ours(rows, chosen, weights), Experts.of(ours)(rows, chosen, weights)):
                torch.testing.assert_close(each, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def test_planner_and_profile_count_what_is_held(subject: Subject) -> None:
    """Computed of the configuration, without scales, norms and what has 16 bits; measured, to the byte."""
    path = subject.pair.quantized
    loaded = load_role(path, "language", BFLOAT16)
    held = sum(each.nbytes for each in loaded.model.parameters())
    computed = analytic_profile("h100", str(path)).memory.language_weight_bytes
    assert computed == pytest.approx(held, rel=0.05)
    if subject.name == "fp8-packed":
        with torch.inference_mode():
            measured = Profiler(path, 1, BFLOAT16).memory()
        assert measured.language_weight_bytes == held


def test_mapped_weights_are_those_that_are_read(subject: Subject, tmp_path: Path) -> None:
    path = subject.pair.quantized
    write_weights(path, torch.float32, tmp_path / "weights")
    held = load_file(tmp_path / "weights").values()
    assert sum(each.nbytes for each in held) == num_weight_bytes(path, torch.float32)
    mapped = experts_of(WholeModel(path, CPU_FLOAT32, tmp_path / "weights").part("language"))
    read = experts_of(load_role(path, "language", CPU_FLOAT32).model)
    assert mapped.keys() == read.keys()
    assert all(torch.equal(mapped[name].float(), each.float()) for name, each in read.items())


def experts_of(model: Any) -> dict[str, Tensor]:
    return {name: each for name, each in model.named_parameters() if ".experts." in name}


def test_ranks_have_their_channels_of_every_expert_and_the_same_tokens(
    subject: Subject, media: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = subject.pair.quantized
    whole = experts_of(load_role(path, "language", CPU_FLOAT32).model)
    cuts = [partial(cut_model, rank=Rank(index, 2)) for index in range(2)]
    parts = [experts_of(load_role(path, "language", CPU_FLOAT32, cut=cut).model) for cut in cuts]
    for name, each in whole.items():
        ours = [part[name].float() for part in parts]
        if "down_proj" in name:
            joined = torch.cat(ours, 2) if each.shape[2] > 1 else ours[1]
        else:
            joined = torch.cat([half.chunk(2, 1)[kind] for kind in (0, 1) for half in ours], 1)
        assert torch.equal(joined, each.float()), name
    monkeypatch.setattr("epd.stages.ranks.group.ProcessRanks", StartedThreadRanks)
    asked = (media["image"],)
    ranks = TensorParallel(2)
    assert answered(path, "1epd", asked, tensor_parallel=ranks) == answered(subject.pair.plain, "1epd", asked)


def test_what_does_not_fit_is_refused_in_one_line(tmp_path: Path) -> None:
    """More ranks than an expert has blocks, one without a scale, one that is not in FP8."""
    path = build("fp8-packed", tmp_path, EXPERT_LAYOUTS).quantized
    cut = partial(cut_model, rank=Rank(0, 4))
    message = r"size of 4 for .*experts, of whose 384 channels 128 cannot be parted; allowed: at most 3; set"
    with pytest.raises(UnsupportedModelError, match=message) as refused:
        load_role(path, "language", CPU_FLOAT32, cut=cut)
    assert "\n" not in str(refused.value)
    path = build("fp8-dynamic-single", tmp_path / "single", EXPERT_LAYOUTS).quantized
    file, tensors = path / "model.safetensors", load_file(path / "model.safetensors")
    name = "model.language_model.layers.1.mlp.experts.2.up_proj"
    without = {each: tensor for each, tensor in tensors.items() if not each.startswith(name)}
    scale = {f"{name}.weight_scale": tensors[f"{name}.weight_scale"]}
    plain = {f"{name}.weight": tensors[f"{name}.weight"].float()}
    for kept, words in (
        (
            {f"{name}.weight": tensors[f"{name}.weight"]},
            "up_proj.weight is of FP8 and has 0 tensors",
        ),
        (plain, "1 experts of .*gate_up_proj_scales are missing; get all of the files"),
        (scale, "1 experts of .*gate_up_proj are missing; get all of the files"),
    ):
        save_file(without | kept, file)
        with pytest.raises(ModelError, match=words):
            load_role(path, "language", CPU_FLOAT32)
