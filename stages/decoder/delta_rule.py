"""Computes the gated delta rule: attention whose keys and values are summed up in one matrix for each head.

    S_t = exp(g_t) (I - b_t k_t k_t^T) S_t-1 + b_t k_t v_t^T        o_t = S_t^T q_t

H heads, Dk and Dv channels of keys and values. A decay g is at most 0, a strength b between 0 and 1. A decode
computes one step. A run of a prompt is computed in chunks: within one, all tokens at once by a triangular
system, and the matrix goes from chunk to chunk. Both are plain torch, on a GPU too.

Source: Yang et al. 2024, "Gated Delta Networks" (arXiv 2412.06464, section 3.3).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from epd.encoders.device import arrays_to_device
from epd.types import Int32Array, Int64Array

_CHUNK = 64


class DeltaInputs(NamedTuple):
    """Holds the inputs of T tokens, float32.

    query, key: [T, H, Dk], of length 1, the query scaled. value: [T, H, Dv]. decay, strength: [T, H].
    """

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    strength: Tensor

    def at(self, rows: Tensor | slice) -> DeltaInputs:
        return DeltaInputs(*(each[rows] for each in self))


@dataclass(frozen=True, slots=True)
class DeltaRun:
    """Holds the packed rows [start, stop) of a sequence.

    source: the slot it reads; None at its start. target: the one it writes; None for drafts.
    """

    start: int
    stop: int
    source: int | None
    target: int | None

    @property
    def is_single(self) -> bool:
        """Returns whether it is one token that follows others, and no draft."""
        return self.stop - self.start == 1 and None not in (self.source, self.target)


@dataclass(frozen=True, slots=True)
class DeltaPlan:
    """Says which slots the rows of a pass read and write; a slot that is written is read by drafts alone.

        rows of a sequence    | known | drafts |
        state                 4 ----> 9         known tokens read 4 and write 9, drafts read 9

    singles: rows of sequences that have one, int64 [S] on the device, or a slice of all rows; None without.
    sources, targets: their slots, int64 [S] on the device.
    runs: the others, in order. Drafts are behind the known tokens of their sequence.
    """

    singles: Tensor | slice | None
    sources: Tensor
    targets: Tensor
    runs: tuple[DeltaRun, ...]

    @classmethod
    def build(
        cls, query_starts: Int32Array, states: Sequence[tuple[int | None, int, int]], device: torch.device
    ) -> DeltaPlan:
        """Builds a plan. states: of each segment, as in `Segment`."""
        pairs = zip(query_starts[:-1].tolist(), query_starts[1:].tolist(), states, strict=True)
        parts = [run for start, stop, slots in pairs for run in _runs(start, stop, *slots)]
        alone = [each for each in parts if each.is_single]
        columns = [_column(alone, name) for name in ("start", "source", "target")]
        rows, sources, targets = arrays_to_device(columns, device)
        singles = slice(None) if len(alone) == len(parts) else rows
        runs = tuple(each for each in parts if each not in alone)
        return cls(singles if alone else None, sources, targets, runs)

    def attend(self, inputs: DeltaInputs, matrices: Tensor) -> Tensor:
        """Returns [T, H, Dv]. matrices: float32 [slots, H, Dk, Dv], of which `targets` are written."""
        out = torch.empty_like(inputs.value)
        if self.singles is not None:
            step = delta_step(inputs.at(self.singles), matrices.index_select(0, self.sources))
            out[self.singles], state = step
            matrices.index_copy_(0, self.targets, state)
        for run in self.runs:
            before = torch.zeros_like(matrices[0]) if run.source is None else matrices[run.source]
            rows = slice(run.start, run.stop)
            out[rows], after = delta_chunks(inputs.at(rows), before)
            if run.target is not None:
                matrices[run.target] = after
        return out

    def convolve(self, rows: Tensor, filters: Tensor, tails: Tensor) -> Tensor:
        """Convolves the rows [T, C] of each sequence with those before them: float32 [T, C].

        filters: float32 [K, C], the last one for a row itself.
        tails: [slots, K - 1, C], the rows before, of which `targets` are written.
        """
        out = rows.new_empty(rows.shape, dtype=torch.float32)
        if self.singles is not None:
            window = torch.cat([tails.index_select(0, self.sources), rows[self.singles, None]], dim=1)
            out[self.singles] = (window * filters).sum(1)
            tails.index_copy_(0, self.targets, window[:, 1:])
        for run in self.runs:
            before = torch.zeros_like(tails[0]) if run.source is None else tails[run.source]
            padded, length = torch.cat([before, rows[run.start : run.stop]]), run.stop - run.start
            parts = [padded[at : at + length] * each for at, each in enumerate(filters)]
            out[run.start : run.stop] = torch.stack(parts).sum(0)
            if run.target is not None:
                tails[run.target] = padded[length:]
        return out


def _runs(start: int, stop: int, source: int | None, target: int, num_drafts: int) -> Iterator[DeltaRun]:
    yield DeltaRun(start, stop - num_drafts, source, target)
    if num_drafts:
        yield DeltaRun(stop - num_drafts, stop, target, None)


def _column(runs: Sequence[DeltaRun], name: str) -> Int64Array:
    return np.array([getattr(run, name) for run in runs], dtype=np.int64)


def delta_step(inputs: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Computes one token of each of S sequences: [S, H, Dv], and the states after it.

    state: float32 [S, H, Dk, Dv], overwritten.
    """
    state *= inputs.decay.exp()[..., None, None]
    known = (inputs.key[..., None, :] @ state)[..., 0, :]
    added = (inputs.value - known) * inputs.strength[..., None]
    state += inputs.key[..., None] * added[..., None, :]
    return (inputs.query[..., None, :] @ state)[..., 0, :], state


def delta_chunks(inputs: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Computes T tokens of one sequence: [T, H, Dv], and the state after them.

    state: float32 [H, Dk, Dv].
    """
    num_tokens = len(inputs.value)
    query, key, value, decay, strength = _in_chunks(inputs, min(_CHUNK, num_tokens))
    total = decay.cumsum(-1)  # of the decays from a chunk's start to each of its tokens
    between = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    # What a token adds depends on what those before it in the chunk have added.
    system = strength[..., None] * (key @ key.transpose(-1, -2)) * between
    grown = total.exp()[..., None]
    sides = strength[..., None] * torch.cat([value, grown * key], dim=-1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    own, of_state = solved.split([value.shape[-1], key.shape[-1]], dim=-1)
    scores = (query @ key.transpose(-1, -2)) * between
    asked, last = grown * query, total[..., -1:, None]
    kept = (last - total[..., None]).exp() * key
    out = []
    for at in range(value.shape[1]):
        added = own[:, at] - of_state[:, at] @ state
        out.append(asked[:, at] @ state + scores[:, at] @ added)
        state = last[:, at].exp() * state + kept[:, at].transpose(-1, -2) @ added
    return torch.cat(out, dim=1)[:, :num_tokens].transpose(0, 1), state


def _in_chunks(inputs: DeltaInputs, size: int) -> list[Tensor]:
    """Returns the inputs by head and chunk, [H, chunks, size, ...]; padding changes no state."""
    missing = -len(inputs.value) % size
    by_head = [each.transpose(0, 1) for each in inputs]
    padded = [
        pad(each, (0, 0, 0, missing)) if each.ndim == 3 else pad(each, (0, missing)) for each in by_head
    ]
    return [each.view(len(each), -1, size, *each.shape[2:]) for each in padded]
