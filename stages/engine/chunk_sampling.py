"""Samples the tokens of all chunks of a pass at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from epd.encoders.device import to_device
from epd.kv.scheduler_output import Chunk
from epd.stages.engine.sequence import TokenSequence
from epd.stages.sampling.sampler import SampledToken, sample
from epd.stages.sampling.sampling_state import SamplingRow


@dataclass(frozen=True, slots=True)
class ComputedChunk:
    """Holds a chunk that has been run.

    family: the sequences that its logits serve: at the end of a prompt all of the request, else one.
    tokens: one for each of several sequences, else for each row.
    """

    chunk: Chunk
    family: list[TokenSequence]
    tokens: list[SampledToken]


def sample_chunks(
    chunks: Sequence[tuple[Chunk, list[TokenSequence], int]], logits: Tensor
) -> list[ComputedChunk]:
    """Samples all chunks, each with its family and its rows of logits. logits [R, V], R = all rows."""
    rows: list[SamplingRow] = []
    places: list[int] = []
    counts: list[int] = []
    at = 0
    for _, family, num_logits in chunks:
        num_before = len(rows)
        if len(family) > 1:
            rows += [SamplingRow(sequence.sampling) for sequence in family]
            places += [at] * len(family)
        elif num_logits:
            drafts = family[0].drafts
            rows += [SamplingRow(family[0].sampling, drafts[:i]) for i in range(num_logits)]
            places += range(at, at + num_logits)
        counts.append(len(rows) - num_before)
        at += num_logits
    if len(places) != len(logits):
        logits = logits.index_select(0, to_device(torch.tensor(places, dtype=torch.int64), logits.device))
    tokens = iter(sample(logits, rows) if rows else ())
    return [
        ComputedChunk(chunk, family, [next(tokens) for _ in range(count)])
        for (chunk, family, _), count in zip(chunks, counts, strict=True)
    ]
