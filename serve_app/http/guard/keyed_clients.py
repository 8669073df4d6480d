"""Knows the clients of a file of keys: who has a key, and what is left of their minute.

A full minute's use is allowed at once, and comes back steadily. Tokens are known when an answer ends, so that
a client may owe some: it is asked to wait until it owes none.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic

from epd.errors import InvalidApiKeyError, RateLimitExceededError
from epd.serve_app.clients import Client, KeysFile, owner_named

_MINUTE_S = 60.0
_TELL_AFTER_S = 0.2


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

    def spend(self, num_tokens: int, now_s: float, num_requests: int = 0) -> None:
        """Counts the tokens of answers that have ended, and requests that were admitted elsewhere."""
        self._refill(now_s)
        for unit, number in (("tokens", num_tokens), ("requests", num_requests)):
            if (allowance := self._allowances.get(unit)) is not None:
                allowance.left -= number

    def headers(self, now_s: float) -> Mapping[str, str]:
        """Returns what is left, as OpenAI says it."""
        self._refill(now_s)
        return dict(pair for each in self._allowances.values() for pair in each.headers())

    def _refill(self, now_s: float) -> None:
        for each in self._allowances.values():
            each.refill(now_s)


@dataclass(frozen=True, slots=True)
class Spent:
    """What clients have used at one front since it last said so: requests and tokens, by name."""

    amounts: Mapping[str, tuple[int, int]]


class KeyedClients:
    """Finds clients by their keys. Quotas are by name.

    tell_others: tells other fronts what was used here, so that quotas are of all together; None without any
    """

    def __init__(self, path: Path) -> None:
        """Raises RequestError for a file that cannot be read."""
        self.tell_others: Callable[[Spent], None] | None = None
        self._file = KeysFile(path)
        self._quotas: dict[str, Quota] = {}
        self._untold: dict[str, tuple[int, int]] = {}

    def found(self, key: bytes | None) -> Client:
        """Returns whoever has the key. Raises InvalidApiKeyError."""
        known = None if key is None else self._file.find(key)
        if known is None:
            received = "You didn't provide an API key" if key is None else "Incorrect API key provided"
            raise InvalidApiKeyError(
                f"{received}; allowed: a key of this server that has not expired; set the header "
                "'Authorization: Bearer KEY'"
            )
        owner = owner_named(known.name)
        return Client(owner, owner, owner, known.rights, known.name, known.priority, known.weight)

    def named(self, client: Client) -> Client:
        """Returns the owner of a batch with its name and weight, if the file still has it."""
        keys = self._file.names().values()
        known = next((key for key in keys if owner_named(key.name) == client.owner), None)
        return client if known is None else replace(client, name=known.name, weight=known.weight)

    def admit(self, client: Client) -> None:
        """Takes a request of a client. Raises RateLimitExceededError."""
        self._quota(client.name).admit(monotonic())
        self._note(client.name, 1, 0)

    def spend(self, name: str, num_tokens: int) -> None:
        """Counts the tokens of an answer to a client."""
        self._quota(name).spend(num_tokens, monotonic())
        self._note(name, 0, num_tokens)

    def _note(self, name: str, num_requests: int, num_tokens: int) -> None:
        """Lets other fronts know soon what a client with limits has used here."""
        if self.tell_others is None or not any(self.limits(name).values()):
            return
        if not self._untold:
            asyncio.get_running_loop().call_later(_TELL_AFTER_S, self._tell)
        requests, tokens = self._untold.get(name, (0, 0))
        self._untold[name] = requests + num_requests, tokens + num_tokens

    def _tell(self) -> None:
        amounts, self._untold = self._untold, {}
        if self.tell_others is not None:
            self.tell_others(Spent(amounts))

    async def spent_elsewhere(self, spent: Spent) -> None:
        """Counts what clients have used at another front."""
        for name, (num_requests, num_tokens) in spent.amounts.items():
            self._quota(name).spend(num_tokens, monotonic(), num_requests)

    def headers(self, name: str) -> Mapping[str, str]:
        """Returns what a client has left, as headers of its answers."""
        return self._quota(name).headers(monotonic())

    def limits(self, name: str) -> Mapping[str, int | None]:
        return self._quota(name).limits

    def _quota(self, name: str) -> Quota:
        """Returns a client's quota, a new one if its limits have changed."""
        key = self._file.names().get(name)
        wanted = (None, None) if key is None else (key.requests_per_minute, key.tokens_per_minute)
        quota = self._quotas.get(name)
        if quota is None or tuple(quota.limits.values()) != wanted:
            quota = self._quotas[name] = Quota(*wanted, monotonic())
        return quota
