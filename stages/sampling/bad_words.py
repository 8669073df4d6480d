"""Rules out the tokens that would complete a word that an answer may not contain.

A word is a sequence of tokens, as the tokenizer writes it at the beginning of a text and behind a space. Its
last token may not come where the others have come before it, in the answer or among the drafted tokens:

    word     [41, 7, 9]
    answer   ... 41  7 | 9 is ruled out        ... 41  8 | nothing is
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from epd.sampling_params import SamplingParams

_MAX_KEPT = 64


class BadWords:
    """Holds words. num_before: tokens of the answer that decide what may follow, at most."""

    __slots__ = ("_after", "_alone", "num_before")

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        """Takes words: token ids, at least one of each."""
        known = {tuple(word) for word in words}
        self._alone = frozenset(word[0] for word in known if len(word) == 1)
        self._after: dict[int, list[tuple[int, ...]]] = {}
        for word in sorted(known):
            if len(word) > 1:
                self._after.setdefault(word[-2], []).append(word)
        self.num_before = max(map(len, known), default=1) - 1

    def completing(self, before: Sequence[int]) -> frozenset[int]:
        """Returns the tokens that would complete a word. before: the last `num_before` tokens, or all."""
        words = self._after.get(before[-1], ()) if before else ()
        found = [word[-1] for word in words if tuple(before[1 - len(word) :]) == word[:-1]]
        return self._alone.union(found) if found else self._alone


def with_bad_tokens(params: SamplingParams, tokenizer: Any) -> SamplingParams:
    """Returns params with the tokens of their bad words. tokenizer: of transformers, lent to the caller.

    Spaces before a word make no difference.
    """
    if not params.bad_words:
        return params
    texts = [space + word.lstrip() for word in params.bad_words for space in ("", " ")]
    token_ids: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return replace(params, bad_token_ids=tuple(tuple(word) for word in token_ids if word))


@lru_cache(maxsize=_MAX_KEPT)
def bad_words_of(token_ids: tuple[tuple[int, ...], ...]) -> BadWords | None:
    """Returns the words of a request, kept for its other answers; None without any."""
    return BadWords(token_ids) if token_ids else None
