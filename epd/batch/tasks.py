"""Defines the tasks and outcomes of a backend."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol

from epd.batch.lines import JSON, BatchLine
from epd.errors import EPDError, http_status


@dataclass(frozen=True, slots=True, eq=False)
class MediaTask:
    """Groups questions with the same media before them. lines: one or more, taken singly, by any thread."""

    number: int
    lines: Iterator[BatchLine]


@dataclass(frozen=True, slots=True)
class Answered:
    """Holds a line and its completion, in the form of OpenAI's API."""

    line: BatchLine
    completion: JSON

    def amount(self, part: str, name: str) -> float:
        """Returns a number of a part of the completion, 0 where the server does not say it."""
        held = self.completion.get(part)
        found = held.get(name) if isinstance(held, dict) else None
        return found if isinstance(found, int | float) else 0


@dataclass(frozen=True, slots=True)
class Failed:
    """Reports why a line has no answer.

    kind: the name of the error's class, or a server's code. status: of HTTP. body: a server's whole reply.
    """

    line: BatchLine
    kind: str
    message: str
    status: int = 500
    body: dict[str, Any] | None = None

    @classmethod
    def of(cls, line: BatchLine, error: EPDError) -> Failed:
        return cls(line, type(error).__name__, " ".join(str(error).split()), http_status(error))


Outcome = Answered | Failed


def outcome_of(line: BatchLine, status: int, record: Any) -> Outcome:
    """Returns what a server's reply says of a line. record: its JSON, None for none."""
    if status == HTTPStatus.OK and _is_completion(record):
        return Answered(line, record)
    found = record.get("error") if isinstance(record, dict) else None
    error, body = (found, record) if isinstance(found, dict) else ({}, None)
    kind = str(error.get("code") or error.get("type") or "server_error")
    message = str(error.get("message") or json.dumps(record)[:200])
    return Failed(line, kind, " ".join(message.split()), status, body)


def _is_completion(record: Any) -> bool:
    try:
        choice = record["choices"][0]
        has_text = isinstance(choice["message"], dict) if "message" in choice else "text" in choice
        return has_text and "finish_reason" in choice
    except (LookupError, TypeError):
        return False


@dataclass(frozen=True, slots=True)
class BackendCounts:
    """Counts work, where known.

    num_encoded: lines for which something was encoded; the others found their media in the caches.
    num_units_skipped: units of videos that were not encoded, since they did not change.
    """

    num_encoded: int | None = None
    num_units_skipped: int | None = None


class Backend(Protocol):
    """Answers tasks."""

    @property
    def max_tasks(self) -> int:
        """Returns how many tasks it takes at once."""
        ...

    @property
    def num_in_flight(self) -> int:
        """Returns how many lines are being asked."""
        ...

    def run(self, tasks: Iterator[MediaTask]) -> AbstractContextManager[Iterator[Outcome | None]]:
        """Yields the outcomes of all tasks' lines, in any order; None when none came for a moment.

        A task is taken only when there is room for it, so memory stays bounded. Leaving the block ends the
        work. Failures of one line or its media are a `Failed`; raises EPDError when no further line can be
        answered.
        """
        ...

    def busy_s(self) -> Mapping[str, float]:
        """Returns the seconds that lines were at work in each stage, by name; several at once count each."""
        ...

    def counts(self) -> BackendCounts: ...
