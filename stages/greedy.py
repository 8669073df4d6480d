"""Greedy choice of tokens, as `generate` makes it with a checkpoint's own settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from encoders import PromptPlan
from stages.kv_cache import KVCache
from stages.model_runner import ModelRunner

DEFAULT_MAX_TOKENS = 256


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """What a checkpoint says of how it wants to be asked.

    eos_ids: the tokens that end an answer. max_tokens: of an answer, where the request says nothing.
    repetition_penalty: divides the positive scores of tokens seen before, and multiplies the negative (CTRL,
    section 4.1); 1 leaves them alone.
    """

    eos_ids: frozenset[int]
    max_tokens: int = DEFAULT_MAX_TOKENS
    repetition_penalty: float = 1.0

    @classmethod
    def of(cls, config: Any, tokenizer_eos_id: int | None) -> GenerationSettings:
        """Reads a transformers GenerationConfig; without end tokens there, the tokenizer's own counts."""
        configured: int | Sequence[int] | None = config.eos_token_id
        ids = tokenizer_eos_id if configured is None else configured
        return cls(
            eos_ids=frozenset([ids] if isinstance(ids, int) else ids or ()),
            max_tokens=config.max_new_tokens or DEFAULT_MAX_TOKENS,
            repetition_penalty=config.repetition_penalty or 1.0,
        )


class GreedyChoice:
    """Picks the most likely token again and again, mindful of all before it."""

    def __init__(self, settings: GenerationSettings, prompt_ids: Tensor) -> None:
        """prompt_ids: int64 [T]."""
        self._penalty = settings.repetition_penalty
        self._seen = torch.unique(prompt_ids) if self._penalty != 1.0 else prompt_ids[:0]

    def pick(self, logits: Tensor) -> int:
        """The next token, given its logits [vocab]."""
        if self._penalty != 1.0:
            logits = self._penalised(logits)
        token_id = int(logits.argmax())
        if self._penalty != 1.0:
            self._seen = torch.cat([self._seen, torch.tensor([token_id])])
        return token_id

    def _penalised(self, logits: Tensor) -> Tensor:
        scores = logits[self._seen]
        adjusted = torch.where(scores < 0, scores * self._penalty, scores / self._penalty)
        return logits.index_copy(0, self._seen, adjusted)


def generate_greedily(
    runner: ModelRunner, cache: KVCache, prompt: PromptPlan, logits: Tensor, settings: GenerationSettings
) -> Iterator[int]:
    """Tokens one after another, up to and with the first that ends the answer, each computed when asked for.

    The cache holds the whole prompt; logits, [vocab], are those that follow it.
    """
    choice = GreedyChoice(settings, torch.from_numpy(prompt.token_ids))
    positions = torch.full((len(prompt.positions), 1), prompt.next_position)
    token_id = choice.pick(logits)
    yield token_id
    while token_id not in settings.eos_ids:
        token_id = choice.pick(runner.decode(cache, token_id, positions))
        positions = positions + 1
        yield token_id
