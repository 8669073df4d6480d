"""A backend without a model: it says what it was asked, and can be slow, fail, or end the process's work."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from epd.batch.lines import JSON, BatchLine
from epd.batch.tasks import Answered, BackendCounts, Failed, MediaTask, Outcome
from epd.errors import MediaNotFoundError, UnavailableError


def completion(text: str, usage: JSON | None = None) -> JSON:
    message = {"role": "assistant", "content": text}
    return {
        "id": "chatcmpl-0",
        "choices": [{"message": message, "finish_reason": "stop"}],
        "usage": usage or {},
    }


def question_of(line: BatchLine) -> str:
    parts: list[dict[str, Any]] = line.body["messages"][0]["content"]
    return str(parts[-1]["text"])


@dataclass
class FakeBackend:
    """pause_s: for each line. ends_after: lines, then nothing can be answered any more.

    stops_after: lines, then this process is killed.

    num_tokens: of each answer. Media with "missing" in their name fail. taken: number of lines of each task,
    as it was taken.
    """

    pause_s: float = 0.0
    ends_after: int | None = None
    stops_after: int | None = None
    num_tokens: int = 0
    asked: list[Any] = field(default_factory=list)
    num_tasks: int = 0
    max_tasks: int = 1
    num_in_flight: int = 0

    @contextmanager
    def run(self, tasks: Iterator[MediaTask]) -> Iterator[Iterator[Outcome | None]]:
        yield self._outcomes(tasks)

    def _outcomes(self, tasks: Iterator[MediaTask]) -> Iterator[Outcome | None]:
        for task in tasks:
            self.num_tasks += 1
            yield None
            for line in task.lines:
                if self.ends_after is not None and len(self.asked) >= self.ends_after:
                    raise UnavailableError("the server is gone")
                if self.stops_after == len(self.asked):
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(self.pause_s)
                self.asked.append(line.line_id)
                yield self._outcome(line)

    def _outcome(self, line: BatchLine) -> Outcome:
        (url,) = line.body["messages"][0]["content"][0].get("video_url", {"url": ""}).values()
        if "missing" in Path(url).name:
            return Failed.of(line, MediaNotFoundError(f"no file at {url}"))
        return Answered(line, completion(question_of(line), {"completion_tokens": self.num_tokens}))

    def busy_s(self) -> Mapping[str, float]:
        return {"decode": 0.0, "language": 0.001 * len(self.asked)}

    def counts(self) -> BackendCounts:
        return BackendCounts(self.num_tasks)
