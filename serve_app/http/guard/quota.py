"""Limits what a client may use in a minute: a full minute's at once, which comes back steadily.

Tokens are known when an answer ends, so that a client may owe some: it is asked to wait until it owes none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from epd.errors import RateLimitExceededError

_MINUTE_S = 60.0


@dataclass(slots=True)
class Allowance:
    """A number of something a minute. left: now, at `at_s`; below 0 it is owed."""

    unit: str
    per_minute: int
    left: float
    at_s: float

    def refill(self, now_s: float) -> None:
        more = (now_s - self.at_s) * self.per_minute / _MINUTE_S
        self.left, self.at_s = min(float(self.per_minute), self.left + more), now_s

    def seconds_until(self, amount: float) -> float:
        return max(0.0, amount - self.left) * _MINUTE_S / self.per_minute

    def headers(self) -> Iterator[tuple[str, str]]:
        yield f"x-ratelimit-limit-{self.unit}", str(self.per_minute)
        yield f"x-ratelimit-remaining-{self.unit}", str(max(0, math.floor(self.left)))
        yield f"x-ratelimit-reset-{self.unit}", f"{math.ceil(self.seconds_until(self.per_minute))}s"


class Quota:
    """The allowances of one client. now_s: of any steady clock."""

    def __init__(self, requests_per_minute: int | None, tokens_per_minute: int | None, now_s: float) -> None:
        """None for no limit."""
        of = {"requests": requests_per_minute, "tokens": tokens_per_minute}
        self.limits = {f"{unit}_per_minute": number for unit, number in of.items()}
        self._allowances = {
            unit: Allowance(unit, number, float(number), now_s)
            for unit, number in of.items()
            if number is not None
        }

    def admit(self, now_s: float) -> None:
        """Takes a request. Raises RateLimitExceededError where there is none left, or no token."""
        self._refill(now_s)
        for each in self._allowances.values():
            if each.left < 1:
                raise RateLimitExceededError(
                    f"Rate limit reached: received more {each.unit} in a minute than allowed; allowed: "
                    f"{each.per_minute}; retry after the seconds of the header Retry-After",
                    each.seconds_until(1.0),
                )
        if (requests := self._allowances.get("requests")) is not None:
            requests.left -= 1

    def spend(self, num_tokens: int, now_s: float) -> None:
        """Counts the tokens of an answer that has ended."""
        self._refill(now_s)
        if (tokens := self._allowances.get("tokens")) is not None:
            tokens.left -= num_tokens

    def headers(self, now_s: float) -> Mapping[str, str]:
        """Returns what is left, as OpenAI says it."""
        self._refill(now_s)
        return dict(pair for each in self._allowances.values() for pair in each.headers())

    def _refill(self, now_s: float) -> None:
        for each in self._allowances.values():
            each.refill(now_s)
