"""Knows the clients of a file of keys: who has a key, and what is left of their minute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from time import monotonic

from epd.errors import InvalidApiKeyError
from epd.serve_app.api_keys import KeysFile
from epd.serve_app.clients import Client, owner_named
from epd.serve_app.http.guard.quota import Quota


class KeyedClients:
    """Finds clients by their keys. Quotas are by name, and a front counts its own answers."""

    def __init__(self, path: Path) -> None:
        """Raises RequestError for a file that cannot be read."""
        self._file = KeysFile(path)
        self._quotas: dict[str, Quota] = {}

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
        return Client(owner, owner, owner, known.rights, known.name, known.priority)

    def named(self, client: Client) -> Client:
        """Returns the owner of a batch with its name, if the file still has it."""
        names = (name for name in self._file.names() if owner_named(name) == client.owner)
        return replace(client, name=next(names, ""))

    def admit(self, client: Client) -> None:
        """Takes a request of a client. Raises RateLimitExceededError."""
        self._quota(client.name).admit(monotonic())

    def spend(self, name: str, num_tokens: int) -> None:
        """Counts the tokens of an answer to a client."""
        self._quota(name).spend(num_tokens, monotonic())

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
