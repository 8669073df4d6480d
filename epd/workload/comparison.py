"""Compares layouts of equal devices under the same traffic: what is asked, what came of it, who wins.

Goodput is the highest rate at which enough requests meet the objectives, on a line between two rates.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Self

from pydantic import BaseModel, ConfigDict, Field

from epd.errors import RequestError
from epd.topology import Topology, parse_topology
from epd.workload.config import WorkloadConfig
from epd.workload.metrics import SLO, ClientRecord

# Rounds whose passes took longer than the device's in more than this share are not reported.
MOST_LATE = 0.05
# Shares of requests that differ by less than this are taken for equal.
LEAST_DIFFERENCE = 0.05
# A layout that attains less than this share of what is wanted is saturated: higher rates are not run.
_SATURATED = 0.5
_COPIES = re.compile(r"(?:([0-9]+)x)?(.+)")
_URLS = re.compile(r"([^=/:+]+)=(https?://\S+)")


@dataclass(frozen=True, slots=True)
class Layout:
    """Describes a layout: `8x1epd` is eight servers of one worker each, `8epd` is one server of eight.

    topology: None for servers that run already, at `urls`
    num_copies: servers, which get the requests by turns
    has_roles: whether workers switch roles as the load changes
    chunk_tokens: of one request in one pass; None for the default
    """

    name: str
    topology: Topology | None = None
    num_copies: int = 1
    has_roles: bool = False
    chunk_tokens: int | None = None
    urls: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises RequestError for anything but `8x1epd`, `2e5p1d+roles`, `8epd+chunk=512`, `NAME=URL,URL`."""
        if (match := _URLS.fullmatch(text)) is not None:
            urls = tuple(match[2].split(","))
            return cls(match[1], num_copies=len(urls), urls=urls)
        head, *options = text.split("+")
        copies = _COPIES.fullmatch(head)
        if copies is None or copies[1] == "0":
            raise RequestError(_refusal(text))
        chunk = None
        for option in options:
            name, _, value = option.partition("=")
            if name == "chunk" and value.isdecimal() and 0 < int(value) <= 1 << 20:
                chunk = int(value)
            elif option != "roles":
                raise RequestError(_refusal(text))
        return cls(text, parse_topology(copies[2]), int(copies[1] or 1), "roles" in options, chunk)

    @property
    def num_devices(self) -> int | None:
        """Returns the workers of all servers; None where that is not known."""
        return None if self.topology is None else self.num_copies * self.topology.num_workers

    @property
    def is_split(self) -> bool:
        """Returns whether some worker lacks a stage. Servers that run already are not known to be split."""
        return self.topology is not None and any(len(each.roles) < 3 for each in self.topology.groups)


def _refusal(text: str) -> str:
    return (
        f"received the layout {text[:100]!r}; allowed: a topology such as 2e5p1d, copies of it such as "
        "8x1epd, +roles or +chunk=512 behind it, or NAME=URL for a server that runs; write one of these"
    )


