"""Greedy choice against transformers' own treatment of scores."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from stages.greedy import GenerationSettings, GreedyChoice

VOCAB = 12


@given(
    st.integers(0, 2**31),
    st.sampled_from([0.5, 1.0, 1.1, 3.0]),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6),
    st.floats(-5, 5),
)
def test_picks_what_the_reference_picks(seed: int, penalty: float, prompt: list[int], shift: float) -> None:
    """Scores around `shift`: with all of them negative, dividing would favour what it should not."""
    random = torch.Generator().manual_seed(seed)
    reference = RepetitionPenaltyLogitsProcessor(penalty)
    choice = GreedyChoice(GenerationSettings(frozenset(), repetition_penalty=penalty), torch.tensor(prompt))
    seen = list(prompt)

    for _ in range(4):
        logits = torch.randn(VOCAB, generator=random) + shift
        expected = int(reference(torch.tensor([seen]), logits[None].clone()).argmax())
        assert choice.pick(logits) == expected
        seen.append(expected)
