"""Computes the gated delta rule: attention whose keys and values are summed up in one matrix for each head.

    S_t = exp(g_t) (I - b_t k_t k_t^T) S_t-1 + b_t k_t v_t^T        o_t = S_t^T q_t

H heads, Dk and Dv channels of keys and values. A decay g is at most 0, a strength b between 0 and 1. A decode
computes one step. A run of a prompt is computed in chunks: within one, all tokens at once by a triangular
system, and the matrix goes from chunk to chunk. A decode with drafts is a chunk too, with all others, whose
matrix is that after the known tokens:

    rows of a pass    | a | b | c known, drafts ... | d known | drafts |
                      one step  one padded chunk of c and d

All of it is plain torch, the twin of the kernels of GPUs in `stages/kernels/delta_rule.py`. Kernels read runs
from tables, which a captured pass has in memory of its own.

Source: Yang et al. 2024, "Gated Delta Networks" (arXiv 2412.06464, section 3.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from epd.encoders.device import arrays_to_device
from epd.encoders.kernels.dispatch import uses_kernels
from epd.stages import kernels
from epd.types import Int32Array, Int64Array

CHUNK = 64
# Rows of a run that a kernel computes one after another; of more it makes chunks.
_MOST_STEPS = 16
# To kernels, the source of a piece of a run that is not its first: the rows before it are in the pass.
_GOES_ON = -2


class DeltaInputs(NamedTuple):
    """Holds the inputs of T tokens, float32.

    query, key: [T, Hk, Dk], of length 1, the query scaled; each head serves as many of values as any other.
    value: [T, H, Dv]. decay, strength: [T, H].
    """

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    strength: Tensor

    def at(self, rows: Tensor | slice) -> DeltaInputs:
        return DeltaInputs(*(each[rows] for each in self))

    def by_value(self) -> DeltaInputs:
        """Repeats heads of queries and keys, so that there are as many as of values."""
        times = self.value.shape[1] // self.key.shape[1]
        query, key = (each.repeat_interleave(times, dim=1) for each in (self.query, self.key))
        return self._replace(query=query, key=key)


@dataclass(frozen=True, slots=True)
class DeltaRun:
    """Holds the packed rows [start, stop) of a sequence.

    source: the slot it reads; None at its start. target: the one it writes; to kernels -1 is none.
    num_drafts: of its last rows, which read what the others have done, and are in nothing that is written.
    """

    start: int
    stop: int
    source: int | None
    target: int
    num_drafts: int = 0

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    @property
    def num_known(self) -> int:
        return self.num_rows - self.num_drafts

    @property
    def slots(self) -> tuple[int, int]:
        return -1 if self.source is None else self.source, self.target

    def piece(self, at: int, most: int) -> tuple[int, int, int, int, int]:
        """Returns the piece that begins at a row of a run without drafts, of at most so many rows."""
        source, target = self.slots
        num_rows = min(most, self.num_rows - at)
        is_last = at + num_rows == self.num_rows
        return self.start + at, num_rows, num_rows, _GOES_ON if at else source, target if is_last else -1


@dataclass(frozen=True, slots=True)
class DraftedRuns:
    """Holds the rows of S sequences with drafts, padded to L, all int64 on the device.

    rows: [S, L], packed rows; those past a sequence's own are its first.
    places, packed: [N], all rows that are its own, in [S * L] and in the pass.
    num_known: [S], its rows before the drafts. sources, targets: [S], its slots.
    """

    rows: Tensor
    places: Tensor
    packed: Tensor
    num_known: Tensor
    sources: Tensor
    targets: Tensor

    @classmethod
    def of(cls, runs: Sequence[DeltaRun], device: torch.device) -> DraftedRuns:
        starts, counts = _column(runs, "start")[:, None], _column(runs, "num_rows")[:, None]
        at = np.arange(counts.max())
        rows, places = starts + at * (at < counts), np.flatnonzero(at < counts)
        columns = [_column(runs, name) for name in ("num_known", "source", "target")]
        return cls(*arrays_to_device([rows, places, rows.flatten()[places], *columns], device))

    def attend(self, inputs: DeltaInputs, matrices: Tensor, out: Tensor) -> None:
        """Fills its rows of out [T, H, Dv], and writes the states of its known rows."""
        state = matrices.index_select(0, self.sources)
        own, after = delta_drafts(inputs.at(self.rows), state, self.num_known)
        self._put(own, out)
        matrices.index_copy_(0, self.targets, after)

    def convolve(self, rows: Tensor, filters: Tensor, tails: Tensor, out: Tensor) -> None:
        """Fills its rows of out [T, C]. Otherwise as `PlainDelta.convolve`."""
        window = torch.cat([tails.index_select(0, self.sources), rows[self.rows]], dim=1)
        length, kept = self.rows.shape[1], torch.arange(tails.shape[1], device=rows.device)
        parts = [window[:, at : at + length] * each for at, each in enumerate(filters)]
        self._put(torch.stack(parts).sum(0), out)
        last = (self.num_known[:, None] + kept)[..., None].expand(-1, -1, window.shape[-1])
        tails.index_copy_(0, self.targets, window.gather(1, last))

    def _put(self, own: Tensor, out: Tensor) -> None:
        out.index_copy_(0, self.packed, own.flatten(0, 1).index_select(0, self.places))


class DeltaWork(NamedTuple):
    """Holds what kernels compute of a pass, int32 on the device; `stages/kernels` says how.

    steps: [N, 5]. chunks: [M, 2]. walks: [R, 4]. pieces: [P, 5].
    Rows of a captured pass that stand for no run have no rows or no slots.
    """

    steps: Tensor
    chunks: Tensor
    walks: Tensor
    pieces: Tensor

    @classmethod
    def of(cls, runs: Sequence[DeltaRun], device: torch.device) -> DeltaWork:
        return cls(*arrays_to_device(work_tables(runs), device))

    def runs(self) -> list[DeltaRun]:
        """Reads the runs back, on a CPU."""
        found = []
        for start, num_rows, num_known, source, target in self.steps.tolist():
            found.append((start, start + num_rows, source, target, num_rows - num_known))
        for start, num_rows, source, target in self.walks.tolist():
            found.append((start, start + num_rows, source, target, 0))
        return [
            DeltaRun(start, stop, None if source < 0 else source, *rest)
            for start, stop, source, *rest in found
            if start < stop and rest[0] >= 0
        ]

    def attend(self, inputs: DeltaInputs, matrices: Tensor) -> Tensor:
        """Computes what `DeltaPlan.attend` does, on a GPU."""
        out = inputs.value.new_empty(inputs.value.shape)
        kernels.delta_steps_fused(inputs, matrices, self.steps, out)
        kernels.delta_chunks_fused(inputs, matrices, self.chunks, self.walks, CHUNK, out)
        return out


def work_tables(runs: Sequence[DeltaRun]) -> list[Int32Array]:
    """Returns the tables of `DeltaWork` of these runs."""
    short = [each for each in runs if each.num_drafts or each.num_rows <= _MOST_STEPS]
    long = [each for each in runs if not each.num_drafts and each.num_rows > _MOST_STEPS]
    steps = [(each.start, each.num_rows, each.num_known, *each.slots) for each in short]
    starts = [(each, at) for each in long for at in range(0, each.num_rows, CHUNK)]
    chunks = [(each.start + at, each.num_rows - at) for each, at in starts]
    walks = [(each.start, each.num_rows, *each.slots) for each in long]
    pieces = steps + [each.piece(at, CHUNK) for each, at in starts]
    tables = ((steps, 5), (chunks, 2), (walks, 4), (pieces, 5))
    return [np.array(each, np.int32).reshape(-1, width) for each, width in tables]


def work_shapes(num_tokens: int, num_runs: int) -> list[tuple[int, int]]:
    """Returns the largest shapes that tables of so many tokens and runs may have."""
    num_long = min(num_runs, num_tokens // (_MOST_STEPS + 1))
    num_chunks = num_long and num_long + num_tokens // CHUNK
    return [(num_runs, 5), (num_chunks, 2), (num_long, 4), (num_runs + num_chunks, 5)]


@dataclass(frozen=True)
class DeltaPlan:
    """Says which slots the rows of a pass read and write; no slot that is written is read.

    parts: all sequences. device: where they are computed.
    fixed: the tables of a captured pass, which differ from replay to replay; then there are no parts.
    """

    parts: tuple[DeltaRun, ...]
    device: torch.device
    fixed: DeltaWork | None = None

    @classmethod
    def build(
        cls, query_starts: Int32Array, states: Sequence[tuple[int | None, int, int]], device: torch.device
    ) -> DeltaPlan:
        """Builds a plan. states: of each segment, as in `Segment`; none for a model without any."""
        starts = query_starts.tolist()
        pairs = zip(starts[:-1], starts[1:], states, strict=bool(states))
        return cls(tuple(DeltaRun(start, stop, *slots) for start, stop, slots in pairs), device)

    @cached_property
    def work(self) -> DeltaWork:
        """Returns the plan for kernels, which nothing else needs."""
        return DeltaWork.of(self.parts, self.device) if self.fixed is None else self.fixed

    @property
    def plain(self) -> PlainDelta:
        """Returns the plan for plain torch."""
        return self._plain if self.fixed is None else PlainDelta.of(self.fixed.runs(), self.device)

    @cached_property
    def _plain(self) -> PlainDelta:
        return PlainDelta.of(self.parts, self.device)

    def attend(self, inputs: DeltaInputs, matrices: Tensor) -> Tensor:
        """Returns [T, H, Dv]. matrices: float32 [slots, H, Dk, Dv], of which `targets` are written."""
        attend = self.work.attend if uses_kernels(matrices) else self.plain.attend
        return attend(inputs, matrices)


@dataclass(frozen=True, slots=True)
class PlainDelta:
    """Computes the rows of a pass in plain torch.

    singles: rows of sequences that have one, int64 [S] on the device, or a slice; None without.
    sources, targets: their slots, int64 [S] on the device.
    drafted: sequences with drafts; None without any.
    runs: the others.
    """

    singles: Tensor | slice | None
    sources: Tensor
    targets: Tensor
    drafted: DraftedRuns | None
    runs: tuple[DeltaRun, ...]

    @classmethod
    def of(cls, parts: Sequence[DeltaRun], device: torch.device) -> PlainDelta:
        alone = [each for each in parts if each.num_rows == 1 and each.source is not None]
        drafted = [each for each in parts if each.num_drafts]
        columns = [_column(alone, name) for name in ("start", "source", "target")]
        rows, sources, targets = arrays_to_device(columns, device)
        singles = slice(len(alone)) if len(alone) == len(parts) else rows
        runs = tuple(each for each in parts if each not in alone and not each.num_drafts)
        of_drafts = DraftedRuns.of(drafted, device) if drafted else None
        return cls(singles if alone else None, sources, targets, of_drafts, runs)

    def attend(self, inputs: DeltaInputs, matrices: Tensor) -> Tensor:
        """Computes what `DeltaPlan.attend` does."""
        inputs, out = inputs.by_value(), torch.zeros_like(inputs.value)
        if self.singles is not None:
            step = delta_step(inputs.at(self.singles), matrices.index_select(0, self.sources))
            out[self.singles], state = step
            matrices.index_copy_(0, self.targets, state)
        if self.drafted is not None:
            self.drafted.attend(inputs, matrices, out)
        for run in self.runs:
            before = torch.zeros_like(matrices[0]) if run.source is None else matrices[run.source]
            rows = slice(run.start, run.stop)
            out[rows], matrices[run.target] = delta_chunks(inputs.at(rows), before)
        return out

    def convolve(self, rows: Tensor, filters: Tensor, tails: Tensor) -> Tensor:
        """Convolves the rows [T, C] of each sequence with those before them: float32 [T, C].

        filters: float32 [K, C], the last one for a row itself.
        tails: [slots, K - 1, C], the rows before, of which `targets` are written.
        """
        out = rows.new_zeros(rows.shape, dtype=torch.float32)
        if self.singles is not None:
            window = torch.cat([tails.index_select(0, self.sources), rows[self.singles, None]], dim=1)
            out[self.singles] = (window * filters).sum(1)
            tails.index_copy_(0, self.targets, window[:, 1:])
        if self.drafted is not None:
            self.drafted.convolve(rows, filters, tails, out)
        for run in self.runs:
            before = torch.zeros_like(tails[0]) if run.source is None else tails[run.source]
            padded, length = torch.cat([before, rows[run.start : run.stop]]), run.num_rows
            parts = [padded[at : at + length] * each for at, each in enumerate(filters)]
            out[run.start : run.stop] = torch.stack(parts).sum(0)
            tails[run.target] = padded[length:]
        return out


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
    chunks = _solved(_in_chunks(inputs, min(CHUNK, num_tokens)))
    out = []
    for at in range(chunks.own.shape[1]):
        attended, state = chunks.at(at).after(state)
        out.append(attended)
    return torch.cat(out, dim=1)[:, :num_tokens].transpose(0, 1), state


def delta_drafts(inputs: DeltaInputs, states: Tensor, num_known: Tensor) -> tuple[Tensor, Tensor]:
    """Computes L tokens of each of S sequences: [S, L, H, Dv], and the states after the first `num_known`.

    inputs: [S, L, ...]. states: float32 [S, H, Dk, Dv]. num_known: int64 [S], at least 1.
    """
    chunks = _solved([each.transpose(1, 2) for each in inputs], num_known)
    out, after = chunks.after(states)
    return out.transpose(1, 2), after


class _Chunks(NamedTuple):
    """Holds what is known of chunks of C tokens without the state before them, each [..., C, channels].

    own, of_state: what tokens add, and what the state before takes off that. asked: of that state.
    scores: [..., C, C], of what the tokens add. kept: of that, in the state after them.
    last: [..., 1, 1], what is left of the state before.
    """

    own: Tensor
    of_state: Tensor
    asked: Tensor
    scores: Tensor
    kept: Tensor
    last: Tensor

    def at(self, index: int) -> _Chunks:
        return _Chunks(*(each[:, index] for each in self))

    def after(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what the tokens read, and the state after them."""
        added = self.own - self.of_state @ state
        out = self.asked @ state + self.scores @ added
        return out, self.last * state + self.kept.transpose(-1, -2) @ added


