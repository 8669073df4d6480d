"""Truths whose tokens rounding cannot turn.

The last digits of float32 sums depend on what is computed together. A token is chosen where a number falls
among cumulative weights, where a logit is the largest, or among the top_k largest. Rounding turns that where
two candidates are almost level, of which top_p ranks now one and now the other first: in the tiny checkpoints
it moves a weight by 3e-7 of the total, and the difference of two logits by 6e-6. A test that compares tokens
asks for a truth that keeps clear of that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from epd.stages.engine import sequence
from epd.stages.sampling import sampler
from epd.stages.sampling.sampling_state import SamplingRow

CLEAR_WEIGHT = 3e-6  # of the total weight
CLEAR_LOGIT = 1e-5


@dataclass
class _Choices:
    """What was chosen closely.

    rows: those that are sampled now. seeds: by the number that is looked up. close: distances by seed.
    """

    rows: Sequence[SamplingRow] = ()
    seeds: dict[float, int] = field(default_factory=dict)
    close: dict[int, float] = field(default_factory=dict)

    def add_draws(self, weights: Tensor, number: Tensor, places: Tensor) -> None:
        ends = weights.cumsum(1)
        upper = ends.gather(1, places)
        lower = upper - weights.gather(1, places)
        target = number * ends[:, -1:]
        nearest = torch.minimum((target - lower).where(lower > 0, torch.inf), upper - target)
        nearest = torch.minimum(nearest, _to_neighbours(weights, places))
        for drawn, distance in zip(
            number[:, 0].tolist(), (nearest / ends[:, -1:])[:, 0].tolist(), strict=True
        ):
            if distance <= CLEAR_WEIGHT:
                self.close[self.seeds[drawn]] = distance

    def add_logits(self, scores: Tensor, ks: Tensor) -> None:
        """Adds rows whose last candidate is little above the first that is none.

        scores: [R, V]. ks: int64 [R], how many candidates; 0 where all tokens are.
        """
        ks = ks.clamp(max=scores.shape[1] - 1)
        largest = scores.float().topk(int(ks.max()) + 1).values
        gaps = largest.gather(1, (ks - 1).clamp(0)[:, None]) - largest.gather(1, ks[:, None])
        for row in ((gaps[:, 0] <= CLEAR_LOGIT) & (ks > 0)).nonzero()[:, 0].tolist():
            self.close[self.rows[row].state.seed] = gaps[row].item()

    def add_groups(self, scores: Tensor, groups: Sequence[sampler._Group]) -> None:
        ks = torch.ones(len(scores), dtype=torch.int64)
        for group in groups:
            ks[group.index] = torch.tensor([max(0, each.top_k) for each in group.params])
            for row, number in zip(group.index.tolist(), group.numbers[:, 0].tolist(), strict=True):
                self.seeds[number] = self.rows[row].state.seed
        self.add_logits(scores, ks)


def _to_neighbours(weights: Tensor, places: Tensor) -> Tensor:
    """How far the weights of places, int64 [R, 1], are from those beside them: candidates that may swap."""
    own, last = weights.gather(1, places), weights.shape[1] - 1
    gaps = [
        (weights.gather(1, each.clamp(0, last)) - own).abs().where((each >= 0) & (each <= last), torch.inf)
        for each in (places - 1, places + 1)
    ]
    return torch.minimum(*gaps)


@contextmanager
def close_draws() -> Iterator[dict[int, float]]:
    """Yields how close a token was to another, by seed, of requests that rounding may turn."""
    choices = _Choices()
    look_up, argmax, choice = sampler.look_up, sampler._argmax, sampler._Choice
    sample, sample_chunk = sampler.sample, sampler._sample_chunk

    def noted_sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[sampler.SampledToken]:
        choices.rows = rows
        return sample(logits, rows)

    def noted_chunk(logits: Tensor, rows: Sequence[SamplingRow]) -> list[sampler.SampledToken]:
        choices.rows = rows
        return sample_chunk(logits, rows)

    def measured_look_up(weights: Tensor, number: Tensor) -> Tensor:
        places = look_up(weights, number)
        choices.add_draws(weights, number, places)
        return places

    def measured_argmax(logits: Tensor) -> list[int]:
        choices.add_logits(logits, torch.ones(len(logits), dtype=torch.int64))
        return argmax(logits)

    def measured_choice(
        rows: Any, asked: Any, scores: Tensor, groups: Sequence[sampler._Group], *rest: Any, **more: Any
    ) -> sampler._Choice:
        choices.add_groups(scores, groups)
        return choice(rows, asked, scores, groups, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequence, "sample", noted_sample)
        patch.setattr(sampler, "_sample_chunk", noted_chunk)
        patch.setattr(sampler, "look_up", measured_look_up)
        patch.setattr(sampler, "_argmax", measured_argmax)
        patch.setattr(sampler, "_largest", lambda scores: torch.tensor(argmax(scores)))
        patch.setattr(sampler, "_Choice", measured_choice)
        yield choices.close


@contextmanager
def clear_draws() -> Iterator[None]:
    """Fails where a token chosen inside was close to another: then take another seed."""
    with close_draws() as close:
        yield
    assert not close, f"rounding may turn tokens of the requests with these seeds: {close}"