class Traffic(BaseModel):
    """Holds requests and their objectives. rates: per second of the devices, from low to high."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    workload: WorkloadConfig
    rates: tuple[float, ...] = Field(min_length=1)
    slo: SLO = Field(default_factory=SLO)
    dilate: float = Field(default=1.0, gt=0)

    @property
    def name(self) -> str:
        return self.workload.name

    def at(self, rate: float) -> WorkloadConfig:
        return self.workload.model_copy(update={"rate": rate})


class Question(BaseModel):
    """Holds all that a comparison needs to be run again.

    rounds: of each layout at each rate, each with other content
    attainment: share of the requests that must meet the objectives
    profile: costs of the devices, for the simulator, and of paced devices
    is_paced: whether topologies run here, each worker as if it had a device of the profile
    patches, tokens: of the device's model that one of the small model stands for
    num_devices: of servers that run already
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    layouts: tuple[str, ...] = Field(min_length=1)
    traffic: tuple[Traffic, ...] = Field(min_length=1)
    rounds: int = Field(default=3, ge=1, le=100)
    seed: int = 0
    warmup: int = Field(default=2, ge=0, le=100)
    attainment: float = Field(default=0.9, gt=0, le=1)
    max_in_flight: int = Field(default=512, ge=1)
    timeout_s: float = Field(default=600.0, gt=0)
    ignore_eos: bool = True
    profile: str | None = None
    is_paced: bool = False
    patches: int = Field(default=1, ge=1, le=1024)
    tokens: int = Field(default=1, ge=1, le=1024)
    num_devices: int | None = Field(default=None, ge=1)
    price_per_hour: float | None = Field(default=None, gt=0)

    def parsed(self) -> list[Layout]:
        """Returns the layouts. Raises RequestError for unequal devices, and for names that come twice."""
        found = [Layout.parse(each) for each in self.layouts]
        names = [each.name for each in found]
        if len(set(names)) < len(names) or len({each.name for each in self.traffic}) < len(self.traffic):
            raise RequestError(f"received {', '.join(names)} twice; allowed: each name once; change one")
        sizes = {each.name: each.num_devices for each in found if each.num_devices is not None}
        if len(set(sizes.values())) > 1:
            listed = ", ".join(f"{name} with {num}" for name, num in sizes.items())
            raise RequestError(
                f"received layouts of unequal devices: {listed}; allowed: the same number in each; add or "
                "remove workers"
            )
        if sizes and not self.is_paced:
            raise RequestError(
                f"received {', '.join(sizes)} without paced devices; allowed: --paced PROFILE, or "
                "NAME=URL for servers that you started; use one of the two"
            )
        if self.is_paced and (self.profile is None or len(sizes) < len(found)):
            raise RequestError(
                "received paced devices with a URL or without a profile; allowed: topologies and a profile; "
                "compare servers that run without --paced"
            )
        return found

    @property
    def devices(self) -> int | None:
        sizes = [each.num_devices for each in self.parsed() if each.num_devices is not None]
        return sizes[0] if sizes else self.num_devices


@dataclass(frozen=True, slots=True)
class Outcome:
    """Holds what a client saw of one request, in seconds of the devices. None where there was no answer."""

    kind: str
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    prompt_tokens: int | None = None
    error: str | None = None

    @classmethod
    def of(cls, record: ClientRecord, kind: str, dilate: float) -> Self:
        """dilate: how much slower the client's clock went"""
        ttft_s, tpot_s, e2e_s = (
            None if each is None else round(each / dilate, 6)
            for each in (record.ttft_s, record.tpot_s, record.e2e_s)
        )
        return cls(kind, ttft_s, tpot_s, e2e_s, record.prompt_tokens, record.error)

    def meets(self, slo: SLO) -> bool:
        is_answered = self.error is None and self.ttft_s is not None
        return is_answered and slo.allows(self.ttft_s, self.tpot_s, self.e2e_s)


@dataclass(frozen=True, slots=True)
class Round:
    """Holds one round of one layout at one rate.

    late_share: of passes whose own work took longer than the device's
    is_late: whether the sender fell behind the traffic
    load_average: of the machine in the minute before its end
    """

    traffic: str
    layout: str
    rate: float
    index: int
    outcomes: tuple[Outcome, ...]
    late_share: float = 0.0
    is_late: bool = False
    load_average: float | None = None

    @property
    def key(self) -> tuple[str, str, float, int]:
        return self.traffic, self.layout, self.rate, self.index

    @property
    def counts(self) -> bool:
        """Returns whether it is reported: the devices and the traffic were what they should be."""
        return self.late_share <= MOST_LATE and not self.is_late

    def attained(self, slo: SLO) -> float:
        return fmean(each.meets(slo) for each in self.outcomes)


