"""What happens in a simulation, drawn from its seed: questions, and faults that may be left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Literal

FaultKind = Literal[
    "kill",
    "strike",
    "machine",
    "freeze",
    "cut",
    "switch",
    "drain",
    "clock",
    "board",
    "front",
    "leave",
    "poison",
]
# How often each kind is drawn, apart from clients that leave and poison, which are properties of questions.
_WEIGHTS: dict[FaultKind, int] = {
    "kill": 4, "strike": 8, "machine": 3, "freeze": 3, "cut": 3, "switch": 4, "drain": 2, "clock": 1,
    "board": 1, "front": 1,
}  # fmt: skip
_TOPOLOGIES = ("1e1p2d", "2e2p2d", "1e1p3d", "1e2p2d", "2epd", "1ep1p2d")
_MAX_FAULTS = 7
_NUM_KINDS = (2, 3, 4, len(_WEIGHTS))  # of a seed: few kinds meet each other more often, the rare ones too
_ASKED_S = 1.5  # in which questions are asked
_SPAN_S = 3.0  # in which faults begin
POISONED_AT = ("Prefill", "Reserve", "EncodeGroup", "ReadFrames")
# What a worker handles, or reports, when it or another one is struck.
STRUCK_AT = (
    "Prefill", "Reserve", "Redirect", "EncodeGroup", "PeerLost", "Move", "Abort", "SetRoles", "SpanDone",
    "HandedOver", "HandedOver", "Reserve after a loss", "Reserve after a loss", "HandedOver after a loss",
)  # fmt: skip
_MAX_NTH = 4
_STRIKE_S = (0.0, 0.005, 0.05, 0.2, 0.6)


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong, at a time from the start.

    target: draws whom it meets, of those that are there then, below 1
    other: draws a second one, or what comes of it, below 1
    lasts_s: how long, where it passes; of a strike, after its cause
    question: of a client that leaves, or of a poisoned request; of a strike, which message of its kind
    """

    at_s: float
    kind: FaultKind
    target: float = 0.0
    other: float = 0.0
    lasts_s: float = 0.0
    question: int = 0

    def __str__(self) -> str:
        drawn = f"{self.target:.2f} {self.other:.2f} {self.lasts_s:.3f} s {self.question}"
        return f"{self.at_s:.2f} s {self.kind} {drawn}"

    @property
    def struck_at(self) -> str:
        return STRUCK_AT[int(self.other * len(STRUCK_AT))]


@dataclass(frozen=True, slots=True)
class Asked:
    """A question that is asked. number: in the pool. front: draws the front, below 1."""

    at_s: float
    number: int
    front: float


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """All that a seed decides before the start. kinds: without those, faults are left out."""

    seed: int
    topology: str
    num_fronts: int
    num_media: int
    slowness: float
    asked: tuple[Asked, ...]
    faults: tuple[Fault, ...]

    def without(self, number: int) -> FaultPlan:
        return replace(self, faults=self.faults[:number] + self.faults[number + 1 :])

    @property
    def poisoned(self) -> dict[int, str]:
        """Returns the poisoned questions, by index, and the kind of message that ends a worker."""
        poison = [each for each in self.faults if each.kind == "poison"]
        return {each.question: POISONED_AT[int(each.other * len(POISONED_AT))] for each in poison}

    def lines(self) -> Sequence[str]:
        head = f"seed {self.seed}: {self.topology}, {self.num_fronts} fronts, {self.num_media} media workers"
        return [head, *map(str, self.faults)]


def drawn(seed: int, num_pool: int, num_asked: int = 10) -> FaultPlan:
    """Draws a plan. num_pool: questions to choose from."""
    rng = Random(f"{seed} plan")
    kinds = rng.sample(list(_WEIGHTS), rng.choice(_NUM_KINDS))
    weights = [_WEIGHTS[kind] for kind in kinds]
    faults = [_fault(rng, rng.choices(kinds, weights)[0]) for _ in range(rng.randint(2, _MAX_FAULTS))]
    leaving = rng.sample(range(num_asked), rng.choice((0, 0, 1, 2)))
    faults += [replace(_fault(rng, "leave"), question=number) for number in leaving]
    if rng.random() < 0.15:
        faults.append(replace(_fault(rng, "poison"), question=rng.randrange(num_asked)))
    asked = [
        Asked(rng.uniform(0.0, _ASKED_S), rng.randrange(num_pool), rng.random()) for _ in range(num_asked)
    ]
    return FaultPlan(
        seed,
        rng.choice(_TOPOLOGIES),
        rng.choice((1, 1, 2, 2, 3)),
        rng.choice((1, 2)),
        rng.choice((0.3, 1.0, 1.0, 3.0)),
        tuple(asked),
        tuple(sorted(faults, key=lambda each: each.at_s)),
    )


def _fault(rng: Random, kind: FaultKind) -> Fault:
    lasts_s = rng.choice((rng.uniform(0.2, 3.0), rng.uniform(3.0, 14.0)))
    if kind == "strike":
        return Fault(0.0, kind, rng.random(), rng.random(), rng.choice(_STRIKE_S), rng.randint(1, _MAX_NTH))
    return Fault(rng.uniform(0.1, _SPAN_S), kind, rng.random(), rng.random(), lasts_s)
