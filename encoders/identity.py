"""Identifies the visual tokens of a prompt, so that keys and values are shared between equal ones only."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from epd.encoders.adapter import MediaItem, MediaPlan, PromptPlan
from epd.kv.kv_identity import DIGEST_BYTES, TokenIdentity, token_identity
from epd.types import PlaceholderRange


def salted(mm_hash: str, cache_salt: str) -> str:
    """Returns a name of media private to requests of one salt; the same name without a salt."""
    if not cache_salt:
        return mm_hash
    return hashlib.blake2b(
        mm_hash.encode(), key=_salt_digest(cache_salt), digest_size=DIGEST_BYTES
    ).hexdigest()


def _salt_digest(cache_salt: str) -> bytes:
    return hashlib.blake2b(cache_salt.encode(), digest_size=DIGEST_BYTES).digest()


def prompt_identity(prompt: PromptPlan, mm_hashes: Sequence[str], cache_salt: str = "") -> TokenIdentity:
    """Identifies every token of the prompt.

    mm_hashes: of each item's bytes. cache_salt: tokens are shared only with requests of the same salt.

    A unit of a video is known by its own frames, so a longer look at the same video begins with equal tokens.
    What is kept of a window depends on all that came before it, too: the prefix cache compares that anyway.
    """
    if len(mm_hashes) != len(prompt.media):
        raise ValueError(f"{len(prompt.media)} media need as many hashes, got {len(mm_hashes)}")
    reduction = prompt.reduction_key
    units = [
        unit
        for item, mm_hash in zip(prompt.media, mm_hashes, strict=True)
        for unit in _units(item, mm_hash, reduction)
    ]
    salt = _salt_digest(cache_salt) if cache_salt else b""
    return token_identity(prompt.token_ids.tolist(), units, salt)


def _units(item: MediaItem, mm_hash: str, reduction: str) -> Iterator[tuple[PlaceholderRange, bytes]]:
    plan = item.plan
    facts = (mm_hash, plan.kind, plan.resized, plan.grid.h, plan.grid.w, plan.unit_span_s)
    is_one_window = len(item.windows) == 1  # what is kept of it may be something else then
    for index, place in enumerate(item.units):
        windows = item.windows[index : index + 1]
        shown = (_shown(plan, *item.unit_run(index)), reduction, windows, is_one_window)
        digest = hashlib.blake2b(repr((facts, shown)).encode(), digest_size=DIGEST_BYTES).digest()
        yield place, digest


def _shown(plan: MediaPlan, start: int, stop: int) -> tuple[float, ...]:
    """Identifies what units [start, stop) show of their source: frames by time, tiles by number."""
    if plan.kind == "image":
        return tuple(range(start, stop))
    return plan.times_of(start, stop)
