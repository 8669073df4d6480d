"""The gated delta rule beside the functions of transformers, the kernels beside it, and runs of a pass."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    causal_conv1d_fn,
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from epd.encoders import FrameSampling, load_adapter
from epd.engine_config import EngineConfig
from epd.sampling_params import SamplingParams
from epd.stages.decoder.delta_layer import DeltaSizes, GatedDelta
from epd.stages.decoder.delta_rule import (
    DeltaInputs,
    DeltaPlan,
    DeltaWork,
    delta_chunks,
    delta_step,
    work_shapes,
    work_tables,
)
from epd.stages.decoder.operations import RmsNorm
from epd.stages.engine.generation import GenerationSettings
from epd.stages.engine.setup import build_engine
from tests.stages.decoder.test_fusions import on_gpu
from tests.stages.prompts import Drive, prompt_of
from tests.tiny_models import build_qwen3_5, load_reference

CPU = torch.device("cpu")
HEADS, KEYS, VALUES = 3, 8, 5


@dataclass(frozen=True, slots=True)
class Case:
    """Passes of a layer. heads: of keys and of values, and channels of each.

    passes: of each its runs: rows, the slot that is read, the one that is written, and drafts.
    is_alike: all keys of a head are one, and nothing decays, so that an inverse by powers would grow.
    """

    heads: tuple[int, int, int, int]
    passes: tuple[tuple[tuple[int, int | None, int, int], ...], ...]
    is_alike: bool = False


# Decodes, drafts, chunks that are full and by a token less or more; a second pass reads what the first wrote.
CASES = [
    Case((1, 2, 128, 32), (((1, 3, 5, 0), (63, None, 1, 0), (64, 2, 0, 0)), ((65, 1, 4, 0), (1, 5, 3, 0)))),
    Case((1, 1, 128, 128), (((5, 3, 5, 2), (200, None, 1, 0)), ((1, 1, 2, 0),))),
    Case((2, 4, 24, 20), (((17, 3, 5, 0), (2, 2, 0, 0), (70, None, 1, 0), (4, 4, 6, 3)),)),
    Case((1, 1, 16, 16), (((130, 3, 5, 0),),), is_alike=True),
]
# A later piece of two rows, whose three last inputs begin in the piece before it.
LAYER = Case(
    (1, 2, 24, 20),
    (((1, 3, 5, 0), (66, None, 1, 0), (2, 2, 0, 0), (4, 4, 6, 3)), ((17, 1, 4, 0), (1, 5, 3, 0))),
)
# Of the largest number, against the twin in float64. The twin itself is off by 1e-5 in float32: few decays
# are small, and a token adds what is left of a difference.
TOLERANCE = 3e-5
# The same sums in another order: a number of bfloat16 may be the next one, and its SiLU another beside it.
LAYER_TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2}


def drawn(num_tokens: int, seed: int = 0, heads: tuple[int, int, int, int] | None = None) -> DeltaInputs:
    """Decays from hardly any to nearly all, strengths between 0 and 1. heads: as in `Case`."""
    draw = torch.Generator().manual_seed(seed)
    num_key_heads, num_heads, keys, values = heads or (HEADS, HEADS, KEYS, VALUES)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    query, key = (
        torch.nn.functional.normalize(normal(num_tokens, num_key_heads, keys), dim=-1) for _ in range(2)
    )
    decay = -normal(num_tokens, num_heads).mul(2).exp()
    value, strength = normal(num_tokens, num_heads, values), normal(num_tokens, num_heads).sigmoid()
    return DeltaInputs(query, key, value, decay, strength)


def compare_all(device: str) -> int:
    """Kernels against the plain twin, which is computed in float64 on a CPU."""
    return sum(compare(case, torch.device(device)) for case in CASES)


def compare(case: Case, device: torch.device) -> int:
    """Slots lie apart, as of several layers, and values beside keys; what is not written stays bit by bit."""
    memory = torch.randn(7, 3, *case.heads[1:], generator=torch.Generator().manual_seed(5))
    exact, ours = memory.double()[:, 1], memory.to(device, copy=True)
    for number, runs in enumerate(case.passes):
        rows, *slots = zip(*runs, strict=True)
        starts, states = np.cumsum([0, *rows]).astype(np.int32), list(zip(*slots, strict=True))
        inputs = drawn(int(starts[-1]), number, case.heads)
        if case.is_alike:
            inputs = inputs._replace(key=inputs.key[:1].expand_as(inputs.key), decay=inputs.decay * 0)
        expected = DeltaPlan.build(starts, states, CPU).attend(_doubled(inputs), exact)
        plan = DeltaPlan.build(starts, states, device)
        found = plan.work.attend(_beside(inputs, device), ours[:, 1])
        for one, other in ((found, expected), (ours[:, 1], exact)):
            assert (one.cpu().double() - other).abs().max() <= TOLERANCE * other.abs().max(), (case, number)
    written = {run[2] for runs in case.passes for run in runs}
    memory[sorted(written), 1] = ours[sorted(written), 1].cpu()
    assert torch.equal(ours.cpu(), memory)
    return len(case.passes)


def compare_layers(device: str) -> int:
    """What stands before the rule and behind it, against the plain twin of the same type on a CPU."""
    return sum(compare_layer(LAYER, torch.device(device), dtype) for dtype in LAYER_TOLERANCE)


def compare_layer(case: Case, device: torch.device, dtype: torch.dtype) -> int:
    """Slots lie apart, as of several layers; what is not written stays bit by bit."""
    layer, sizes = drawn_layer(case.heads), DeltaSizes(*case.heads)
    there = replace(
        layer, **{name: getattr(layer, name).to(device) for name in ("filters", "rates", "steps")}
    )
    memory = torch.randn(7, 3, 3, sizes.num_channels, generator=torch.Generator().manual_seed(5)).to(dtype)
    theirs, ours, memory = memory.clone()[:, 1], memory.to(device, copy=True), memory
    for number, runs in enumerate(case.passes):
        rows, *slots = zip(*runs, strict=True)
        starts, states = np.cumsum([0, *rows]).astype(np.int32), list(zip(*slots, strict=True))
        width = sizes.num_channels + sizes.value_channels + 2 * sizes.num_heads
        projected = drawn(int(starts[-1]), number, (1, 1, 1, width)).value[:, 0].to(dtype) * 4
        attended = projected[:, : sizes.value_channels].float().view(-1, sizes.num_heads, sizes.value_dim)
        gates = projected[:, -sizes.value_channels :]
        expected = layer.inputs(projected, theirs, DeltaPlan.build(starts, states, CPU))
        with patch("epd.stages.decoder.delta_layer.uses_kernels", return_value=True):
            found = there.inputs(projected.to(device), ours[:, 1], DeltaPlan.build(starts, states, device))
            normed = there.gated(attended.to(device).contiguous(), gates.to(device))
        pairs = [*zip(found, expected, strict=True), (normed, layer.gated(attended, gates))]
        for one, other in pairs:
            difference = (one.cpu().double() - other.double()).abs().max()
            assert difference <= LAYER_TOLERANCE[dtype] * other.abs().max(), (case, number, dtype)
        assert torch.equal(ours[:, 1].cpu(), theirs), "tails are rows, to the bit"
    written = {run[2] for runs in case.passes for run in runs}
    memory[sorted(written), 1] = ours[sorted(written), 1].cpu()
    assert torch.equal(ours.cpu(), memory)
    return len(case.passes)


def drawn_layer(heads: tuple[int, int, int, int]) -> GatedDelta:
    """heads: as in `Case`."""
    sizes, draw = DeltaSizes(*heads), torch.Generator().manual_seed(3)
    filters, norm = torch.randn(4, sizes.num_channels, generator=draw), torch.rand(heads[3], generator=draw)
    rates = torch.randn(heads[1], generator=draw).exp().neg()
    return GatedDelta(sizes, lambda rows: rows, filters, rates, rates + 1, RmsNorm.of(norm, 1e-6))


@torch.inference_mode()
def compare_answer() -> int:
    """A Qwen3.5 whose prompt has two chunks: the tokens of `generate`. Returns how often kernels ran."""
    with tempfile.TemporaryDirectory() as folder:
        path = build_qwen3_5(Path(folder), num_hidden_layers=4)
        adapter, model = load_adapter(path), load_reference(path)
    prompt = prompt_of(adapter, model, [], "What is shown? " * 5, FrameSampling(), 1)
    ids, sampling = torch.tensor([prompt.plan.token_ids]), SamplingParams(max_tokens=4)
    expected = model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False, eos_token_id=[])
    settings = GenerationSettings(eos_ids=frozenset())
    engine = build_engine(model, adapter, settings, options=EngineConfig(num_kv_tokens=512))
    with (
        patch("epd.stages.decoder.delta_rule.uses_kernels", return_value=True) as asked,
        patch("epd.stages.decoder.delta_layer.uses_kernels", asked),
    ):
        answers = Drive(engine, 0).run({"r": prompt}, sampling=sampling)
    assert answers == {"r": tuple(expected[0, ids.shape[1] :].tolist())}
    return asked.call_count


def _doubled(inputs: DeltaInputs) -> DeltaInputs:
    return DeltaInputs(*(each.double() for each in inputs))


def _beside(inputs: DeltaInputs, device: torch.device) -> DeltaInputs:
    """The same on a device, values as a part of wider rows."""
    there = DeltaInputs(*(each.to(device).contiguous() for each in inputs))
    wide = torch.cat([there.key.flatten(1), there.value.flatten(1)], dim=1)
    return there._replace(value=wide[:, there.key[0].numel() :].view(there.value.shape))


def theirs(function: object, inputs: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """What a function of transformers gives, which scales the query itself."""
    query, key, value, decay, strength = (each[None] for each in inputs)
    out, after = function(  # type: ignore[operator]
        query * KEYS**0.5,
        key,
        value,
        g=decay,
        beta=strength,
        initial_state=state[None],
        output_final_state=True,
    )
    return out[0], after[0]


def some_state(seed: int = 9) -> Tensor:
    return torch.randn(HEADS, KEYS, VALUES, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("num_tokens", [1, 2, 63, 64, 65, 200])
def test_chunks_equal_both_functions_of_transformers(num_tokens: int) -> None:
    inputs, state = drawn(num_tokens), some_state()
    before = state.clone()
    ours = delta_chunks(inputs, state)
    assert torch.equal(state, before), "a state that others hold is not written"
    for function in (torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule):
        for one, other in zip(ours, theirs(function, inputs, state), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_a_step_equals_a_chunk_of_one_token_for_each_sequence() -> None:
    several, states = drawn(4), torch.stack([some_state(seed) for seed in range(4)])
    out, after = delta_step(several, states.clone())
    for row, state in enumerate(states):
        alone = delta_chunks(several.at(slice(row, row + 1)), state)
        torch.testing.assert_close(out[row], alone[0][0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(after[row], alone[1], rtol=1e-5, atol=1e-5)


def test_a_prompt_may_be_cut_anywhere() -> None:
    inputs = drawn(150)
    whole, last = delta_chunks(inputs, some_state())
    state, parts = some_state(), []
    for start, stop in ((0, 1), (1, 70), (70, 149), (149, 150)):
        part, state = delta_chunks(inputs.at(slice(start, stop)), state)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state, last, rtol=1e-4, atol=1e-4)


def test_a_pass_reads_and_writes_the_slots_of_each_sequence() -> None:
    """A decode, the start of a prompt, another decode, a later chunk: as each of them alone."""
    starts = np.array([0, 1, 8, 9, 12], np.int32)
    slots = [(3, 5, 0), (None, 1, 0), (2, 0, 0), (3, 4, 0)]
    plan = DeltaPlan.build(starts, slots, CPU)
    matrices = torch.stack([some_state(seed) for seed in range(7)])
    tails = torch.randn(7, 3, 6, generator=torch.Generator().manual_seed(1))
    kept_matrices, kept_tails = matrices.clone(), tails.clone()
    inputs, rows, filters = drawn(12), torch.randn(12, 6), torch.randn(4, 6)
    out, mixed = plan.attend(inputs, matrices), plan.plain.convolve(rows, filters, tails)
    for (source, target, _), start, stop in zip(slots, starts[:-1], starts[1:], strict=True):
        before = torch.zeros_like(matrices[0]) if source is None else kept_matrices[source]
        expected, after = delta_chunks(inputs.at(slice(start, stop)), before)
        torch.testing.assert_close(out[start:stop], expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(matrices[target], after, rtol=1e-5, atol=1e-5)
        tail = torch.zeros(3, 6) if source is None else kept_tails[source]
        padded = torch.cat([tail, rows[start:stop]])
        convolved = causal_conv1d_fn(padded.t()[None], filters.t())[0].t()[3:]
        torch.testing.assert_close(mixed[start:stop], convolved, rtol=1e-5, atol=1e-5)
        assert torch.equal(tails[target], padded[-3:])
    untouched = [2, 3, 6]
    assert torch.equal(matrices[untouched], kept_matrices[untouched])
    assert torch.equal(tails[untouched], kept_tails[untouched])


def test_drafts_read_the_state_of_the_known_tokens_and_write_none() -> None:
    """A chunk and two drafts, a decode and three, the start of a prompt without any: as one after another."""
    starts = np.array([0, 6, 10, 13], np.int32)
    slots = [(3, 5, 2), (2, 0, 3), (None, 1, 0)]
    plan = DeltaPlan.build(starts, slots, CPU)
    matrices = torch.stack([some_state(seed) for seed in range(7)])
    tails = torch.randn(7, 3, 6, generator=torch.Generator().manual_seed(1))
    kept_matrices, kept_tails = matrices.clone(), tails.clone()
    inputs, rows, filters = drawn(13), torch.randn(13, 6), torch.randn(4, 6)
    out, mixed = plan.attend(inputs, matrices), plan.plain.convolve(rows, filters, tails)
    for (source, target, num_drafts), start, stop in zip(slots, starts[:-1], starts[1:], strict=True):
        before = torch.zeros_like(matrices[0]) if source is None else kept_matrices[source]
        tail = torch.zeros(3, 6) if source is None else kept_tails[source]
        known = stop - num_drafts
        torch.testing.assert_close(out[start:stop], delta_chunks(inputs.at(slice(start, stop)), before)[0])
        after = delta_chunks(inputs.at(slice(start, known)), before)[1]
        torch.testing.assert_close(matrices[target], after, rtol=1e-5, atol=1e-5)
        padded = torch.cat([tail, rows[start:stop]])
        convolved = causal_conv1d_fn(padded.t()[None], filters.t())[0].t()[3:]
        torch.testing.assert_close(mixed[start:stop], convolved, rtol=1e-5, atol=1e-5)
        assert torch.equal(tails[target], padded[known - start : known - start + 3])
    untouched = [2, 3, 4, 6]
    assert torch.equal(matrices[untouched], kept_matrices[untouched])
    assert torch.equal(tails[untouched], kept_tails[untouched])


@pytest.mark.parametrize("num_tokens", [1, 17, 64, 512])
def test_tables_of_every_pass_fit_the_memory_of_a_captured_one(num_tokens: int) -> None:
    """And are read back as they were, whatever pads them."""
    for num_rows in (1, 16, 17, 63, 64, 65, 129, num_tokens):
        ends = [*range(num_rows, num_tokens, num_rows), num_tokens]
        slots = [(None if end % 2 else end, end + 1, int(end < num_rows)) for end in ends]
        parts = DeltaPlan.build(np.array([0, *ends], np.int32), slots, CPU).parts
        tables, padded = work_tables(parts), list[Tensor]()
        for table, shape in zip(tables, work_shapes(num_tokens, len(parts)), strict=True):
            padded.append(torch.full(shape, -1, dtype=torch.int32))
            padded[-1][: len(table)] = torch.from_numpy(table)
        assert sorted(DeltaWork(*padded).runs(), key=lambda run: run.start) == list(parts)


@pytest.mark.gpu
@on_gpu
def test_the_compiled_kernels_equal_their_twin() -> None:
    assert compare_all("cuda") == sum(len(case.passes) for case in CASES)
    assert compare_layers("cuda") == 2 * len(LAYER.passes)
