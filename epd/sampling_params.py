"""Chooses the tokens of one answer and its end, with the names and meanings vLLM gives the parameters.

    context   [ prompt ...... | room ............................. )
    answer                    [ requested length, at most the room )

A ceiling is not a wish: most answers end long before theirs. So memory is never set aside for it, and
planning ahead goes by `expected_tokens`.
"""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from epd.errors import RequestBudgetError, RequestError

MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_STOP_STRINGS = 64
MAX_INT64 = 2**63 - 1
MAX_GRAMMAR_CHARS = 2**20
MAX_BIASES = 1024
MAX_BAD_WORDS = 512
MAX_BAD_WORD_CHARS = 2**13  # of all words together
MAX_BIAS = 100.0  # as OpenAI and vLLM have it: one such token is the only one, or never comes


@dataclass(frozen=True, slots=True)
class _Range:
    """Bounds the values of one option. open_minimum: the minimum itself is not allowed."""

    kind: type[int] | type[float]
    minimum: float
    maximum: float | None = None
    open_minimum: bool = False
    optional: bool = False

    @property
    def limit(self) -> float:
        """Returns the maximum, or the largest value of int64 and float64."""
        if self.maximum is not None:
            return self.maximum
        return MAX_INT64 if self.kind is int else sys.float_info.max

    def holds(self, value: object) -> bool:
        if value is None:
            return self.optional
        if isinstance(value, bool) or not isinstance(value, int if self.kind is int else (int, float)):
            return False
        above = value > self.minimum if self.open_minimum else value >= self.minimum
        return above and value <= self.limit

    def __str__(self) -> str:
        kind, limit = ("an integer", "below 2**63") if self.kind is int else ("a number", "finite")
        low = f"{'above' if self.open_minimum else 'at least'} {self.minimum}"
        return f"{kind} {low} and {limit if self.maximum is None else f'at most {self.maximum}'}"


