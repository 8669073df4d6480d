"""Emits text as it becomes known, by token: never half a character, and never half a stop string."""

from __future__ import annotations

import codecs
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tokenizers import decoders

from epd.sampling_params import SamplingParams

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class IncrementalDetokenizer:
    """Turns a growing run of token ids into pieces of text that add up to the text of the whole run.

    A token may end inside a UTF-8 character; its text is held back until the character is whole.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Creates a detokenizer. tokenizer: of transformers.

        push: takes one token; returns the text that it completes, often but not always its own.
        finish: returns what is held back: bytes that never became a character show as replacement characters.
        """
        token_bytes = _token_bytes_of(tokenizer)
        decoder = WindowDecoder(tokenizer) if token_bytes is None else ByteLevelDecoder(token_bytes)
        self.push, self.finish = decoder.push, decoder.finish


class WindowDecoder:
    """Decodes any tokenizer's last tokens repeatedly, and holds back what is not whole yet.

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
        self._token_ids.append(token_id)
        return self._take(hold_back=True)

    def finish(self) -> str:
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


class ByteLevelDecoder:
    """Decodes byte-level BPE, as GPT-2 and Qwen have it: a token is a run of bytes, the text is UTF-8.

    Work per token stays the same however long bytes remain invalid; a window would grow with them.
    """

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        token = self._token_bytes[token_id]
        if token.isascii() and not self._utf8.buffer:
            return token.decode()
        return self._utf8.decode(token)

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class TokenBytes(dict[int, bytes]):
    """Looks up the bytes of a byte-level tokenizer's tokens when first met; special tokens have none."""

    def __init__(self, backend: Any) -> None:
        """Takes the backend: a `tokenizers.Tokenizer`."""
        self._backend = backend
        self._alphabet = _alphabet()
        added = backend.get_added_tokens_decoder()
        self.update((token_id, b"") for token_id, token in added.items() if token.special)

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if all(character in self._alphabet for character in token):
            self[token_id] = bytes(self._alphabet[character] for character in token)
        else:
            # An added token in plain letters; the decoder of `tokenizers` detects them the same way.
            self[token_id] = token.encode()
        return self[token_id]


def _alphabet() -> dict[str, int]:
    """Returns the byte of each character in byte-level tokens, as GPT-2 has them.

    Bytes that are visible in Latin-1 stand for themselves, the others for the characters from 256 on.
    """
    visible = [*range(ord("!"), 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + at): byte for at, byte in enumerate(hidden)}


@lru_cache(maxsize=8)
def _token_bytes_of(tokenizer: Any) -> TokenBytes | None:
    """Returns a table shared by all answers of a tokenizer; None if its tokens are not runs of bytes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return TokenBytes(backend) if isinstance(getattr(backend, "decoder", None), decoders.ByteLevel) else None


class StopString:
    """Finds one string in texts that come character by character (Knuth, Morris and Pratt 1977).

    Shared by all answers to a request. Its table is made as far as a text has matched, so that a long string
    costs no more than the texts do.
    """

    __slots__ = ("_borders", "string")

    def __init__(self, string: str) -> None:
        self.string = string
        # How much of string[:i + 1] is matched again by its own end; 4 bytes for each character.
        self._borders = array("I", [0])

    @property
    def num_prepared(self) -> int:
        """Counts the characters for which the table is made."""
        return len(self._borders)

    def longer(self, matched: int, character: str) -> int:
        """Returns how much is matched after `character` follows a text that ends with string[:matched]."""
        while matched and self.string[matched] != character:
            matched = self.border(matched)
        return matched + (self.string[matched] == character)

    def border(self, matched: int) -> int:
        """Returns how much of string[:matched], but not all of it, is matched by its own end."""
        while len(self._borders) < matched:
            self._borders.append(self.longer(self._borders[-1], self.string[len(self._borders)]))
        return self._borders[matched - 1]


@dataclass(frozen=True, slots=True)
class AnswerEnds:
    """Holds what ends a request's answers, shared by all of them.

    token_ids: the checkpoint's too.
    format_ids: those that end it before `min_tokens` too: they come there only where a format is complete.
    """

    token_ids: frozenset[int]
    stops: tuple[StopString, ...]
    format_ids: frozenset[int] = frozenset()

    @classmethod
    def of(cls, params: SamplingParams, eos_ids: frozenset[int]) -> AnswerEnds:
        """Creates the ends. eos_ids: the checkpoint's end tokens."""
        stops = tuple(map(StopString, params.stop))
        return cls(params.ending_ids(eos_ids), stops, eos_ids if params.grammar else frozenset())


class _Matcher:
    """Finds one string in one text.

    matched: how many characters at the end of the text may become the string, but are not yet all of it.
    """

    __slots__ = ("_stop", "matched")

    def __init__(self, stop: StopString) -> None:
        self._stop = stop
        self.matched = 0

    @property
    def string(self) -> str:
        return self._stop.string

    def feed(self, character: str) -> bool:
        """Reports whether the text ends with the string, now that it ends with the character."""
        matched = self._stop.longer(self.matched, character)
        found = matched == len(self._stop.string)
        self.matched = self._stop.border(matched) if found else matched
        return found


class StopChecker:
    """Passes text up to the first stop string, and never a character that may still belong to one.

    The string that is complete first counts, of two that end together the longer; where the text was cut into
    pieces makes no difference.
    matched: the stop string that was found.
    """

    def __init__(self, stop: Iterable[str | StopString], *, include_stop: bool = False) -> None:
        """Takes stop, which may share a `StopString`. include_stop: whether it belongs to the text."""
        self.matched: str | None = None
        self._matchers = [_Matcher(StopString(each) if isinstance(each, str) else each) for each in stop]
        self._include_stop = include_stop
        self._held = ""

    def push(self, piece: str, *, may_stop: bool = True) -> str:
        """Takes the next piece; returns what may be shown now. may_stop: whether the text may end in it."""
        if not self._matchers or not piece:
            return piece
        text = self._held + piece
        for stop, character in enumerate(piece, start=len(self._held) + 1):
            found = [matcher.string for matcher in self._matchers if matcher.feed(character)]
            if found and may_stop:
                self.matched = max(found, key=len)
                self._held = ""
                return text[: stop if self._include_stop else stop - len(self.matched)]
        num_settled = len(text) - max(matcher.matched for matcher in self._matchers)
        self._held = text[num_settled:]
        return text[:num_settled]

    def finish(self) -> str:
        """Returns what was held back for a stop string that did not come."""
        held, self._held = self._held, ""
        return held


class TextStream:
    """Builds the text of one growing answer, up to its stop string."""

    def __init__(self, tokenizer: Any, params: SamplingParams, ends: AnswerEnds | None = None) -> None:
        """Starts a text. ends: of the request, to be shared by its answers."""
        self.ends = AnswerEnds.of(params, frozenset()) if ends is None else ends
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._include_stop = params.include_stop_str_in_output
        self._checker = StopChecker(self.ends.stops, include_stop=self._include_stop)

    @property
    def is_stopped(self) -> bool:
        return self._checker.matched is not None

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """Takes a token; returns what became readable. After the end, returns nothing."""
        return self._checker.push(self._detokenizer.push(token_id), may_stop=may_stop)

    def end(self, token_id: int) -> str:
        """Takes the token that ends the text, and belongs to it as a stop string does; returns the rest."""
        text = self.push(token_id) if self._include_stop else ""
        return text if self.is_stopped else text + self.finish()

    def finish(self) -> str:
        """Returns the rest of a text that ends without a stop string."""
        return self._checker.push(self._detokenizer.finish(), may_stop=False) + self._checker.finish()
