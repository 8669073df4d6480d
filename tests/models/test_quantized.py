"""Quantised checkpoints answer as transformers does with the dequantised weights, and stay small."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoProcessor

from epd.engine_config import EngineConfig
from epd.errors import ModelError, UnsupportedModelError
from epd.serve_app.local.fleet import LocalTransport
from epd.stages.decoder.rank_cut import cut_model
from epd.stages.loading.host_weights import HostWeights
from epd.stages.loading.quantized_linear import QuantizedLinear, product_of
from epd.stages.loading.weight_files import num_weight_bytes, write_weights
from epd.stages.loading.weights import WholeModel, load_role
from epd.stages.placement import CPU_FLOAT32
from epd.stages.rank import Rank
from epd.topology import TensorParallel
from tests.colocated import ColocatedPipeline
from tests.models.quantized import LAYOUTS, RECURRENT_LAYOUTS, WINDOWED_LAYOUTS, Pair, build, edit_config
from tests.reference import MAX_TOKENS, generated, processor_inputs
from tests.serve_app.worker.bench import answered
from tests.stages.decoder.text_models import Runner
from tests.stages.ranks.thread_ranks import StartedThreadRanks
from tests.tiny_models import load_reference

# Of the largest logit, float32: sums are taken in another order.
TOLERANCE = 1e-5
QUESTION = "What is shown?"

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")


@dataclass(frozen=True, slots=True)
class Subject:
    """A quantised checkpoint, and transformers' model of what it stands for."""

    name: str
    pair: Pair
    model: Any

    def plain_answer(self, media: dict[str, Path]) -> Any:
        """What one worker answers with the weights that the checkpoint stands for."""
        if self.name not in _PLAIN:
            _PLAIN[self.name] = answered(self.pair.plain, "1epd", paths_of(media))
        return _PLAIN[self.name]


# By layout: other workers are held against the same answer.
_PLAIN: dict[str, Any] = {}


@pytest.fixture(scope="module", params=LAYOUTS)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    pair = build(request.param, tmp_path_factory.mktemp(request.param))
    return Subject(request.param, pair, load_reference(pair.plain))


def test_logits_equal_those_of_the_dequantised_weights(subject: Subject) -> None:
    """Of chunks and decodes in common passes, by our decoder and by the modules of transformers."""
    family = LAYOUTS[subject.name].family.replace("_vl", "-vl")
    theirs = logits(Runner.over(family, load_reference(subject.pair.plain), by_modules=True))
    for by_modules in (False, True):
        model = load_role(subject.pair.quantized, "language", CPU_FLOAT32).model
        ours = logits(Runner.over(family, model, by_modules=by_modules))
        assert (ours - theirs).abs().max() <= TOLERANCE * theirs.abs().max()


def logits(runner: Runner) -> torch.Tensor:
    passes = [
        [runner.segment(20, 0, 0, num_logits=2), runner.segment(5, 0, 16, num_logits=5)],
        [runner.segment(30, 20, 0, num_logits=2), runner.segment(1, 5, 16)],
        [runner.segment(1, 50, 0), runner.segment(1, 6, 16)],
    ]
    return torch.cat([runner.runner.run(segments) for segments in passes])


def test_answers_equal_generate(subject: Subject, media: dict[str, Path]) -> None:
    lengths = []
    pipeline = ColocatedPipeline.load(subject.pair.quantized, EngineConfig(device="cpu", dtype="float32"))
    processor = AutoProcessor.from_pretrained(subject.pair.plain)
    for names in ([], ["image"], ["video", "wide_image"]):
        paths = [media[name] for name in names]
        expected = generated(subject.model, processor_inputs(processor, paths, QUESTION))
        assert pipeline.ask(paths, QUESTION, max_tokens=MAX_TOKENS).token_ids == expected
        lengths.append(len(expected))
    assert max(lengths) > 4


