"""Checks the formats of requests in processes of their own, before anything else is done for a request.

wanted format -> kept verdict | an idle child | a new one -> grammar or RequestError
no answer in time, or the child has died: it is ended, the format refused, the next gets a new child
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import asdict

from epd.errors import RequestError, UnavailableError
from epd.stages.grammar.child import READY
from epd.stages.grammar.formats import AnswerFormat
from epd.stages.grammar.limits import MAX_BUILD_S, MAX_MEMORY_BYTES

_BOOT = "import sys; sys.path[:] = {path!r}; from epd.stages.grammar.child import main; main()"
_ENVIRONMENT = {"PATH": os.defpath, "LANG": "C.UTF-8"}  # no key, no token
_START_S = 60.0
# Wall time of an answer: the child's limits are of CPU time, and it may have to wait for its turn.
_ANSWER_S = 20 * MAX_BUILD_S
_MAX_KEPT = 64
_PART_BYTES = 1 << 16


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
                break
        reply: dict[str, str] | None = None if line is None else json.loads(line)
        return reply

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
