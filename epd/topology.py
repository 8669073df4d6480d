"""Describes topologies: how many workers there are, and the roles of each.

2e1p1d   two workers encode, one prefills, one decodes
1ep1d    one encodes and prefills, one decodes
1epd     one does everything, the colocated baseline
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from epd.errors import RequestError

# Roles of a worker. One with both `prefill` and `decode` answers a request to its end by itself.
Stage = Literal["video", "encode", "prefill", "decode"]
ROLE_LETTERS: Mapping[Stage, str] = {"video": "v", "encode": "e", "prefill": "p", "decode": "d"}
MAX_WORKERS = 256
# Roles that a topology names, in order. Those that decode video are not counted in it.
STAGES: tuple[Stage, ...] = ("encode", "prefill", "decode")
_PART = re.compile(r"([0-9]+)([epd]+)")
_EXAMPLES = "such as '2e1p1d', '1ep1d', '1e1pd' or '1epd'"


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Describes one worker of a topology. name: its roles' letters and a number, such as `ep0`."""

    name: str
    roles: frozenset[Stage]


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """Groups workers of the same roles, at least one of each."""

    num_workers: int
    roles: frozenset[Stage]

    def __post_init__(self) -> None:
        if self.num_workers < 1 or not self.roles:
            raise ValueError(f"a group needs workers and roles, got {self.num_workers} of {set(self.roles)}")

    @property
    def letters(self) -> str:
        return role_letters(self.roles)

    def __str__(self) -> str:
        return f"{self.num_workers}{self.letters}"


@dataclass(frozen=True, slots=True)
class Topology:
    """Lists groups of workers that together do every role; as text, the input of `parse_topology`."""

    groups: tuple[WorkerGroup, ...]

    @property
    def num_workers(self) -> int:
        return sum(group.num_workers for group in self.groups)

    def workers(self) -> Iterator[WorkerSpec]:
        """Yields every worker, in order, with its name."""
        numbers: Counter[str] = Counter()
        for group in self.groups:
            for _ in range(group.num_workers):
                yield WorkerSpec(f"{group.letters}{numbers[group.letters]}", group.roles)
                numbers[group.letters] += 1

    def __str__(self) -> str:
        return "".join(map(str, self.groups))


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """Says how many processes, its ranks, share the language model of a worker.

    size: of each worker that has one. decode_size: of workers that only decode, None for size.
    """

    size: int = 1
    decode_size: int | None = None

    @property
    def is_uniform(self) -> bool:
        """Reports whether a worker has the same ranks for every role."""
        return self.decode_size in (None, self.size)

    @property
    def max_size(self) -> int:
        """Returns the most ranks of any worker."""
        return max(self.size, self.decode_size or 1)

    def num_ranks(self, roles: Collection[Stage]) -> int:
        """Returns the ranks of a worker of these roles; one without a language model has one."""
        if set(roles) == {"decode"}:
            return self.decode_size or self.size
        return self.size if {"prefill", "decode"} & set(roles) else 1


def role_letters(roles: Collection[Stage]) -> str:
    """Returns roles as the letters of a topology: "epd"."""
    return "".join(letter for stage, letter in ROLE_LETTERS.items() if stage in roles)


def stages_of(roles: frozenset[Stage]) -> frozenset[Stage]:
    """Returns the stages that a worker of these roles runs: prefill decodes too if they are merged."""
    return roles - {"decode"} if "prefill" in roles else roles


def closed_roles(before: frozenset[Stage], after: frozenset[Stage]) -> frozenset[Stage]:
    """Returns the roles that a change of roles gives up, or gives to another stage of the worker."""
    left = stages_of(before) - stages_of(after)
    return frozenset(role for role in before if role not in after or _stage_for(role, before) in left)


def _stage_for(role: Stage, roles: frozenset[Stage]) -> Stage:
    return "prefill" if role == "decode" and "prefill" in roles else role


def topology_name(workers: Collection[Collection[Stage]]) -> str:
    """Returns how many workers there are of which roles, video decoders left out: "2e1p1d"."""
    letters = [role_letters(roles) for roles in workers if "video" not in roles]
    order = sorted(set(letters), key=lambda each: ("epd".find(each[:1]), each))
    return "".join(f"{letters.count(each)}{each}" for each in order)


def parse_topology(text: str, max_workers: int = MAX_WORKERS) -> Topology:
    """Returns the topology that a text such as `2e1p1d` means. Raises RequestError for other texts."""
    parts = _PART.findall(text)
    if not parts or "".join(number + letters for number, letters in parts) != text:
        raise RequestError(
            f"received the topology {text[:100]!r}; allowed are numbers of workers, each before its roles "
            f"e, p, d; write one {_EXAMPLES}"
        )
    topology = topology_part(text)
    missing = set(STAGES).difference(*(group.roles for group in topology.groups))
    if missing:
        names = " or ".join(sorted(missing))
        raise RequestError(
            f"received the topology {text[:100]!r}, where no worker does {names}; every role needs a "
            f"worker; write one {_EXAMPLES}"
        )
    if topology.num_workers > max_workers:
        raise RequestError(
            f"received the topology {text[:100]!r} with {topology.num_workers} workers; allowed are "
            f"{max_workers}; ask for fewer"
        )
    return topology


def topology_part(text: str) -> Topology:
    """Returns the workers that a part of a topology names, such as `4e`. Others have the other roles."""
    return Topology(tuple(_group(number, letters, text) for number, letters in _PART.findall(text)))


def _group(number: str, letters: str, text: str) -> WorkerGroup:
    roles = frozenset(stage for stage in STAGES if stage[0] in letters)
    if len(roles) != len(letters) or len(number) > 9 or int(number) == 0:
        raise RequestError(
            f"received {number + letters!r} in the topology {text[:100]!r}; allowed is at least one worker "
            f"with each role once; write one {_EXAMPLES}"
        )
    return WorkerGroup(int(number), roles)
