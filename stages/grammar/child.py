"""Builds formats in a process with limits: one that takes too long or too much ends this process alone.

    parent  --a line of JSON: kind, text, whitespace-->  child  --a line of JSON: grammar or error-->  parent

A grammar is followed some way too, as much of its work is done only then.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from epd.stages.grammar.formats import AnswerFormat, grammar_text
from epd.stages.grammar.limits import MAX_BUILD_S, MAX_MASK_S, MAX_MEMORY_BYTES, PARSER_LIMITS

READY = b"ready\n"
_PR_SET_PDEATHSIG = 1
_END_ID = 256
_NUM_WALKS, _NUM_STEPS = 3, 64
_MAX_SHOWN = 300  # characters of the library's message


def main() -> None:
    """Answers line by line until stdin is closed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    tokens = _byte_tokens()
    _limit_memory()
    _send(READY)
    for line in sys.stdin.buffer:
        _limit_cpu()
        _send(json.dumps(_reply(json.loads(line), tokens)).encode() + b"\n")


def _send(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


def _reply(asked: dict[str, Any], tokens: Any) -> dict[str, str]:
    start_s = time.process_time()
    try:
        grammar = grammar_text(AnswerFormat(**asked))
        error = _error_of(grammar, tokens, start_s)
    except Exception as refused:  # noqa: BLE001 - a process boundary: whatever it is, the format is refused
        grammar, error = "", f"{type(refused).__name__}: {refused}"
    if error:
        return {"error": " ".join(error.replace("<non-verbose/>", "").split())[:_MAX_SHOWN]}
    return {"grammar": grammar}


def _error_of(grammar: str, tokens: Any, start_s: float) -> str:
    """Returns why a grammar is refused; empty if it is not. start_s: CPU time at which its work began."""

    matcher = LLMatcher(tokens, grammar, log_level=0, limits=LLParserLimits(**PARSER_LIMITS))
    if time.process_time() - start_s > MAX_BUILD_S:
        return f"it took more than {MAX_BUILD_S} s to build"
    error: str = matcher.get_error()
    for seed in range(_NUM_WALKS):
        error = error or _walk(matcher.deep_copy(), random.Random(seed))
    return error


def _walk(matcher: Any, rng: random.Random) -> str:
    """Follows a grammar along allowed bytes drawn at random; returns what was wrong."""
    for _ in range(_NUM_STEPS):
        start_s = time.process_time()
        mask = matcher.compute_bitmask()
        if time.process_time() - start_s > MAX_MASK_S:
            return f"a token of it took more than {MAX_MASK_S} s"
        allowed = [byte for byte in range(_END_ID) if mask[byte >> 3] >> (byte & 7) & 1]
        if not allowed or matcher.is_error():
            break
        matcher.consume_token(rng.choice(allowed))
    error: str = matcher.get_error()
    return error


class _Bytes:
    """Lists bytes as tokens: the model's own would make no difference to what is checked."""

    eos_token_id = _END_ID
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(_END_ID)), b"<end>")
    special_token_ids = (_END_ID,)

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def _byte_tokens() -> Any:

    return LLTokenizer(TokenizerWrapper(_Bytes()))


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if os.path.exists("/proc") else 0
    most = pages * resource.getpagesize() + MAX_MEMORY_BYTES
    limits = ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_AS, most))
    for kind, limit in limits:
        resource.setrlimit(kind, (limit, limit))


def _limit_cpu() -> None:
    """Ends the process by a signal when one format has taken more than its CPU time."""
    signal.setitimer(signal.ITIMER_PROF, MAX_BUILD_S + _NUM_WALKS * MAX_MASK_S)
