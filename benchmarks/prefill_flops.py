"""Floating-point operations of a prefill: what each layer computes, and what it attends.

    piece of the prompt       text | window, all kept | window, pruned | text
    rows of a whole layer      t   |        n         |       n        |  t
    rows of a later layer      t   |        n         |       k        |  t       FastKV only
    stays in a layer's cache   t   |        n         |       k        |  t

QuickPrefill computes every row in every layer: only what later windows attend is less. FastKV computes a
window whole in its first layers, and what was chosen there in the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from encoders.adapter import PromptPlan
from epd.profiles.catalog import Transformer
from stages.reduction.propagation import NUM_OBSERVING, num_whole_layers
from stages.reduction.pruning import window_inputs


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens of a prompt: num_computed go into the layers, num_kept stay in the cache."""

    num_computed: int
    num_kept: int


@dataclass(frozen=True, slots=True)
class Propagation:
    """num_whole: layers that compute windows whole. num_observing: rows whose attention chooses in each."""

    num_whole: int
    num_observing: int


def pieces_of(prompt: PromptPlan) -> Iterator[Piece]:
    """The pruned windows of a prompt, and what lies between them."""
    done = 0
    for window in window_inputs(prompt):
        pruned = window.pruned
        yield Piece(pruned.start - done, pruned.start - done)
        yield Piece(pruned.num_inputs, pruned.stop - pruned.start)
        done = pruned.stop
    yield Piece(len(prompt) - done, len(prompt) - done)


def prompt_flops(decoder: Transformer, prompt: PromptPlan) -> float:
    """Of the layers, for a prompt as its reduction lays it out. Not for methods that read by question."""
    policy = prompt.reduction.policy if prompt.reduction else None
    if policy is not None and policy.is_by_question:
        raise ValueError(f"the operations of {policy.method} depend on the question")
    propagates = policy is not None and policy.is_propagating
    whole = Propagation(num_whole_layers(decoder.num_layers, 0), NUM_OBSERVING) if propagates else None
    return prefill_flops(decoder, list(pieces_of(prompt)), whole)


def prefill_flops(
    decoder: Transformer, pieces: Sequence[Piece], propagation: Propagation | None = None
) -> float:
    """Of the layers: products with weights, causal attention, and the scores by which FastKV chooses.

    Norms, activations, positions and sorting are left out: they grow with the rows alone, and are few.
    """
    if propagation is None:
        return decoder.num_layers * _layer_flops(decoder, pieces)
    later = [Piece(piece.num_kept, piece.num_kept) for piece in pieces]
    whole = _layer_flops(decoder, pieces) + _choosing_flops(decoder, pieces, propagation.num_observing)
    num_later = decoder.num_layers - propagation.num_whole
    return propagation.num_whole * whole + num_later * _layer_flops(decoder, later)


def _layer_flops(decoder: Transformer, pieces: Sequence[Piece]) -> float:
    rows = sum(piece.num_computed for piece in pieces)
    pairs = sum(
        piece.num_computed * cached + piece.num_computed * (piece.num_computed + 1) // 2
        for piece, cached in _behind(pieces)
    )
    weights = (decoder.num_parameters - 2 * decoder.vocabulary * decoder.hidden) // decoder.num_layers
    return 2.0 * weights * rows + _pair_flops(decoder) * pairs


def _choosing_flops(decoder: Transformer, pieces: Sequence[Piece], num_observing: int) -> float:
    """Scores alone, of the observing rows of each pruned window with all that is cached then."""
    pairs = sum(
        min(num_observing, piece.num_computed) * (cached + piece.num_computed)
        for piece, cached in _behind(pieces)
        if piece.num_kept < piece.num_computed
    )
    return _pair_flops(decoder) / 2 * pairs


def _pair_flops(decoder: Transformer) -> float:
    """One token's attention to another, in one layer."""
    return decoder.flops_per_pair / decoder.num_layers


def _behind(pieces: Sequence[Piece]) -> Iterator[tuple[Piece, int]]:
    """Each piece with how many tokens of those before it a layer has kept."""
    cached = 0
    for piece in pieces:
        yield piece, cached
        cached += piece.num_kept
