"""Describes a request to the scheduler: its known, computed and prunable tokens. No tensors."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from epd.kv.kv_identity import TokenIdentity

RequestOrder = Literal["fcfs", "shortest", "least_slack"]


def rank_of(order: RequestOrder, num_tokens: int, latest_start_s: float) -> float:
    """Returns what requests are sorted by before their arrival, the lowest first.

    num_tokens: of the prompt
    latest_start_s: when it must start to be in time, on any clock that all requests share
    """
    ranks: Mapping[RequestOrder, float] = {"shortest": num_tokens, "least_slack": latest_start_s}
    return ranks.get(order, 0.0)


@dataclass(frozen=True, slots=True)
class PrunedRange:
    """Marks prompt tokens [start, stop) that stay in the cache out of `num_inputs` that are computed at once.

    computed   | ... kept so far | num_inputs ............. |        written behind the kept tokens
    committed  | ... kept so far | start .. stop |
    """

    start: int
    stop: int
    num_inputs: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop <= self.start + self.num_inputs:
            raise ValueError(f"a pruned range keeps 1 to all of its inputs, got {self}")


@dataclass(slots=True, eq=False)
class ScheduledRequest:
    """Describes a request to the scheduler.

    priority: the lower, the more important, as in vLLM.
    max_total_tokens: prompt and longest output.
    num_copies: answers to one prompt; room to split the last block is reserved for each.
    parent: a held request whose tokens are the first of this one's.
    pruned: ascending, of the prompt.
    num_to_drop: prompt tokens that leave the cache once the whole prompt is computed.
    num_dropped: prompt tokens that have left it; 0 or `num_to_drop`.
    latest_start_s: when it must start to be in time, for an order by slack.
    rank: set by the scheduler's order, the lower, the sooner.
    may_sample: whether a token may be chosen now; until then its last known token is not computed.
    state_stops: ascending, prompt tokens after which a chunk ends, and its recurrent state is kept.
    """

    request_id: str
    identity: TokenIdentity
    num_prompt_tokens: int
    max_total_tokens: int
    num_ready: int
    num_copies: int = 1
    parent: str | None = None
    pruned: tuple[PrunedRange, ...] = ()
    num_to_drop: int = 0
    num_dropped: int = 0
    num_tokens: int = 0
    num_computed: int = 0
    num_drafts: int = 0
    num_offloaded: int = 0
    arrival: int = -1
    priority: int = 0
    latest_start_s: float = 0.0
    rank: float = 0.0
    may_sample: bool = True
    state_stops: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.num_tokens = self.num_tokens or self.num_prompt_tokens

    @property
    def num_held(self) -> int:
        """Returns how many of the computed tokens are in the cache."""
        return self.num_computed - self.num_dropped

    @property
    def num_seqs(self) -> int:
        """Returns how many answers it counts for: before its prompt is computed, all that it will have."""
        return self.num_copies if self.num_tokens == self.num_prompt_tokens else 1

    @property
    def is_decoding(self) -> bool:
        """Returns whether only the token sampled last is left to compute."""
        return self.num_tokens > self.num_prompt_tokens and self.num_computed == self.num_tokens - 1

    @property
    def num_computable(self) -> int:
        """Returns the known tokens with their inputs ready that have not been computed."""
        limit = self.num_ready if self.num_ready < self.num_prompt_tokens else self.num_tokens
        return min(limit, self.num_tokens - (not self.may_sample)) - self.num_computed

    def next_state_stop(self, num_tokens: int) -> int:
        """Returns the first of `state_stops` past `num_tokens`; past the last, all known tokens."""
        return next((stop for stop in self.state_stops if stop > num_tokens), self.num_tokens)

    def pruned_range(self, num_tokens: int) -> PrunedRange | None:
        """Returns the range that token `num_tokens` is in, or the next; None past the last."""
        at = bisect_right(self.pruned, num_tokens, key=lambda pruned: pruned.stop)
        return self.pruned[at] if at < len(self.pruned) else None

    def uncut(self, num_tokens: int) -> int:
        """Returns the most of the first `num_tokens` tokens that do not end inside a pruned range."""
        pruned = self.pruned_range(num_tokens)
        return num_tokens if pruned is None else min(num_tokens, pruned.start)

    @property
    def longest_range(self) -> int:
        """Returns the most tokens that are computed at once whatever the limits: 0 without any."""
        return max((pruned.num_inputs for pruned in self.pruned), default=0)

    def num_written(self, num_computed: int) -> int:
        """Returns how many tokens need room while the pruned ranges past `num_computed` are computed."""
        return max((p.start + p.num_inputs for p in self.pruned if p.stop > num_computed), default=0)
