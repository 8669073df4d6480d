"""The gated delta rule beside the functions of transformers, and runs of several sequences in a pass."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    causal_conv1d_fn,
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from epd.stages.decoder.delta_rule import DeltaInputs, DeltaPlan, delta_chunks, delta_step

CPU = torch.device("cpu")
HEADS, KEYS, VALUES = 3, 8, 5


def drawn(num_tokens: int, seed: int = 0) -> DeltaInputs:
    """Decays from hardly any to nearly all, strengths between 0 and 1."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    query, key = (torch.nn.functional.normalize(normal(num_tokens, HEADS, KEYS), dim=-1) for _ in range(2))
    decay = -normal(num_tokens, HEADS).mul(2).exp()
    return DeltaInputs(
        query, key, normal(num_tokens, HEADS, VALUES), decay, normal(num_tokens, HEADS).sigmoid()
    )


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
    out, mixed = plan.attend(inputs, matrices), plan.convolve(rows, filters, tails)
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
    out, mixed = plan.attend(inputs, matrices), plan.convolve(rows, filters, tails)
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
