"""How close two results have to be that should be equal, and why not always bit by bit."""

from __future__ import annotations

import torch
from torch import Tensor

from epd.encoders.adapter import Embeddings

# Of float32, relative to the largest value: a matrix product may add in another order when it has another
# number of rows, as it has when units are encoded in other batches, or when its operands lie elsewhere.
# Seen: up to 1.3e-6, and 2.3e-5 with AVX2, in the tower with the largest values.
BATCHING = 1e-4


def assert_same_but_for_batching(ours: Embeddings, theirs: Embeddings) -> None:
    """The same embeddings, made from the same pixels in batches of other sizes."""
    for our, their in zip((ours.rows, *ours.deepstack), (theirs.rows, *theirs.deepstack), strict=True):
        assert_close_to(our, their, BATCHING)


def assert_close_to(ours: Tensor, theirs: Tensor, relative: float) -> None:
    assert ours.shape == theirs.shape
    scale = float(theirs.abs().max())
    torch.testing.assert_close(ours, theirs, rtol=0, atol=relative * scale)