def _solved(inputs: Sequence[Tensor], num_known: Tensor | None = None) -> _Chunks:
    """Returns chunks of query, key, value, [..., C, channels], decay and strength, [..., C].

    num_known: int64 [S], of inputs [S, H, C, ...], tokens after which the state is wanted; None for all.
    """
    query, key, value, decay, strength = inputs
    total = decay.cumsum(-1)  # of the decays from a chunk's start to each of its tokens
    between = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    # What a token adds depends on what those before it in the chunk have added.
    system = strength[..., None] * (key @ key.transpose(-1, -2)) * between
    grown = total.exp()[..., None]
    sides = strength[..., None] * torch.cat([value, grown * key], dim=-1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    own, of_state = solved.split([value.shape[-1], key.shape[-1]], dim=-1)
    last, left = _left(total, num_known)
    scores = (query @ key.transpose(-1, -2)) * between
    return _Chunks(own, of_state, grown * query, scores, left[..., None] * key, last[..., None])


def _left(total: Tensor, num_known: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns what is left of the state, [..., 1], and of what each token adds, [..., C]: see `_solved`."""
    if num_known is None:
        last = total[..., -1:]
        return last.exp(), (last - total).exp()
    last = total.gather(2, (num_known - 1)[:, None, None].expand(-1, total.shape[1], 1))
    is_draft = torch.arange(total.shape[2], device=total.device) >= num_known[:, None, None]
    return last.exp(), (last - total).masked_fill(is_draft, -torch.inf).exp()


def _in_chunks(inputs: DeltaInputs, size: int) -> list[Tensor]:
    """Returns the inputs by head and chunk, [H, chunks, size, ...]; padding changes no state."""
    missing = -len(inputs.value) % size
    by_head = [each.transpose(0, 1) for each in inputs]
    padded = [
        pad(each, (0, 0, 0, missing)) if each.ndim == 3 else pad(each, (0, missing)) for each in by_head
    ]
    return [each.view(len(each), -1, size, *each.shape[2:]) for each in padded]
