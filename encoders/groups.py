"""Cuts an item into groups, and names contents: groups for the encoder cache, tokens for keys and values.

`epd.encode.sharding` has the policy of the cut. Equal names are shared, so only equal contents may have them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from epd.encode.encoder_cache import GroupKey, GroupSpec
from epd.encode.sharding import FIRST_GROUP_TOKENS, cut_units, units_of
from epd.encoders.plans import MediaItem, MediaPlan, PromptPlan
from epd.kv.prefix_cache import DIGEST_BYTES, TokenIdentity, as_one, token_identity
from epd.types import PlaceholderRange


@dataclass(frozen=True, slots=True)
class MediaGroup:
    """Describes one group of a request's media.

    item: number of the item among the request's media.
    index: number of the group among those of its item.
    start: the first of its units among those of the item.
    plan: of these units alone, with the times of their frames.
    spec: the group as the encoder cache sees it.
    """

    item: int
    index: int
    start: int
    plan: MediaPlan
    spec: GroupSpec

    @property
    def stop(self) -> int:
        return self.start + self.plan.num_units

    @property
    def num_frames(self) -> int:
        """Counts the frames of the source; all tiles of an image count as one, in its first group."""
        return self.plan.num_frames if self.plan.kind == "video" or self.index == 0 else 0


def plan_groups(
    plans: Sequence[MediaPlan],
    mm_hashes: Sequence[str],
    *,
    model: str,
    group_tokens: int,
    tower_shares: Sequence[float | None] | None = None,
    cache_salt: str = "",
) -> list[MediaGroup]:
    """Plans all groups of a request in order, of about `group_tokens` embeddings and at least one unit each.

    The first group of a video has about FIRST_GROUP_TOKENS, if that is less.

    mm_hashes: of each item's bytes.
    model: name and revision of the weights.
    tower_shares: of each item, see `GroupKey`; None for all tokens of each. What is kept later is not in a
        key: requests that keep different shares share encodings.
    cache_salt: with which the hashes are salted.
    """
    groups, salt = [], salted("", cache_salt)
    shares = [None] * len(plans) if tower_shares is None else tower_shares
    for item, (plan, mm_hash, share) in enumerate(zip(plans, mm_hashes, shares, strict=True)):
        group_units, first_units = (
            units_of(tokens, plan.tokens_per_unit) for tokens in (group_tokens, FIRST_GROUP_TOKENS)
        )
        cuts = cut(plan, group_units, first_units)
        for index, (start, stop) in enumerate(cuts):
            part = plan.part(start, stop)
            tiles = (0, 0) if plan.kind == "video" else (start, stop)
            times_s = part.times_s + part.drawn_times_s
            key = GroupKey(mm_hash, times_s, tiles, plan.resized, model, share, salt=salt)
            spec = GroupSpec(key, part.num_units * plan.tokens_per_unit, part.grid.num_patches)
            groups.append(MediaGroup(item, index, start, part, spec))
    return groups


def cut(plan: MediaPlan, group_units: int, first_units: int | None = None) -> list[tuple[int, int]]:
    """Cuts units into half-open runs, without gaps, of at most about `group_units` and at least one.

    first_units: of the first run of a video, at most; None for `group_units`. An image is prefilled whole,
        so nothing waits for its first run.
    """
    first = group_units if first_units is None or plan.kind != "video" else first_units
    return cut_units(plan.num_units, group_units, first, _lattice_index(plan))


def _lattice_index(plan: MediaPlan) -> int:
    """Returns the index of the first unit, counted from the start of the whole source.

    Processors take the first or the middle frame of each span, give or take a rounding: a quarter of a span
    on top brings both to the same whole number.
    """
    return int(plan.times_s[0] / plan.unit_span_s + 0.25) if plan.kind == "video" else 0


def salted(mm_hash: str, cache_salt: str) -> str:
    """Returns a name of media private to requests of one salt; the same name without a salt."""
    if not cache_salt:
        return mm_hash
    return hashlib.blake2b(
        mm_hash.encode(), key=_salt_digest(cache_salt), digest_size=DIGEST_BYTES
    ).hexdigest()


def _salt_digest(cache_salt: str, lora: str = "") -> bytes:
    key = hashlib.blake2b(lora.encode()).digest() if lora else b""
    return hashlib.blake2b(cache_salt.encode(), digest_size=DIGEST_BYTES, key=key).digest()


def prompt_identity(
    prompt: PromptPlan, mm_hashes: Sequence[str], cache_salt: str = "", lora: str = ""
) -> TokenIdentity:
    """Identifies every token of the prompt.

    mm_hashes: of each item's bytes.
    cache_salt, lora: tokens are shared only with requests of the same salt and the same adapter.

    A unit of a video is known by its own frames, so a longer look at the same video begins with equal tokens,
    but where tokens of media attend each other across the prompt.
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
    salt = _salt_digest(cache_salt, lora) if cache_salt or lora else b""
    identity = token_identity(prompt.token_ids.tolist(), units, salt)
    return as_one(identity, prompt.both_ways_range) if prompt.both_ways_range else identity


def _units(item: MediaItem, mm_hash: str, reduction: str) -> Iterator[tuple[PlaceholderRange, bytes]]:
    plan = item.plan
    facts = (mm_hash, plan.kind, plan.resized, plan.grid.h, plan.grid.w, plan.unit_span_s)
    is_one_window = len(item.windows) == 1  # what is kept of it may be something else then
    for index, place in enumerate(item.units):
        windows = item.windows[index : index + 1]
        run = index if plan.is_joined_whole else index % plan.grid.num_tiles
        shown = (_shown(plan, *item.unit_run(index)), reduction, windows, is_one_window, run)
        digest = hashlib.blake2b(repr((facts, shown)).encode(), digest_size=DIGEST_BYTES).digest()
        yield place, digest


def _shown(plan: MediaPlan, start: int, stop: int) -> tuple[float | bytes, ...]:
    """Identifies what units [start, stop) show of their source: frames by time, tiles by number."""
    if plan.kind == "image":
        return tuple(range(start, stop))
    return plan.times_of(start, stop) + plan.part(start, stop).drawn_times_s + plan.kept[start:stop]
