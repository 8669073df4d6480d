"""Cuts an item into groups, and names contents: groups for the encoder cache, tokens for keys and values.

`epd.encode.sharding` has the policy of the cut. Equal names are shared, so only equal contents may have them.

Batches of groups are encoded together. Units of a video that look like the unit before are skipped if asked
for: their embeddings are known. A tower attends within a unit only, so equal pixels give equal embeddings:
with tolerance 0 nothing is lost.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from epd.encode.encoder_cache import GroupKey, GroupSpec
from epd.encode.sharding import FIRST_GROUP_TOKENS, cut_units, units_of
from epd.encoders.adapter import Adapter, Embeddings, PatchRun, TowerMerger, concatenated
from epd.encoders.device import device_of, to_device, to_host
from epd.encoders.plans import MediaItem, MediaPlan, PromptPlan
from epd.errors import RequestError, UnsupportedModelError
from epd.kv.prefix_cache import DIGEST_BYTES, TokenIdentity, as_one, token_identity
from epd.reduction import TowerMerge, check_tolerance
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
    client: str = "",
) -> list[MediaGroup]:
    """Plans all groups of a request in order, of about `group_tokens` embeddings and at least one unit each.

    The first group of a video has about FIRST_GROUP_TOKENS, if that is less.

    mm_hashes: of each item's bytes.
    model: name and revision of the weights.
    tower_shares: of each item, see `GroupKey`; None for all tokens of each. What is kept later is not in a
        key: requests that keep different shares share encodings.
    cache_salt: with which the hashes are salted.
    client: see `GroupKey`.
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
            key = GroupKey(mm_hash, times_s, tiles, plan.resized, model, share, salt=salt, client=client)
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
    prompt: PromptPlan, mm_hashes: Sequence[str], cache_salt: str = "", lora: str = "", client: str = ""
) -> TokenIdentity:
    """Identifies every token of the prompt.

    mm_hashes: of each item's bytes.
    cache_salt, lora: tokens are shared only with requests of the same salt and the same adapter.
    client: see `TokenIdentity`.

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
    identity = token_identity(prompt.token_ids.tolist(), units, salt, client)
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


def static_units(run: PatchRun, tolerance: float) -> Tensor:
    """Maps each unit to the number, among those to encode, of the unit it looks like: int64 [units].

    A unit is compared with the last one that is encoded, so that slow changes add up; it looks like it if no
    preprocessed value differs by more than `tolerance`. All tiles of an image and clips of sound are.
    """
    if run.kind != "video":
        return torch.arange(run.grid.t)
    units = _by_unit(run.values, run.grid.t)
    changes = list(_changes(units, tolerance))
    owners = torch.zeros(len(units), dtype=torch.int64)
    if changes:
        owners[1:] = to_host(torch.stack(changes)).cumsum(0)
    return owners


def _changes(units: Tensor, tolerance: float) -> Iterator[Tensor]:
    """Reports of each of units [U, ...] but the first whether it is to be encoded: bool [], on the device."""
    last, is_host = units[0], units.device.type == "cpu"
    for unit in units[1:]:
        is_new = ~((unit - last).abs().max() <= tolerance)
        yield is_new
        # On a device, a branch would wait for it.
        last = (unit if is_new else last) if is_host else torch.where(is_new, unit, last)


def encode_moving(
    encode_batch: Callable[[Sequence[PatchRun]], list[Embeddings]],
    runs: Sequence[PatchRun],
    tolerance: float | None,
) -> tuple[list[Embeddings], int]:
    """Encodes some runs, of which only units that change are encoded; returns also how many are not.

    encode_batch: called once. tolerance: see `static_units`; None to encode all units. Each run is looked at
    by itself, so what comes of it does not depend on the others.
    """
    if tolerance is None:
        return encode_batch(runs), 0
    owners = [static_units(run, tolerance) for run in runs]
    encoded = encode_batch([_moving(run, each) for run, each in zip(runs, owners, strict=True)])
    repeated = [_repeated(rows, each) for rows, each in zip(encoded, owners, strict=True)]
    return repeated, sum(len(each) - _num_encoded(each) for each in owners)


def _num_encoded(owners: Tensor) -> int:
    return int(owners[-1]) + 1


def _moving(run: PatchRun, owners: Tensor) -> PatchRun:
    """Returns the units to encode: the first of each owner's."""
    num_encoded = _num_encoded(owners)
    if num_encoded == len(owners):
        return run
    firsts = to_device(torch.searchsorted(owners, torch.arange(num_encoded)), run.values.device)
    values = _by_unit(run.values, len(owners))[firsts].flatten(0, 1)
    return replace(run, values=values, grid=run.grid.cut(num_encoded))


