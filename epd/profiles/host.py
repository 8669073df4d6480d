"""Models the cost of the application beside its models, on one machine whose processes share all cores.

    client, proxy, ingress  --messages-->  workers       each one a process; few cores for all

It is measured with requests sent one after the other, so that none waits for another: time not spent in
the model is the application's. Wall time shows the length of the critical path, CPU time how much of it is
computed and how much is computed beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from epd.profiles.cost import StageTable


@dataclass(frozen=True, slots=True)
class Overhead:
    """Holds the cost of one action of the application, seconds.

    work_s: of one core, on the critical path of the request
    delay_s: on the critical path too, but without computing
    beside_s: of one core, off the critical path
    """

    work_s: float = 0.0
    delay_s: float = 0.0
    beside_s: float = 0.0

    def __post_init__(self) -> None:
        if min(self.work_s, self.delay_s, self.beside_s) < 0:
            raise ValueError(f"an overhead takes at least 0 s, got {self}")


_NOTHING = Overhead()
# Fields of `HostCosts`: actions on the way of a request.
WAYS = ("request", "split", "media", "image", "video", "sent", "second", "end")


@dataclass(frozen=True, slots=True)
class PromptRule:
    """Counts tokens of a prompt without media: fixed_tokens of the uncached template, and its text."""

    fixed_tokens: float = 0.0
    per_text_token: float = 1.0

    def num_tokens(self, text_tokens: int) -> int:
        return max(1, round(self.fixed_tokens + self.per_text_token * text_tokens))


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Holds the costs of the application.

    num_cores: shared by all workers and the application
    idle_cores: cores in use without any request
    request: from the client to a worker and back
    split: extra where another worker decodes
    media: extra of a request with any, before it is read
    image: of one, or of a clip of sound, before its prompt is planned and again to hand it over
    video: of one group of frames, to hand it over
    sent: extra where another worker prefills than encodes
    second: from the first token to the second, where another worker decodes
    end: from the last token of an answer to its end
    token_s: of one output token, off the critical path
    encode_s, prefill_s, decode_s, sequence_s: of a batch, a pass, a step and each sequence in the step, in
        the worker, beside the time of the model
    """

    num_cores: int
    idle_cores: float
    request: Overhead = _NOTHING
    split: Overhead = _NOTHING
    media: Overhead = _NOTHING
    image: Overhead = _NOTHING
    video: Overhead = _NOTHING
    sent: Overhead = _NOTHING
    second: Overhead = _NOTHING
    end: Overhead = _NOTHING
    token_s: float = 0.0
    encode_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    sequence_s: float = 0.0

    def __post_init__(self) -> None:
        if self.num_cores < 1 or not 0 <= self.idle_cores < self.num_cores:
            raise ValueError(f"a host needs at least 1 core, and not all of them idle, got {self}")

    def in_worker(
        self, encode: StageTable, prefill: StageTable, decode: StageTable
    ) -> tuple[StageTable, ...]:
        """Returns the stages as a worker of the application has them."""
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