_RANGES = {
    "max_tokens": _Range(int, 1, optional=True),
    "temperature": _Range(float, 0),
    "top_p": _Range(float, 0, 1, open_minimum=True),
    "top_k": _Range(int, -1),
    "min_p": _Range(float, 0, 1),
    "repetition_penalty": _Range(float, 0, open_minimum=True),
    "presence_penalty": _Range(float, -2, 2),
    "frequency_penalty": _Range(float, -2, 2),
    "seed": _Range(int, -(2**63), optional=True),
    "min_tokens": _Range(int, 0),
    "logprobs": _Range(int, 0, MAX_LOGPROBS, optional=True),
    "n": _Range(int, 1, MAX_CHOICES),
}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Options of one request, checked at construction: RequestError names the first that makes no sense.

    max_tokens: of the answer; None leaves it to the checkpoint.
    temperature: 0 is greedy.
    top_p, top_k, min_p: which tokens may be drawn; top_k of 0 or -1 is all of them.
    repetition_penalty: on tokens of prompt and answer.
    presence_penalty, frequency_penalty: on tokens of the answer, for occurring and for each occurrence.
    seed: of the draws; None lets the server choose one.
    stop: strings that end the answer, cut off with all that follows unless include_stop_str_in_output.
    stop_token_ids: tokens that end it, beside the checkpoint's own, which ignore_eos switches off; their text
        is cut off as a stop string is.
    min_tokens: below this length only max_tokens and a complete format end the answer.
    logprobs: how many of the most likely tokens to report with each token; 0 is the chosen one alone.
    n: independent answers to the same prompt.
    logit_bias: token ids, each once, and what is added to their logits before all else.
    grammar: that the answer follows, as `epd.stages.grammar` writes it; empty for any answer.
    bad_words: that the answer does not contain, as the tokenizer writes them, with or without a space.
    bad_token_ids: the tokens of these words, see `stages/sampling/sampling_state.py`; None where not known.
    lora: name of the adapter that computes beside the model; empty for the model alone.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    n: int = 1
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: str = ""
    bad_words: tuple[str, ...] = ()
    bad_token_ids: tuple[tuple[int, ...], ...] | None = None
    lora: str = ""

    def __post_init__(self) -> None:
        for name, allowed in _RANGES.items():
            value = getattr(self, name)
            if not allowed.holds(value):
                raise RequestError(f"{name} must be {allowed}, got {reprlib.repr(value)}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}"
            )
        for name in ("include_stop_str_in_output", "ignore_eos"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, got {reprlib.repr(getattr(self, name))}")
        self._check_stops()
        self._check_biases()
        self._check_bad_words()
        self._check_grammar()

    def _check_grammar(self) -> None:
        if not isinstance(self.grammar, str) or len(self.grammar) > MAX_GRAMMAR_CHARS:
            raise RequestError(f"grammar must be a text of at most {MAX_GRAMMAR_CHARS} characters")
        if self.grammar and self.ignore_eos:
            raise RequestError(
                "received ignore_eos with a format of the answer, which says where it ends; "
                "allowed: one of the two; leave one out"
            )

    def _check_stops(self) -> None:
        if not isinstance(self.stop, tuple) or not all(isinstance(s, str) and s for s in self.stop):
            raise RequestError(
                f"stop must be strings of at least one character, got {reprlib.repr(self.stop)}"
            )
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(f"stop may hold at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}")
        ids = self.stop_token_ids
        if not isinstance(ids, tuple) or not all(type(i) is int and 0 <= i <= MAX_INT64 for i in ids):
            raise RequestError(f"stop_token_ids must be token ids of at least 0, got {reprlib.repr(ids)}")

    def _check_biases(self) -> None:
        given = self.logit_bias
        if not isinstance(given, tuple) or len(given) > MAX_BIASES:
            raise RequestError(f"logit_bias may hold at most {MAX_BIASES} tokens, got {reprlib.repr(given)}")
        if not all(type(i) is int and 0 <= i <= MAX_INT64 and abs(bias) <= MAX_BIAS for i, bias in given):
            raise RequestError(
                f"logit_bias must give token ids of at least 0 numbers from {-MAX_BIAS:g} to {MAX_BIAS:g}, "
                f"got {reprlib.repr(given)}"
            )
        if len({token_id for token_id, _ in given}) < len(given):
            raise RequestError(f"logit_bias must name each token once, got {reprlib.repr(given)}")

    def _check_bad_words(self) -> None:
        words = self.bad_words
        if not isinstance(words, tuple) or not all(isinstance(each, str) and each.strip() for each in words):
            raise RequestError(
                f"bad_words must be strings that are more than spaces, got {reprlib.repr(words)}"
            )
        num_chars = sum(map(len, words))
        if len(words) > MAX_BAD_WORDS or num_chars > MAX_BAD_WORD_CHARS:
            raise RequestError(
                f"bad_words may hold at most {MAX_BAD_WORDS} words of {MAX_BAD_WORD_CHARS} characters "
                f"together, got {len(words)} of {num_chars}"
            )

    def with_options(self, said: Mapping[str, Any]) -> SamplingParams:
        """Returns these params, as defaults, with the options a request names. Raises RequestError."""
        known = [field.name for field in fields(self)]
        unknown = sorted(said.keys() - set(known))
        if unknown:
            raise RequestError(
                f"there is no sampling option {reprlib.repr(unknown[0])}; the options are {', '.join(known)}"
            )
        return replace(self, **said)

    def ending_ids(self, eos_ids: frozenset[int]) -> frozenset[int]:
        """Returns the tokens that end an answer. eos_ids: those of the checkpoint."""
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else eos_ids)

    @property
    def is_greedy(self) -> bool:
        """Returns whether the most likely token is taken each time, without a draw."""
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """Returns whether the choice depends on which tokens came before."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


# Estimate for an answer whose length the request leaves open.
TYPICAL_TOKENS = 256


def held_to_context(
    params: SamplingParams,
    num_prompt_tokens: int,
    context_tokens: int | None,
    checkpoint_tokens: int | None = None,
) -> SamplingParams:
    """Returns the params with a definite max_tokens: the requested one, as far as the context has room.

    context_tokens: of the model, None where it has no end.
    checkpoint_tokens: longest answer of a request that names none; without either, all the room.
    Raises RequestBudgetError for a prompt that leaves no room, RequestError for min_tokens that do not fit.
    """
    room = MAX_INT64 if context_tokens is None else context_tokens - num_prompt_tokens
    if room < 1:
        raise RequestBudgetError(
            f"the prompt has {num_prompt_tokens} tokens; allowed: fewer than {context_tokens}; ask for less"
        )
    if params.min_tokens > room:
        raise RequestError(
            f"received min_tokens {params.min_tokens}; allowed: at most {room} behind a prompt of "
            f"{num_prompt_tokens} tokens in a context of {context_tokens}; lower it"
        )
    asked = checkpoint_tokens if params.max_tokens is None else params.max_tokens
    most = room if asked is None else min(asked, room)
    return replace(params, max_tokens=max(most, params.min_tokens))


def expected_tokens(params: SamplingParams, asked: int | None) -> int:
    """Returns how many tokens to plan for, over all answers to a request. params: held to the context.

    asked: what its request, or else the checkpoint, names as the longest answer; None: neither does.
    """
    most = MAX_INT64 if params.max_tokens is None else params.max_tokens
    return params.n * (most if asked is not None else min(most, TYPICAL_TOKENS))
