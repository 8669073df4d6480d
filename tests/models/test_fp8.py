"""`--quantization fp8`: answers equal those of transformers with the same rounding, written down apart."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoProcessor

from epd.engine_config import EngineConfig
from epd.errors import UnsupportedModelError
from epd.serve_app.network.process_transport import ProcessTransport
from epd.stages.decoder.rank_cut import cut_model
from epd.stages.loading.quantized_linear import QuantizedLinear, products_text
from epd.stages.loading.weights import load_role
from epd.stages.placement import CPU_FLOAT32
from epd.stages.rank import Rank
from epd.topology import TensorParallel
from tests.colocated import ColocatedPipeline
from tests.models import shrunk
from tests.models.quantized import build
from tests.reference import MAX_TOKENS, gap_to_best, processor_inputs
from tests.serve_app.worker.bench import answered
from tests.stages.decoder.text_models import Runner
from tests.stages.ranks.thread_ranks import StartedThreadRanks
from tests.tiny_models import BUILDERS, EXPERTS, build_qwen3_5, build_qwen3_vl, load_reference

FP8 = replace(CPU_FLOAT32, quantization="fp8")
OPTIONS = {"device": "cpu", "dtype": "float32", "quantization": "fp8"}
# Of the largest logit. Sums in another order move a value over the edge between two of FP8 here and there.
TOLERANCE = 1e-3
QUESTION = "What is shown?"

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")


class RoundedLinear(nn.Module):
    """Both sides rounded to FP8, each row by its largest value, and multiplied in float64."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = rounded(linear.weight.detach()), linear.bias

    def forward(self, rows: Tensor) -> Tensor:
        product = rounded(rows) @ self.weight.t()
        return (product if self.bias is None else product + self.bias).to(rows.dtype)


def rounded(rows: Tensor) -> Tensor:
    steps = rows.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 448
    return (rows / steps).to(torch.float8_e4m3fn).double() * steps.double()


def reference(path: Path) -> Any:
    """Transformers' model with the linear modules of its text layers replaced, but gates of states.

    Experts have their weights rounded, not what they are multiplied by.
    """
    model = load_reference(path)
    for name, tensor in model.get_decoder().layers.named_parameters():
        if ".experts." in name:
            tensor.data = rounded(tensor.data).float()
    for name, module in list(model.get_decoder().layers.named_modules()):
        if isinstance(module, nn.Linear) and not name.endswith(("in_proj_a", "in_proj_b")):
            model.get_decoder().layers.set_submodule(name, RoundedLinear(module))
    return model


@pytest.fixture(scope="module")
def paths(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {name: checkpoints[name] for name in BUILDERS}
    found |= {"qwen3_5": build_qwen3_5(tmp_path_factory.mktemp("recurrent"))}
    return found | {"experts": build_qwen3_vl(tmp_path_factory.mktemp("experts"), **EXPERTS)}


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "experts"])
def test_answers_equal_those_of_the_reference(
    name: str, paths: dict[str, Path], media: dict[str, Path]
) -> None:
    """The last bits of a sum decide which way a value is rounded, and on them two close tokens.

    A state carries what was rounded the other way: .05 of the largest logit was seen, of others .001.
    """
    plain, theirs = load_reference(paths[name]), reference(paths[name])
    processor = AutoProcessor.from_pretrained(paths[name])
    pipeline = ColocatedPipeline.load(paths[name], EngineConfig(**OPTIONS))
    for names in ([], ["image"], ["video", "image"]):
        chosen = [media[each] for each in names]
        inputs = processor_inputs(processor, chosen, QUESTION)
        answer = pipeline.ask(chosen, QUESTION, max_tokens=MAX_TOKENS).token_ids
        not_rounded = gap_to_best(plain, inputs, answer)
        assert gap_to_best(theirs, inputs, answer) <= not_rounded / 4, names
        assert not_rounded > 10 * TOLERANCE, "rounding is seen at all"


@pytest.mark.parametrize("by_modules", [False, True])
def test_logits_equal_those_of_the_reference(paths: dict[str, Path], *, by_modules: bool) -> None:
    path = paths["qwen2_5_vl"]
    model = load_role(path, "language", FP8).model
    found = _logits(Runner.over("qwen2_5-vl", model, by_modules=by_modules))
    expected = _logits(Runner.over("qwen2_5-vl", reference(path), by_modules=True))
    plain = _logits(Runner.over("qwen2_5-vl", load_reference(path), by_modules=True))
    scale = expected.abs().max()
    assert (found - expected).abs().max() <= TOLERANCE * scale
    assert (plain - expected).abs().max() > 10 * TOLERANCE * scale, "rounding is seen at all"


def _logits(runner: Runner) -> Tensor:
    passes = [
        [runner.segment(20, 0, 0, num_logits=2), runner.segment(5, 0, 16, num_logits=5)],
        [runner.segment(30, 20, 0, num_logits=2), runner.segment(1, 5, 16)],
    ]
    return torch.cat([runner.runner.run(segments) for segments in passes])


