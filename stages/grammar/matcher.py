"""Tracks which tokens may follow in an answer that is held to a grammar.

    text of a grammar   built once by a thread, and kept        GrammarBuilder
    an answer           a copy, which takes each token          TokenMatcher
    a step              the only token that may come next       only_token(drafted)
                        or bits of those that may               mask(drafted)

What a matcher knows follows from the tokens of its answer alone: another worker that gets these continues in
the same state. The library is imported by the first grammar: `make gpu` runs where it is not installed.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from functools import cached_property
from itertools import islice, takewhile
from typing import Any, NamedTuple

from epd.errors import RequestError
from epd.stages.grammar.limits import PARSER_LIMITS

_MAX_KEPT = 64
_MAX_SHOWN = 300  # characters of the library's message


class BuiltGrammar(NamedTuple):
    """Holds the library's matcher at the beginning of an answer. num_tokens: of the tokenizer."""

    matcher: Any
    num_tokens: int


class GrammarBuilder:
    """Builds the grammars of one tokenizer, in a thread, and keeps the latest."""

    def __init__(self, tokenizer: Any, eos_ids: frozenset[int]) -> None:
        """Takes a tokenizer of transformers, and the tokens that end an answer. Starts nothing yet."""
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._kept: OrderedDict[str, Future[BuiltGrammar]] = OrderedDict()

    def matcher(self, grammar: str) -> TokenMatcher:
        """Returns a matcher of a new answer at once; its grammar may still be in the making."""
        return TokenMatcher(self.start(grammar))

    def start(self, grammar: str) -> Future[BuiltGrammar]:
        """Starts building a grammar, unless it is kept or in the making."""
        built = self._kept.pop(grammar, None) or self._thread.submit(self._built, grammar)
        self._kept[grammar] = built
        if len(self._kept) > _MAX_KEPT:
            self._kept.popitem(last=False)
        return built

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="grammar")

    @cached_property
    def _tokens(self) -> Any:
        if not self._eos_ids:
            raise RequestError(
                "the checkpoint names no token that ends an answer; allowed: answers in any format; "
                "leave the format out"
            )
        backend = copy(self._tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        return _library().LLTokenizer(backend.to_str(), eos_token=sorted(self._eos_ids))

    def _built(self, grammar: str) -> BuiltGrammar:
        """Builds in the thread. Raises RequestError."""
        library = _library()
        limits = library.LLParserLimits(**PARSER_LIMITS)
        matcher = library.LLMatcher(self._tokens, grammar, log_level=0, limits=limits)
        matcher.compute_bitmask()  # the first step of every copy
        if matcher.is_error():
            raise _refused(matcher.get_error(), 0)
        return BuiltGrammar(matcher, self._tokens.vocab_size)


class TokenMatcher:
    """Holds one answer's place in its grammar.

    Where a grammar leaves no choice for some tokens, such as the names in a JSON object, the library names
    them all at once, and is not asked again before they have come.
    """

    __slots__ = ("_built", "_forced", "_matcher", "_num_taken", "_pending")

    def __init__(self, built: Future[BuiltGrammar]) -> None:
        self._built = built
        self._matcher: Any = None
        self._pending: list[int] = []
        self._forced: deque[int] = deque()
        self._num_taken = 0

    @property
    def is_ready(self) -> bool:
        """Returns whether the grammar is built, or cannot be: `mask` does not wait then."""
        return self._built.done()

    def append(self, token_id: int) -> None:
        """Takes the next token of the answer, which is matched when the one after it is wanted."""
        self._pending.append(token_id)
        if self._forced and self._forced.popleft() != token_id:
            self._forced.clear()

    def only_token(self, drafted: Sequence[int] = ()) -> int | None:
        """Returns the one token that may follow the answer and `drafted`; None if there may be others.

        Raises RequestError for a grammar that cannot be built, or that has become too complex.
        """
        if not self._forced and not drafted:
            self._forced.extend(self._current().compute_ff_tokens())
        if len(drafted) >= len(self._forced):
            return None
        *before, token_id = islice(self._forced, len(drafted) + 1)
        return token_id if before == list(drafted) else None

    def mask(self, drafted: Sequence[int] = ()) -> bytes:
        """Returns which tokens may follow the answer and `drafted`: token i is bit i % 8 of byte i // 8.

        All bits are set behind a drafted token that may not come itself, since nothing behind it is used.
        Raises RequestError for a grammar that cannot be built, or that has become too complex.
        """
        matcher = self._current()
        num_valid = self._try(drafted) if drafted else 0
        mask: bytes = matcher.compute_bitmask()
        if num_valid < len(drafted):
            mask = b"\xff" * len(mask)
        if matcher.is_error() or (num_valid and not matcher.rollback(num_valid)):
            raise _refused(matcher.get_error(), self._num_taken)
        return mask

    def _try(self, drafted: Sequence[int]) -> int:
        """Takes the drafted tokens up to the first that may not come; returns how many these are."""
        num_tokens = self._built.result().num_tokens
        known = list(takewhile(lambda token_id: token_id < num_tokens, drafted))
        num_valid: int = self._matcher.try_consume_tokens(known) if known else 0
        return num_valid

    def _current(self) -> Any:
        """Returns the library's matcher behind all tokens taken so far."""
        if self._matcher is None:
            self._matcher = self._built.result().matcher.deep_copy()
        if self._pending:
            if not self._matcher.consume_tokens(self._pending):
                raise _refused(self._matcher.get_error(), self._num_taken)
            self._num_taken += len(self._pending)
            self._pending.clear()
        return self._matcher


def _library() -> Any:
    import llguidance.hf

    return llguidance


def _refused(message: str, num_tokens: int) -> RequestError:
    shown = " ".join(message.replace("<non-verbose/>", "").split())[:_MAX_SHOWN]
    return RequestError(
        f"received a format that cannot be followed behind {num_tokens} tokens of the answer ({shown}); "
        "allowed: what docs/api.md lists; simplify the schema, expression or grammar"
    )