@pytest.mark.parametrize("name", RECURRENT_LAYOUTS)
def test_a_model_with_a_recurrent_state_answers_as_generate_does(
    name: str, media: dict[str, Path], tmp_path: Path
) -> None:
    pair = build(name, tmp_path, RECURRENT_LAYOUTS)
    pipeline = ColocatedPipeline.load(pair.quantized, EngineConfig(device="cpu", dtype="float32"))
    processor, model = AutoProcessor.from_pretrained(pair.plain), load_reference(pair.plain)
    for names in ([], ["video", "image"]):
        paths = [media[each] for each in names]
        expected = generated(model, processor_inputs(processor, paths, QUESTION))
        assert pipeline.ask(paths, QUESTION, max_tokens=MAX_TOKENS).token_ids == expected
    part = load_role(pair.quantized, "language", CPU_FLOAT32).model
    quantised = [name for name, each in part.named_modules() if isinstance(each, QuantizedLinear)]
    assert sum(".linear_attn." in each for each in quantised) == 3 * 3, "three matrices in each of three"


# Of their matrices Gemma 4's layer without a window has one less: its keys are values. The small ones, whose
# last four layers have no keys, have two more in each layer.
@pytest.mark.parametrize(
    ("family", "name", "num_matrices"),
    [
        ("gemma3", "fp8", 42),
        ("gemma3", "awq", 42),
        ("gemma4", "fp8-dynamic", 41),
        ("gemma4", "awq", 41),
        ("gemma4-small", "fp8", 100),
    ],
)
def test_a_model_with_sliding_windows_answers_as_generate_does(
    family: str, name: str, num_matrices: int, media: dict[str, Path], tmp_path: Path
) -> None:
    pair = build(name, tmp_path, WINDOWED_LAYOUTS[family])
    part = load_role(pair.quantized, "language", CPU_FLOAT32).model
    assert sum(isinstance(each, QuantizedLinear) for each in part.modules()) == num_matrices
    pipeline = ColocatedPipeline.load(pair.quantized, EngineConfig(device="cpu", dtype="float32"))
    processor, model = AutoProcessor.from_pretrained(pair.plain), load_reference(pair.plain)
    for names in ([], ["wide_image", "image"]):
        paths = [media[each] for each in names]
        expected = generated(model, processor_inputs(processor, paths, QUESTION))
        assert pipeline.ask(paths, QUESTION, max_tokens=MAX_TOKENS).token_ids == expected


def paths_of(media: dict[str, Path]) -> tuple[Path, ...]:
    return media["video"], media["image"]