def test_split_workers_and_ranks_answer_alike(
    paths: dict[str, Path], media: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks split the rows before the second product of a layer's halves, and scale each part by its own."""
    monkeypatch.setattr("epd.stages.ranks.group.ProcessRanks", StartedThreadRanks)
    path, asked = paths["qwen2_5_vl"], (media["video"], media["image"])
    alone = answered(path, "1epd", asked, **OPTIONS)
    assert answered(path, "1e1p1d", asked, **OPTIONS) == alone
    two = [
        answered(path, each, asked, tensor_parallel=TensorParallel(2), **OPTIONS)
        for each in ("1epd", "1e1p1d")
    ]
    assert two[0] == two[1]


def test_ranks_have_their_parts_of_the_same_values_and_scales(paths: dict[str, Path]) -> None:
    path = paths["qwen2_5_vl"]
    whole = _matrices(load_role(path, "language", FP8).model)
    cuts = [partial(cut_model, rank=Rank(index, 2)) for index in range(2)]
    parts = [_matrices(load_role(path, "language", FP8, cut=cut).model) for cut in cuts]
    for name, matrix in whole.items():
        dim = 1 if name.endswith(("o_proj", "down_proj")) else 0
        values = torch.cat([part[name].weight.float() for part in parts], dim)
        assert torch.equal(values, matrix.weight.float()), name
        scales = torch.cat([part[name].scales for part in parts]) if dim == 0 else parts[1][name].scales
        assert torch.equal(scales, matrix.scales), name


def _matrices(model: nn.Module) -> dict[str, Any]:
    return {name: each for name, each in model.named_modules() if isinstance(each, QuantizedLinear)}


def test_all_but_gates_of_states_is_a_quarter_of_float32(paths: dict[str, Path]) -> None:
    loaded = load_role(paths["qwen3_5"], "language", FP8)
    layers = loaded.model.get_decoder().layers  # type: ignore[operator]
    kept = [name for name, each in layers.named_modules() if isinstance(each, nn.Linear)]
    assert {name.rpartition(".")[2] for name in kept} == {"in_proj_a", "in_proj_b"}
    matrices = _matrices(loaded.model).values()
    assert len(matrices) == 6 * 6 + 2 * 7, "of states, and of attention"
    for each in matrices:
        assert each.weight.nbytes == each.in_features * each.out_features
        assert each.scales.nbytes == 4 * each.out_features
    assert not _matrices(load_role(paths["qwen3_5"], "encode", FP8).model)
    assert isinstance(loaded.model.lm_head, nn.Linear)
    assert products_text(loaded.model) == f", {len(matrices)} quantised matrices multiplied in FP8 by rows"
    held = sum(each.nbytes for each in loaded.model.parameters())
    assert abs(loaded.num_bytes - held) <= loaded.model.lm_head.weight.nbytes, "as it is counted"


@pytest.mark.parametrize("name", ["Qwen3-VL-30B-A3B", "InternVL3.5-30B-A3B"])
def test_ranks_have_their_channels_of_experts(name: str, tmp_path: Path) -> None:
    """All of a layer in one tensor, the other way round, or one by one: a scale for each whole row."""
    path = shrunk.build(name, tmp_path)
    whole, plain = (_experts(load_role(path, "language", each).model) for each in (FP8, CPU_FLOAT32))
    cuts = [partial(cut_model, rank=Rank(index, 2)) for index in range(2)]
    parts = [_experts(load_role(path, "language", FP8, cut=cut).model) for cut in cuts]
    for each, ours in plain.items():
        values, scales = whole[each].double(), whole[f"{each}_scales"].double()
        assert torch.equal(values * scales, rounded(ours)), each
        for kind in (each, f"{each}_scales"):
            halves = [part[kind].float() for part in parts]
            joined = halves[0]
            if "gate_up" in kind:
                joined = torch.cat([half.chunk(2, 1)[place] for place in (0, 1) for half in halves], 1)
            elif kind == each:
                joined = torch.cat(halves, 2)
            assert torch.equal(joined, whole[kind].float()), kind


def _experts(model: nn.Module) -> dict[str, Tensor]:
    return {name: each for name, each in model.named_parameters() if ".experts." in name}


def test_what_is_quantised_is_refused_in_one_line(tmp_path: Path) -> None:
    path = build("awq", tmp_path).quantized
    with pytest.raises(UnsupportedModelError, match=r"for weights quantised by 'awq'; allowed: [^\n]*$"):
        load_role(path, "language", FP8)


def test_workers_of_a_machine_do_not_share_what_each_quantises(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = ProcessTransport.__new__(ProcessTransport)
    monkeypatch.setattr(transport, "_files", None, raising=False)  # it would be asked for memory
    assert transport.weights(paths["qwen2_5_vl"], FP8) is None
