"""Text as it becomes known, token by token, and never half a character of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any

OnText = Callable[[str], None]

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class IncrementalDetokenizer:
    """Turns a growing run of token ids into pieces of text; the pieces add up to the text of the whole run.

    A byte-level token may end inside a UTF-8 character; its text is held back until the character is whole:

        ids      ...... | window ........... | new
        text     emitted| emitted   | held     |
        offset          window_start  emitted_stop
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        self._window_start = 0
        self._emitted_stop = 0

    def push(self, token_id: int) -> str:
        """Adds one token; returns the text that it completes, often but not always its own."""
        self._token_ids.append(token_id)
        return self._take(hold_back=True)

    def finish(self) -> str:
        """What is still held back: bytes that never became a character show as replacement characters."""
        return self._take(hold_back=False)

    def _take(self, *, hold_back: bool) -> str:
        emitted = self._decode(self._window_start, self._emitted_stop)
        window = self._decode(self._window_start, len(self._token_ids))
        if hold_back and window.endswith(_REPLACEMENT):
            return ""
        self._window_start, self._emitted_stop = self._emitted_stop, len(self._token_ids)
        return window[len(emitted) :]

    def _decode(self, start: int, stop: int) -> str:
        text: str = self._tokenizer.decode(
            self._token_ids[start:stop], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


class StreamedText:
    """An answer while it grows.

    start: `perf_counter` when the request came. ttft_s: seconds from then to the first token.
    """

    def __init__(self, tokenizer: Any, on_text: OnText | None, start: float) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.ttft_s = 0.0
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._on_text = on_text
        self._start = start

    def consume(self, tokens: Iterable[int]) -> None:
        """Takes all tokens, passing text on as soon as it is known."""
        for token_id in tokens:
            if not self.token_ids:
                self.ttft_s = perf_counter() - self._start
            self.token_ids.append(token_id)
            self._emit(self._detokenizer.push(token_id))
        self._emit(self._detokenizer.finish())

    def _emit(self, piece: str) -> None:
        self.text += piece
        if piece and self._on_text:
            self._on_text(piece)
