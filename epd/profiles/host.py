"""What the application costs beside its models, on one machine whose cores all of its processes share.

    client, proxy, ingress  --messages-->  workers       every one of them a process; few cores for all

Found from questions that are asked one after the other, where nobody waits for anybody: what is not the
model's is the application's. Wall time tells how long the way is, CPU time how much of it somebody computes
and what is computed beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from epd.profiles.cost import StageTable


@dataclass(frozen=True, slots=True)
class Overhead:
    """Something the application does, seconds.

    work_s: of one core, on the way of the request. delay_s: on its way too, but nobody computes. beside_s: of
    one core, beside it.
    """

    work_s: float = 0.0
    delay_s: float = 0.0
    beside_s: float = 0.0

    def __post_init__(self) -> None:
        if min(self.work_s, self.delay_s, self.beside_s) < 0:
            raise ValueError(f"an overhead takes at least 0 s, got {self}")

    def times(self, factor: float) -> Overhead:
        return Overhead(factor * self.work_s, self.delay_s, factor * self.beside_s)


_NOTHING = Overhead()
_LEAST_FREE = 0.05  # of a core, however slow all of them are


@dataclass(frozen=True, slots=True)
class PromptRule:
    """Tokens of a prompt without media: fixed_tokens of the template that no cache has, and of its text."""

    fixed_tokens: float = 0.0
    per_text_token: float = 1.0

    def num_tokens(self, text_tokens: int) -> int:
        return max(1, round(self.fixed_tokens + self.per_text_token * text_tokens))


@dataclass(frozen=True, slots=True)
class HostCosts:
    """num_cores: shared by all workers and the application. idle_cores: that it takes when nothing is asked.

    request: from the client to a worker and back. split: more, where another worker decodes. image: of
    one, before its prompt is planned and again to hand it over. video: of one group of frames, to hand it
    over. sent: more, where another worker prefills than encodes. second: from
    the first token to the second, where another worker decodes. token_s: of one output token, beside.
    encode_s: of a batch, prefill_s: of a pass, decode_s: of a step, sequence_s: of each sequence in it, all
    in the worker, beside what the model takes.
    """

    num_cores: int
    idle_cores: float
    request: Overhead = _NOTHING
    split: Overhead = _NOTHING
    image: Overhead = _NOTHING
    video: Overhead = _NOTHING
    sent: Overhead = _NOTHING
    second: Overhead = _NOTHING
    token_s: float = 0.0
    encode_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    sequence_s: float = 0.0

    def __post_init__(self) -> None:
        if self.num_cores < 1 or not 0 <= self.idle_cores < self.num_cores:
            raise ValueError(f"a host needs at least 1 core, and not all of them idle, got {self}")

    def times(self, factor: float) -> HostCosts:
        """With work that takes so many times as long; what is only waited for takes as long as before."""
        ways = ("request", "split", "image", "video", "sent", "second")
        seconds = ("token_s", "encode_s", "prefill_s", "decode_s", "sequence_s")
        changes: dict[str, Any] = {name: getattr(self, name).times(factor) for name in ways}
        changes |= {name: factor * getattr(self, name) for name in seconds}
        return replace(
            self, idle_cores=min(factor * self.idle_cores, self.num_cores - _LEAST_FREE), **changes
        )

    def in_worker(
        self, encode: StageTable, prefill: StageTable, decode: StageTable
    ) -> tuple[StageTable, ...]:
        """The stages as a worker of the application has them."""
        return (
            _slower(encode, self.encode_s),
            _slower(prefill, self.prefill_s),
            _slower(decode, self.decode_s, self.sequence_s),
        )


def _slower(table: StageTable, fixed_s: float, per_unit_s: float = 0.0) -> StageTable:
    cost = table.cost
    return replace(
        table,
        cost=replace(cost, fixed_s=cost.fixed_s + fixed_s, per_unit_s=cost.per_unit_s + per_unit_s),
    )
