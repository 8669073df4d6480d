"""Decides who drafts the next tokens of each request, and how many, for the model to check in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from epd.errors import RequestError
from epd.kv.draft_gain import ChosenDrafts, DraftStatistics
from epd.kv.draft_sources import DraftSource, PromptLookup, Recycling, SuccessorTable
from epd.types import Int64Array

DraftMethod = Literal["none", "prompt-lookup", "recycling", "auto", "mtp"]
DRAFT_METHODS: tuple[str, ...] = get_args(DraftMethod)
DEFAULT_DRAFT: DraftMethod = "none"
DEFAULT_MAX_DRAFT = 8
# A pass samples a row of logits for each draft.
MOST_DRAFTS = 32


def as_draft_method(name: str) -> DraftMethod:
    """Returns the name as a method. Raises RequestError for an unknown one."""
    for method in get_args(DraftMethod):
        if name == method:
            known: DraftMethod = method
            return known
    raise RequestError(
        f"received a draft of '{name}'; allowed: {', '.join(DRAFT_METHODS)}; choose one of them"
    )


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """Names who drafts. method: one of `DRAFT_METHODS`. max_draft: most tokens drafted for a request's pass.

    Raises RequestError for what is not allowed.
    """

    method: DraftMethod = DEFAULT_DRAFT
    max_draft: int = DEFAULT_MAX_DRAFT

    def __post_init__(self) -> None:
        if not 1 <= self.max_draft <= MOST_DRAFTS:
            raise RequestError(
                f"received a max_draft of {self.max_draft}; allowed: 1 to {MOST_DRAFTS}; to draft nothing, "
                "use --draft none"
            )


class AllDrafts:
    """Drafts for one sequence as many tokens as allowed in every pass, from one source."""

    def __init__(self, source: DraftSource, max_draft: int) -> None:
        self._source = source
        self._max_draft = max_draft

    def propose(self, token_ids: Int64Array, room: int, num_sequences: int) -> list[int]:  # noqa: ARG002 # for `ChosenDrafts`
        """Returns tokens that may follow token_ids, int64 [T]: the whole sequence.

        room: most tokens. num_sequences: that decode in the pass.
        """
        return self._source.propose(token_ids, min(self._max_draft, room))

    def learn(
        self,
        token_ids: Int64Array,
        drafts: Sequence[int],
        sampled: Sequence[int],
        num_open: int | None = None,  # noqa: ARG002 # for `ChosenDrafts`
    ) -> None:
        """Learns from a pass: what was sampled after token_ids, and after each draft as if it had held.

        num_open: of these tokens, those after which the answer goes on; None for all. A draft of the last
        token of an answer saves nothing.
        """
        self._source.learn(token_ids, drafts, sampled)


class Drafting:
    """Gives every sequence of an engine its drafts, and keeps what they share."""

    def __init__(self, config: DraftConfig, num_token_ids: int) -> None:
        """Takes num_token_ids: the size of the vocabulary, which bounds the memory of successors."""
        self.config = config
        self._table = SuccessorTable(num_token_ids if config.method in ("recycling", "auto") else 0)
        self.statistics = DraftStatistics(config.max_draft)

    def for_sequence(self) -> AllDrafts | ChosenDrafts | None:
        """Returns the drafts of a new sequence; None if nothing is drafted."""
        match self.config.method:
            case "prompt-lookup":
                return AllDrafts(PromptLookup(), self.config.max_draft)
            case "recycling":
                return AllDrafts(Recycling(self._table), self.config.max_draft)
            case "auto":
                recycling = Recycling(self._table)
                sources = dict[str, DraftSource](
                    [("prompt-lookup", PromptLookup()), ("recycling", recycling)]
                )
                return ChosenDrafts(sources, self.statistics)
            case _:
                return None

    def pays(self, num_sequences: int) -> bool:
        """Returns whether what so many sequences have just proposed pays in one pass."""
        return self.config.method != "auto" or self.statistics.pays(num_sequences)

    def record_pass(self, num_sequences: int, num_drafted: int, seconds: float) -> None:
        """Learns what a pass cost that did nothing but decode."""
        if self.config.method == "auto":
            self.statistics.cost.record(num_sequences, num_drafted, seconds)
