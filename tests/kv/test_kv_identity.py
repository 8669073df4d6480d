"""Token identities: the rows by which the prefix cache tells tokens, pictures and salts apart."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.kv.prefix_cache import TokenIdentity, token_identity
from epd.types import PlaceholderRange


def test_rows_of_text_and_of_visual_units() -> None:
    digest = bytes(range(240, 256))
    identity = token_identity([5, 9, 9, 6], [(PlaceholderRange(1, 2), digest)])
    high = int.from_bytes(digest[:8], "big", signed=True)
    low = int.from_bytes(digest[8:], "big", signed=True)
    assert identity.rows.tolist() == [[5, 0, 0], [-1, high, low], [-2, high, low], [6, 0, 0]]
    assert identity.rows.dtype == np.int64


def test_units_must_fit_and_have_whole_digests() -> None:
    with pytest.raises(ValueError, match="digest of 3 bytes does not fit a prompt of 4 tokens"):
        token_identity([1, 2, 3, 4], [(PlaceholderRange(0, 2), b"abc")])
    with pytest.raises(ValueError, match="does not fit a prompt of 4 tokens"):
        token_identity([1, 2, 3, 4], [(PlaceholderRange(3, 2), bytes(16))])


@given(st.integers(0, 70), st.integers(0, 300))
def test_appended_tokens_are_as_if_they_had_been_there(num_prompt: int, num_generated: int) -> None:
    token_ids = list(range(2**40, 2**40 + num_prompt + num_generated))
    grown = token_identity(token_ids[:num_prompt])
    before = grown.copy()
    for token_id in token_ids[num_prompt:]:
        grown.append(token_id)
    assert len(grown) == len(token_ids)
    assert grown.rows.tolist() == [[token_id, 0, 0] for token_id in token_ids]
    assert before.rows.tolist() == [[token_id, 0, 0] for token_id in token_ids[:num_prompt]]
    assert pickle.loads(pickle.dumps(grown)).rows.tolist() == grown.rows.tolist()
    assert b"".join(grown.chunks(0, len(grown), 16)) == grown.row_bytes(0, len(grown))


def test_rows_that_are_not_known_cannot_be_read() -> None:
    with pytest.raises(ValueError, match=r"rows \[2, 5\) were requested, \[0, 4\) are known"):
        token_identity([1, 2, 3, 4]).row_bytes(2, 5)
    with pytest.raises(ValueError, match=r"must be int64 \[T, 3\], got int64 \(4,\)"):
        TokenIdentity(np.zeros(4, np.int64))