def test_separate_workers_share_the_weights_and_give_the_same_tokens(
    subject: Subject, media: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_weights(subject.pair.quantized, torch.float32, tmp_path / "weights")
    plain = subject.plain_answer(media)
    monkeypatch.setattr(LocalTransport, "weights", lambda *_: tmp_path / "weights")
    assert answered(subject.pair.quantized, "1e1p1d", paths_of(media)) == plain


def test_values_stay_as_small_as_in_the_files(subject: Subject) -> None:
    loaded = load_role(subject.pair.quantized, "language", CPU_FLOAT32)
    matrices = [each for each in loaded.model.modules() if isinstance(each, QuantizedLinear)]
    assert len(matrices) == 7 * LAYOUTS[subject.name].sizes["num_hidden_layers"]
    bits = 8 * sum(
        parameter.nbytes
        for matrix in matrices
        for name, parameter in matrix.named_parameters()
        if name != "bias"
    )
    num_values = sum(matrix.in_features * matrix.out_features for matrix in matrices)
    assert bits / num_values < {"awq": 4.2}.get(subject.name, 8.1)


def test_mapped_weights_are_those_that_are_read(subject: Subject, tmp_path: Path) -> None:
    """In one piece where they are multiplied together, and as large as they were counted."""
    path = subject.pair.quantized
    write_weights(path, torch.float32, tmp_path / "weights")
    with safe_open(tmp_path / "weights", framework="pt") as file:
        sizes = [file.get_tensor(name).nbytes for name in file.keys()]  # noqa: SIM118
    assert sum(sizes) == num_weight_bytes(path, torch.float32)
    whole = WholeModel(path, CPU_FLOAT32, tmp_path / "weights")
    kept = HostWeights(tmp_path / "weights", CPU_FLOAT32.device)
    for role in ("encode", "language"):
        mapped = dict(whole.part(role).named_parameters())
        copied = dict(load_role(path, role, CPU_FLOAT32, kept).model.named_parameters())
        read = dict(load_role(path, role, CPU_FLOAT32).model.named_parameters())
        assert mapped.keys() == copied.keys() == read.keys()
        assert all(torch.equal(bits_of(mapped[name]), bits_of(read[name])) for name in read)
        assert all(torch.equal(bits_of(copied[name]), bits_of(read[name])) for name in read)
        starts = {name: each.data_ptr() for name, each in mapped.items()}
        for name in starts:
            if ".k_proj." in name:
                before = mapped[name.replace(".k_proj.", ".q_proj.")]
                assert before.data_ptr() + before.nbytes == starts[name]


def test_a_tower_may_be_quantised_too(subject: Subject) -> None:
    tower = load_role(subject.pair.quantized, "encode", CPU_FLOAT32).model
    has_any = any(isinstance(module, QuantizedLinear) for module in tower.modules())
    assert has_any == LAYOUTS[subject.name].has_tower


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def test_weights_that_are_quantised_without_saying_so_are_refused(subject: Subject, tmp_path: Path) -> None:
    """Else values of FP8 would be weights without their scales."""
    folder = shutil.copytree(subject.pair.quantized, tmp_path / "copy")
    edit_config(folder, quantization_config=None)
    has_no_scales = subject.name in ("awq", "gptq")  # of a name of their own
    missing = "tensors are missing" if has_no_scales else "config.json has no quantization_config"
    with pytest.raises(ModelError, match=missing):
        load_role(folder, "language", CPU_FLOAT32)


def test_two_ranks_give_the_same_tokens(
    subject: Subject, media: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("epd.stages.ranks.group.ProcessRanks", StartedThreadRanks)
    plain = subject.plain_answer(media)
    for topology in ("1epd", "1e1p1d"):
        ranks = TensorParallel(2)
        assert answered(subject.pair.quantized, topology, paths_of(media), tensor_parallel=ranks) == plain


def test_each_rank_has_its_part_of_every_value_and_scale(subject: Subject) -> None:
    """Three groups of 128 channels are one and two."""
    path = subject.pair.quantized
    whole = matrices_of(load_role(path, "language", CPU_FLOAT32).model)
    cuts = [partial(cut_model, rank=Rank(index, 2)) for index in range(2)]
    parts = [matrices_of(load_role(path, "language", CPU_FLOAT32, cut=cut).model) for cut in cuts]
    for name, matrix in whole.items():
        dim = 1 if name.endswith(("o_proj", "down_proj")) else 0
        ours = torch.cat([part[name] for part in parts], dim)
        assert torch.equal(ours, matrix)
        if "mlp" in name:
            assert [part[name].shape[dim] for part in parts] in ([128, 256], [192, 192])


def matrices_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What the quantised matrices of layers stand for."""
    matrices = {
        name: product_of([module]).matrix
        for name, module in model.named_modules()
        if isinstance(module, QuantizedLinear)
    }
    return {name: matrix.dequantised(0, matrix.num_rows) for name, matrix in matrices.items()}


def test_ranks_that_would_share_a_scale_are_refused(subject: Subject) -> None:
    """With four of them 64 rows of keys, or 128 columns, where blocks have 128."""
    if subject.name not in ("fp8", "awq"):
        return
    cut = partial(cut_model, rank=Rank(0, 8))
    with pytest.raises(UnsupportedModelError, match=r"size of 8 for .* share a scale; allowed: ") as refused:
        load_role(subject.pair.quantized, "language", CPU_FLOAT32, cut=cut)
    assert "\n" not in str(refused.value)
