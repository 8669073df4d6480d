"""Defines the space of plans: topologies of a number of devices, merged roles included, and their settings.

3 devices    1e1p1d   2ep1d 1ep2d   1e2pd 2e1pd   2ed1p 1ed2p   3epd
mixes        every choice of kinds of workers that does all stages: 1ed2ep, 1e1ep1d, 1ep1epd1d, ...
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import product

from epd.encode.sharding import Sharding
from epd.errors import RequestError
from epd.kv.pass_limits import SchedulerConfig
from epd.profiles.media import MediaWork
from epd.simulate.deployment import Deployment
from epd.simulate.requests import GroupWork, Job
from epd.topology import MAX_WORKERS, Stage, Topology, WorkerGroup, parse_topology
from epd.types import ceil_div

# Devices that are laid out together: those of one machine. More are several such cells.
MAX_CELL = 8
# Kinds of workers, in the order of `topology_name`.
_KINDS = ("e", "ed", "ep", "epd", "p", "pd", "d")
_APART = ("e", "p", "d")
_MERGED = (("ep", "d"), ("e", "pd"), ("ed", "p"))
# (letters of a kind of workers, devices of each of them); kinds that are not listed have one.
Degrees = tuple[tuple[str, int], ...]


def splits_of(num_devices: int, degrees: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yields numbers of workers, at least one of each, that use all devices. degrees: devices of a worker."""
    first, *rest = degrees
    if not rest:
        if num_devices >= first and num_devices % first == 0:
            yield (num_devices // first,)
        return
    for count in range(1, (num_devices - sum(rest)) // first + 1):
        for others in splits_of(num_devices - count * first, rest):
            yield (count, *others)


def cells_of(num_devices: int) -> tuple[tuple[int, int], ...]:
    """Returns (cells, devices in each), the larger cells first: as few as possible, and all devices in one.

    Raises RequestError for fewer than one or more than `MAX_WORKERS` devices.
    """
    if not 1 <= num_devices <= MAX_WORKERS:
        raise RequestError(
            f"number of devices is {num_devices}, it must be 1 to {MAX_WORKERS}; plan a part of them"
        )
    num_cells = ceil_div(num_devices, MAX_CELL)
    size, num_larger = divmod(num_devices, num_cells)
    cells = ((num_larger, size + 1), (num_cells - num_larger, size))
    return tuple((count, each) for count, each in cells if count)


def times(topology: Topology, num_cells: int) -> Topology:
    """Multiplies a topology."""
    return Topology(tuple(WorkerGroup(num_cells * g.num_workers, g.roles) for g in topology.groups))


def together(topologies: Iterable[Topology]) -> Topology:
    """Adds topologies: workers of equal roles become one group."""
    counts: Counter[frozenset[Stage]] = Counter()
    for topology in topologies:
        for group in topology.groups:
            counts[group.roles] += group.num_workers
    return Topology(tuple(WorkerGroup(count, roles) for roles, count in counts.items()))


def _topology(sizes: tuple[int, ...], letters: tuple[str, ...]) -> Topology:
    return parse_topology("".join(f"{size}{part}" for size, part in zip(sizes, letters, strict=True)))


def neighbours(topology: Topology, degrees: Degrees = ()) -> Iterator[tuple[Topology, Degrees]]:
    """Yields the layouts in which one worker has other roles, with its devices, and each stage a worker.

    A kind of workers that is there already must have as many devices each.
    """
    counts = Counter({group.letters: group.num_workers for group in topology.groups})
    sizes = {letters: dict(degrees).get(letters, 1) for letters in counts}
    for old, new in product(counts, _KINDS):
        changed = counts - Counter([old]) + Counter([new])
        if new == old or not _does_all(changed) or sizes.get(new, sizes[old]) != sizes[old]:
            continue
        found = sizes | {new: sizes[old]}
        yield (
            _counted(changed),
            tuple((kind, found[kind]) for kind in _KINDS if changed[kind] and found[kind] > 1),
        )


def _does_all(letters: Iterable[str]) -> bool:
    return set(_APART) <= set("".join(letters))


def _counted(counts: Counter[str]) -> Topology:
    kinds = tuple(kind for kind in _KINDS if counts[kind])
    return _topology(tuple(counts[kind] for kind in kinds), kinds)


def resized(topology: Topology, letters: str, num_workers: int) -> Topology:
    """Returns the same layout with another number of workers of one kind."""
    groups = tuple(
        WorkerGroup(num_workers, group.roles) if group.letters == letters else group
        for group in topology.groups
    )
    return Topology(groups)


def _encodes_locally(topology: Topology) -> bool:
    return all("encode" in group.roles for group in topology.groups if "prefill" in group.roles)


def is_colocated(topology: Topology) -> bool:
    return all(group.letters == "epd" for group in topology.groups)


@dataclass(frozen=True, slots=True)
class Settings:
    """Chooses everything but the topology.

    retention: share of the visual tokens that is kept
    degrees: see `Deployment`
    """

    encode_patches: int
    language_seqs: int
    decode_seqs: int
    chunk_tokens: int
    sharding: Sharding
    retention: float = 1.0
    degrees: Degrees = ()

    def num_different(self, other: Settings) -> int:
        """Returns how many settings differ, degrees left out."""
        both = zip(astuple(self)[:-1], astuple(other)[:-1], strict=True)
        return sum(mine != its for mine, its in both)

    def degree(self, letters: str) -> int:
        """Returns the devices of a worker with these roles."""
        return dict(self.degrees).get(letters, 1)

    def deployment(self, topology: Topology, base: Deployment) -> Deployment:
        batched = max(self.chunk_tokens, base.language.max_num_batched_tokens, self.decode_seqs)
        return replace(
            base,
            topology=topology,
            language=SchedulerConfig(batched, self.language_seqs, self.chunk_tokens),
            decode=SchedulerConfig(batched, self.decode_seqs, self.chunk_tokens),
            max_batch_patches=self.encode_patches,
            sharding=self.sharding,
            degrees=self.degrees,
        )

    def __str__(self) -> str:
        kept = "" if self.retention == 1 else f", {self.retention:.0%} of visual tokens"
        shared = "".join(f", {each} workers on {n} devices each" for each, n in self.degrees if n > 1)
        return (
            f"encode batches of {self.encode_patches} patches, {self.language_seqs} requests in prefill, "
            f"{self.decode_seqs} in decode, chunks of {self.chunk_tokens}, sharding {self.sharding}"
            f"{kept}{shared}"
        )


@dataclass(frozen=True, slots=True)
class Space:
    """Lists values to choose from. Where all that prefill encode, `local` encodes at the prefill worker.

    has_merged_roles: with plain layouts of merged roles, and mixes; otherwise every stage is on workers of
        its own.
    fixed: the only settings, for layouts that can have them
    degrees: devices that a worker may share its layers over
    num_encoders: workers on devices of another kind, which encode for all others; 0 for none
    """

    num_devices: int
    encode_patches: tuple[int, ...] = (4096, 32768)
    language_seqs: tuple[int, ...] = (16, 64)
    decode_seqs: tuple[int, ...] = (128,)
    chunk_tokens: tuple[int, ...] = (2048, 8192)
    shardings: tuple[Sharding, ...] = ("groups", "request")
    retentions: tuple[float, ...] = (1.0,)
    has_merged_roles: bool = True
    fixed: Settings | None = None
    degrees: tuple[int, ...] = (1,)
    num_encoders: int = 0

    def topologies(self) -> list[Topology]:
        return list({str(topology): topology for topology, _ in self.layouts()}.values())

    def layouts(self) -> Iterator[tuple[Topology, Degrees]]:
        """Yields the plain topologies with the devices of each kind of worker; none of them is a mix."""
        if self.num_encoders:
            for others in (("pd",), ("p", "d")):
                for sizes in splits_of(self.num_devices, [1] * len(others)):
                    yield _topology((self.num_encoders, *sizes), ("e", *others)), ()
            return
        for letters in (_APART, *_MERGED, ("epd",)) if self.has_merged_roles else (_APART,):
            choices = product(self.degrees, repeat=len(letters))
            for chosen in choices if self.fixed is None else [tuple(map(self.fixed.degree, letters))]:
                degrees = tuple(pair for pair in zip(letters, chosen, strict=True) if pair[1] > 1)
                for sizes in splits_of(self.num_devices, chosen):
                    yield _topology(sizes, letters), degrees

    def steps(self, topology: Topology, settings: Settings) -> Iterator[tuple[Topology, Settings]]:
        """Yields what is one step away: one other setting, or a worker with other roles.

        A layout that cannot have the settings has those that differ the least.
        """
        for each in self.settings(topology, settings.degrees):
            if each.num_different(settings) == 1:
                yield topology, each
        if self.has_merged_roles and not self.num_encoders:
            for other, degrees in neighbours(topology, settings.degrees):
                allowed = self.settings(other, degrees)
                nearest = min(allowed, key=settings.num_different, default=None)
                if nearest is not None:
                    yield other, nearest

    def settings(self, topology: Topology, degrees: Degrees = ()) -> Iterator[Settings]:
        if self.fixed is not None:
            is_possible = self.fixed.sharding != "local" or _encodes_locally(topology)
            return iter([replace(self.fixed, degrees=degrees)] if is_possible else [])
        shardings = self.shardings
        if _encodes_locally(topology):
            shardings = (*shardings, "local")
        elif sum(group.num_workers for group in topology.groups if "encode" in group.roles) == 1:
            shardings = shardings[:1]  # one encoder gets all of it either way
        has_decoders = any("decode" in g.roles and "prefill" not in g.roles for g in topology.groups)
        choices = product(
            self.encode_patches,
            self.language_seqs,
            self.decode_seqs if has_decoders else self.decode_seqs[:1],
            self.chunk_tokens,
            shardings,
            self.retentions,
        )
        return (Settings(*choice, degrees) for choice in choices)

    def __contains__(self, name: str) -> bool:
        """Returns whether a topology, such as 6e1p1d, is one of the plain layouts."""
        return name in map(str, self.topologies())


def reduced(jobs: tuple[Job, ...], retention: float) -> tuple[Job, ...]:
    """Returns the same requests with a share of their visual tokens; the tower still sees every patch."""
    if retention == 1:
        return jobs
    return tuple(
        replace(job, groups=tuple(_reduced_group(group, retention) for group in job.groups)) for job in jobs
    )


def _reduced_group(group: GroupWork, retention: float) -> GroupWork:
    media = group.media
    kept = max(1, round(media.num_tokens * retention))
    return GroupWork(MediaWork(media.num_patches, kept, media.num_frames), group.decode_ticks)