def _repeated(encoded: Embeddings, owners: Tensor) -> Embeddings:
    """Returns the embeddings of all units, from those that were encoded."""
    num_encoded = _num_encoded(owners)
    if num_encoded == len(owners):
        return encoded
    there = to_device(owners, encoded.rows.device)
    return encoded.mapped(lambda rows: _by_unit(rows, num_encoded)[there].flatten(0, 1))


def _by_unit(rows: Tensor, num_units: int) -> Tensor:
    """Reshapes [rows, ...] to [units, rows of each, ...]."""
    return rows.reshape(num_units, -1, *rows.shape[1:])


class FrameEncoder:
    """Encodes frames with a family's tower, for every stage that encodes.

    num_skipped: units so far that were not encoded.
    skip_static: the tolerance within which a unit of a video looks like the one before it, and is not
    encoded; None to encode all. See `epd.encoders.groups`.
    merge: how many tokens later layers of the tower compute; None for as many as requests ask for.
    max_patches: in one call of the tower; None for any number. See `unit_pieces`.
    captured: called in the tower's place where nothing is merged; see `CapturedTower`.
    """

    def __init__(
        self,
        family: Adapter,
        tower: nn.Module,
        skip_static: float | None = None,
        merge: TowerMerge | None = None,
        max_patches: int | None = None,
        captured: nn.Module | None = None,
    ) -> None:
        """Raises RequestError for an invalid tolerance, and what `Adapter.tower_merger` raises."""
        check_tolerance(skip_static)
        self.num_skipped = 0
        self.family = family
        self._device = device_of(tower)
        self._tower = tower
        self._merge = merge
        self._merger = None if merge is None or merge.share == 1 else family.tower_merger(tower, merge)
        self._skip_static = skip_static
        self.max_patches = max_patches
        self._captured = captured

    @property
    def is_by_unit(self) -> bool:
        """Returns whether a video's units are encoded as they are, whatever others are beside them."""
        return not self._skip_static and self._merger is None

    def patches(self, frames: Tensor, plan: MediaPlan) -> PatchRun:
        """Prepares frames, uint8 [N, h, w, 3] on the host, for the tower. plan: of their units alone."""
        return PatchRun(plan.kind, self.family.preprocess(frames, plan, self._device), plan.grid)

    def encode(self, runs: Sequence[PatchRun], tower_share: float | None = None) -> list[Embeddings]:
        """Encodes several runs of equal grid height and width: in one call of the tower, if it takes so many.

        Else each run by itself, in pieces of whole units, so that what the tower holds stays bounded.
        tower_share: of tokens, that later layers are asked to compute; None for all. A tower that cannot
        merge, or has a share of its own, leaves it.
        """
        encode_batch = partial(self._encode_batch, self._merger_of(tower_share))
        embeddings, num_skipped = encode_moving(encode_batch, runs, self._skip_static)
        self.num_skipped += num_skipped
        return embeddings

    def _merger_of(self, tower_share: float | None) -> TowerMerger | None:
        if self._merge is not None or tower_share is None:
            return self._merger
        try:
            return self.family.tower_merger(self._tower, TowerMerge(tower_share))
        except (UnsupportedModelError, RequestError):  # a family that cannot, or a tower of one layer
            return None

    def _encode_batch(self, merger: TowerMerger | None, runs: Sequence[PatchRun]) -> list[Embeddings]:
        if self.max_patches is None or sum(run.grid.num_patches for run in runs) <= self.max_patches:
            return self._call(merger, runs)
        pieces = [unit_pieces(run, self.max_patches) for run in runs]
        return [concatenated([self._call(merger, [piece])[0] for piece in each]) for each in pieces]

    def _call(self, merger: TowerMerger | None, runs: Sequence[PatchRun]) -> list[Embeddings]:
        if merger is None:
            return self.family.encode_batch(self._captured or self._tower, runs)
        with merger.during(runs):
            return self.family.encode_batch(self._tower, runs)


def unit_pieces(run: PatchRun, max_patches: int) -> list[PatchRun]:
    """Cuts a run into pieces of whole units with at most this number of patches, or of one unit.

    13 tiles of 1,024 patches, 4,096 at most     [0, 4) [4, 8) [8, 12) [12, 13)
    """
    num_units, of_unit = run.grid.t, run.grid.cut(1).num_patches
    step, rows = max(1, max_patches // of_unit), len(run.values) // num_units
    return [
        replace(
            run,
            values=run.values[start * rows : (start + step) * rows],
            grid=run.grid.cut(min(step, num_units - start)),
        )
        for start in range(0, num_units, step)
    ]