@dataclass(frozen=True, slots=True)
class Curve:
    """Holds a layout's rounds under one traffic that count, or the simulator's of the same requests."""

    traffic: Traffic
    layout: str
    rounds: tuple[Round, ...]
    attainment: float

    @property
    def rates(self) -> list[float]:
        return sorted({each.rate for each in self.rounds})

    def at(self, rate: float) -> list[Round]:
        return [each for each in self.rounds if each.rate == rate]

    def attained(self, rate: float) -> float:
        return fmean(each.attained(self.traffic.slo) for each in self.at(rate))

    @property
    def by_index(self) -> dict[int, float]:
        """Returns the goodput of each round that has every rate."""
        found = {}
        for index in sorted({each.index for each in self.rounds}):
            own = {each.rate: each for each in self.rounds if each.index == index}
            if sorted(own) == self.rates:
                points = [(rate, own[rate].attained(self.traffic.slo)) for rate in self.rates]
                found[index] = goodput(points, self.attainment)
        return found

    @property
    def goodputs(self) -> list[float]:
        """Returns the goodput of each round that has every rate; by all rounds together if none has."""
        pooled = [(rate, self.attained(rate)) for rate in self.rates]
        return list(self.by_index.values()) or [goodput(pooled, self.attainment)]

    @property
    def goodput(self) -> float | None:
        """Returns the median of the rounds; None without any."""
        return median(self.goodputs) if self.rounds else None

    @property
    def spread(self) -> tuple[float, float]:
        return min(self.goodputs, default=0.0), max(self.goodputs, default=0.0)

    @property
    def keeps_all(self) -> bool:
        """Returns whether even the highest rate is kept: then the goodput is at least that."""
        return (self.goodput or 0.0) >= max(self.traffic.rates)

    @property
    def is_whole(self) -> bool:
        """Returns whether rounds count at every rate, up to the last or to one that saturates."""
        below = [each for each in self.traffic.rates if each <= max(self.rates, default=0.0)]
        return (
            bool(below)
            and sorted(below) == self.rates
            and (len(below) == len(self.traffic.rates) or self.is_saturated)
        )

    @property
    def is_saturated(self) -> bool:
        """Returns whether higher rates would show nothing."""
        return bool(self.rounds) and self.attained(self.rates[-1]) < _SATURATED * self.attainment


def goodput(points: Sequence[tuple[float, float]], attainment: float) -> float:
    """Returns the highest rate at which enough requests meet the objectives.

    points: (rate, share that met them), by rate. Without load, every request is taken to meet them.
    """
    best, last_rate, last = 0.0, 0.0, 1.0
    for rate, share in points:
        if share >= attainment:
            best = rate
        elif last >= attainment:
            best = last_rate + (rate - last_rate) * (last - attainment) / (last - share)
        last_rate, last = rate, share
    return best


@dataclass(frozen=True, slots=True)
class Verdict:
    """Says how a layout does beside the best plain one: its median goodput over theirs.

    word: "wins" or "loses" if all rounds agree, else "equal"
    low, high: the least and the greatest ratio of a round, whose requests both had; `ratio` without such
    """

    layout: str
    plain: str
    ratio: float
    word: str
    low: float
    high: float


def verdicts(curves: Sequence[Curve], layouts: Sequence[Layout]) -> list[Verdict]:
    """Compares every split layout with the best plain one, where no rate is missing."""
    split = {each.name for each in layouts if each.is_split}
    plain = [each for each in curves if each.layout not in split and each.is_whole and each.goodput]
    if not plain:
        return []
    base = max(plain, key=lambda each: each.goodput or 0.0)
    found = []
    for each in curves:
        if each.layout in split and each.is_whole:
            (low, high), (base_low, base_high) = each.spread, base.spread
            word = "wins" if low > base_high else "loses" if high < base_low else "equal"
            ratio = (each.goodput or 0.0) / (base.goodput or 1.0)
            pairs = ((each.by_index.get(index), value) for index, value in base.by_index.items() if value)
            ratios = [ours / theirs for ours, theirs in pairs if ours is not None] or [ratio]
            found.append(Verdict(each.layout, base.layout, ratio, word, min(ratios), max(ratios)))
    return found


def compared_word(difference: float) -> str:
    """Returns whether a share of requests is more than another one."""
    if abs(difference) < LEAST_DIFFERENCE:
        return "equal"
    return "wins" if difference > 0 else "loses"
