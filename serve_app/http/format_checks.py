"""Checks the formats of requests in turns over clients: those of one hold up none of another's."""

from __future__ import annotations

from collections import Counter
from functools import partial

from epd.errors import OverloadedError
from epd.serve_app.fair_threads import FairThreads
from epd.stages.grammar.checker import GrammarChecker
from epd.stages.grammar.formats import AnswerFormat

# Processes at once, and those that one client may have.
_NUM_CHILDREN, _MAX_PER_CLIENT = 2, 1
# Formats that wait or are being checked.
_MAX_WAITING, _MAX_WAITING_PER_CLIENT = 64, 32


class FormatChecks:
    """Checks formats for one event loop. Formats whose verdict is known wait for nothing."""

    def __init__(self) -> None:
        """Starts nothing yet."""
        self._checker = GrammarChecker()
        self._threads = FairThreads("formats", _NUM_CHILDREN, _MAX_PER_CLIENT)
        self._num_waiting: Counter[str] = Counter()

    async def checked(self, wanted: AnswerFormat, client: str) -> str:
        """Returns the grammar of a client's format. Raises RequestError, OverloadedError."""
        if self._checker.knows(wanted):
            return self._checker.grammar_of(wanted)
        self._check_waiting(client)
        self._num_waiting[client] += 1
        try:
            return await self._threads.run(client, partial(self._checker.grammar_of, wanted))
        finally:
            self._num_waiting[client] -= 1
            self._num_waiting += Counter()  # forgets clients without any

    def _check_waiting(self, client: str) -> None:
        for count, allowed, whose in (
            (self._num_waiting[client], _MAX_WAITING_PER_CLIENT, "of this client "),
            (self._num_waiting.total(), _MAX_WAITING, ""),
        ):
            if count >= allowed:
                raise OverloadedError(
                    f"{count} formats {whose}are being checked; allowed: {allowed}; retry later"
                )

    def close(self) -> None:
        """Ends the processes."""
        self._threads.close()
        self._checker.close()
