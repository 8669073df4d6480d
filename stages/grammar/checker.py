"""Checks the formats of requests in processes of their own, before anything else is done for a request.

wanted format -> kept verdict | an idle child | a new one -> grammar or RequestError
no answer in time, or the child has died: it is ended, the format refused, and a new one started at once, so
that whoever asks next does not wait for it

    parent  --a line of JSON: kind, text, whitespace-->  child  --a line of JSON: grammar or error-->  parent

`main` is the child. It follows a grammar some way too, as much of its work is done only then.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import resource
import select
import signal
import subprocess
import sys
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from epd.errors import RequestError, UnavailableError
from epd.stages.grammar.formats import AnswerFormat, grammar_text
from epd.stages.grammar.limits import MAX_BUILD_S, MAX_MASK_S, MAX_MEMORY_BYTES, PARSER_LIMITS

_BOOT = "import sys; sys.path[:] = {path!r}; from epd.stages.grammar.checker import main; main()"
_ENVIRONMENT = {"PATH": os.defpath, "LANG": "C.UTF-8"}  # no key, no token
_START_S = 60.0
# Wall time of an answer: the child's limits are of CPU time, and it may have to wait for its turn.
_ANSWER_S = 20 * MAX_BUILD_S
_MAX_KEPT = 64
_PART_BYTES = 1 << 16
READY = b"ready\n"
_PR_SET_PDEATHSIG = 1
_END_ID = 256
_NUM_WALKS, _NUM_STEPS = 3, 64
_MAX_SHOWN = 300  # characters of the library's message


class GrammarChecker:
    """Builds each format once in a bounded process, of which there are as many as callers at once."""

    def __init__(self) -> None:
        """Starts nothing yet."""
        self._kept: OrderedDict[AnswerFormat, str | RequestError] = OrderedDict()
        self._idle: list[_Child] = []
        self._is_closed = False

    def knows(self, wanted: AnswerFormat) -> bool:
        """Returns whether `grammar_of` needs no process."""
        return wanted in self._kept

    def grammar_of(self, wanted: AnswerFormat) -> str:
        """Returns the grammar of a format; blocks for seconds at most. Raises RequestError."""
        verdict = self._kept.get(wanted) or self._verdict(wanted)
        self._kept[wanted] = verdict
        while len(self._kept) > _MAX_KEPT:
            with suppress(KeyError):  # another thread was faster
                self._kept.popitem(last=False)
        if isinstance(verdict, RequestError):
            raise RequestError(str(verdict))
        return verdict

    def _verdict(self, wanted: AnswerFormat) -> str | RequestError:
        reply = self._ask(wanted)
        if reply is None:
            return _refused(
                wanted, f"it needs more than {MAX_BUILD_S} s or {MAX_MEMORY_BYTES >> 20} MiB to be built"
            )
        return _refused(wanted, reply["error"]) if "error" in reply else reply["grammar"]

    def _ask(self, wanted: AnswerFormat) -> dict[str, str] | None:
        """Returns a child's reply. Asks another if the system, not its own limit, ended the first."""
        question = json.dumps(asdict(wanted)).encode() + b"\n"
        for _ in range(2):
            child = self._idle.pop() if self._idle else _Child()
            line = child.ask(question, _ANSWER_S)
            if line is not None and not self._is_closed:
                self._idle.append(child)
                break
            status = child.status()
            child.close()
            if status != -signal.SIGKILL:
                self._replace()
                break
        reply: dict[str, str] | None = None if line is None else json.loads(line)
        return reply

    def _replace(self) -> None:
        """Starts a child for one that a format has ended."""
        with suppress(UnavailableError):
            child = _Child()
            self._idle.append(child)
            if self._is_closed:
                self.close()

    def close(self) -> None:
        """Ends the children."""
        self._is_closed = True
        while self._idle:
            self._idle.pop().close()


def _refused(wanted: AnswerFormat, why: str) -> RequestError:
    name = wanted.kind.replace("_", " ")
    return RequestError(
        f"received a {name} that cannot be followed ({why}); allowed: what docs/api.md lists for structured "
        f"output; simplify it"
    )


class _Child:
    """Runs one process that answers line by line."""

    def __init__(self) -> None:
        """Starts it. Raises UnavailableError."""
        path = [os.path.abspath(each) for each in sys.path if each]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _BOOT.format(path=path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env=_ENVIRONMENT,
            start_new_session=True,
        )
        self._has_ended = False
        if self._line(time.monotonic() + _START_S) != READY:
            self.close()
            raise UnavailableError("the process that checks formats did not start; retry later")

    def ask(self, line: bytes, patience_s: float) -> bytes | None:
        """Returns the answer to a line; None if it died or took too long, and is of no more use."""
        assert self._process.stdin is not None
        with suppress(OSError):  # it has died, which its other pipe tells
            self._process.stdin.write(line)
            self._process.stdin.flush()
        return self._line(time.monotonic() + patience_s)

    def _line(self, until_s: float) -> bytes | None:
        assert self._process.stdout is not None
        pipe, read = self._process.stdout.fileno(), b""
        while not read.endswith(b"\n"):
            ready, _, _ = select.select([pipe], [], [], max(0.0, until_s - time.monotonic()))
            part = os.read(pipe, _PART_BYTES) if ready else b""
            if not part:
                self._has_ended = bool(ready)
                return None
            read += part
        return read

    def status(self) -> int | None:
        """Returns how it ended, as `subprocess` has it; None if its pipe is open, since it goes on then."""
        return self._process.wait() if self._has_ended else None

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


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
