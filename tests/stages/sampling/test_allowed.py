"""What a grammar rules out, from bits of the host, on any device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from epd.sampling_params import SamplingParams
from epd.stages.sampling.candidates import _unpacked, _unpacked_by_shifts, allowed_tokens, ruled_out
from epd.stages.sampling.sampler import sample
from epd.stages.sampling.sampling_state import SamplingRow, SamplingState

NUM_TOKENS = 70


class Listed:
    """Allows tokens that are listed, whatever came before.

    is_told: whether it says that one token is all. num_bytes: of its masks
    """

    def __init__(self, *token_ids: int, is_told: bool = True, num_bytes: int = 12) -> None:
        self.token_ids = token_ids
        self.is_told = is_told
        self.num_bytes = num_bytes

    def append(self, token_id: int) -> None:
        pass

    def only_token(self, _drafted: Sequence[int] = ()) -> int | None:
        return self.token_ids[0] if self.is_told and len(self.token_ids) == 1 else None

    def mask(self, _drafted: Sequence[int] = ()) -> bytes:
        return sum(1 << token_id for token_id in self.token_ids).to_bytes(self.num_bytes, "little")


def row(matcher: Listed | None, **options: float) -> SamplingRow:
    params = SamplingParams(**options)  # type: ignore[arg-type]
    return SamplingRow(SamplingState(params, 0, np.empty(0, np.int64), matcher=matcher))


def test_shifts_unpack_as_numpy_does() -> None:
    bits = torch.randint(0, 256, (5, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(_unpacked(bits, NUM_TOKENS), _unpacked_by_shifts(bits, NUM_TOKENS))


@pytest.mark.parametrize("num_bytes", [9, 12, 16])
@pytest.mark.parametrize("held", [(0, 2), (0, 1, 2), (), (1,)])
def test_rows_with_a_grammar_keep_what_it_allows_and_others_everything(
    held: tuple[int, ...], num_bytes: int
) -> None:
    scores = torch.randn(3, NUM_TOKENS, generator=torch.Generator().manual_seed(1))
    lists = {0: (1, 31, 32), 1: (63,), 2: (0, 69)}
    rows = [row(Listed(*lists[i], num_bytes=num_bytes) if i in held else None) for i in range(3)]
    places, bits = allowed_tokens(rows, NUM_TOKENS)
    kept = ruled_out(scores, torch.from_numpy(places), torch.from_numpy(bits))
    for i in range(3):
        expected = set(lists[i]) if i in held else set(range(NUM_TOKENS))
        assert set(torch.isfinite(kept[i]).nonzero()[:, 0].tolist()) == expected
        assert torch.equal(kept[i][list(expected)], scores[i][list(expected)])


@pytest.mark.parametrize("options", [{}, {"temperature": 1.5}, {"temperature": 2.0, "top_k": 3}])
def test_only_what_is_allowed_is_chosen_beside_rows_without_a_grammar(options: dict[str, float]) -> None:
    logits = torch.randn(8, NUM_TOKENS, generator=torch.Generator().manual_seed(2))
    rows = [row(Listed(i, 40 + i) if i % 2 else None, **options) for i in range(8)]
    free = sample(logits, [row(None, **options) for _ in range(8)])
    for i, token in enumerate(sample(logits, rows)):
        assert token.token_id in ((i, 40 + i) if i % 2 else (free[i].token_id,))


@pytest.mark.parametrize("told", [(), (0,), (1, 3), (0, 1, 2, 3, 4)])
def test_a_row_without_a_choice_has_the_token_of_its_mask(told: tuple[int, ...]) -> None:
    logits = torch.randn(5, NUM_TOKENS, generator=torch.Generator().manual_seed(3))
    lists = [(7,), (9,), (1, 2, 30), (11,), (69,)]
    masked = [row(Listed(*each, is_told=False), temperature=1.5) for each in lists]
    rows = [row(Listed(*each, is_told=i in told), temperature=1.5) for i, each in enumerate(lists)]
    assert sample(logits, rows) == sample(logits, masked)


def test_what_is_reported_about_a_row_without_a_choice_is_of_all_tokens() -> None:
    logits = torch.randn(1, NUM_TOKENS, generator=torch.Generator().manual_seed(4))
    (token,) = sample(logits, [row(Listed(7), logprobs=2)])
    assert token.token_id == 7
    assert token.logprob == pytest.approx(float(torch.log_softmax(logits, 1)[0, 7]))
    assert len(token.top_logprobs) == 2
