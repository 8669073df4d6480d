"""What happens in a simulation, drawn from its seed: questions, and faults that may be left out.

A seed has an aim: what it goes for. Half of the seeds draw from everything, the others near one path of the
recovery, where faults that seldom meet each other have to meet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from types import MappingProxyType
from typing import Literal

from epd.topology import parse_topology

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
    "copy",
]
# Whom a strike meets: the worker of the message, the one that it names, another one, the request's front or
# client, or the board. Nobody: the worker of the message only says nothing for a while.
Struck = Literal["itself", "named", "another", "front", "client", "board", "nobody"]
# What the worker of the message says no more before a strike: nothing, to workers (receipts), to those that
# prefill alone (so that answers are moved), or to fronts.
Muted = Literal["", "workers", "prefill", "fronts"]

# How often each kind is drawn, apart from clients that leave and poison, which are properties of questions.
_WEIGHTS: Mapping[FaultKind, int] = MappingProxyType({
    "kill": 4, "strike": 8, "machine": 3, "freeze": 3, "cut": 3, "switch": 4, "drain": 2, "clock": 1,
    "board": 1, "front": 1, "copy": 1,
})  # fmt: skip
_TOPOLOGIES = ("1e1p2d", "2e2p2d", "1e1p3d", "1e2p2d", "2epd", "1ep1p2d")
_NUM_KINDS = (2, 3, 4, len(_WEIGHTS))  # of a seed: few kinds meet each other more often, the rare ones too
_TENSORS_EVERY = 20  # seeds
_ENDS_LOST_EVERY = 4
POISONED_AT = ("Prefill", "Reserve", "EncodeGroup", "ReadFrames")
# What a worker handles, or reports, when a strike comes.
_STRUCK_AT = (
    "Prefill", "Reserve", "Redirect", "EncodeGroup", "PeerLost", "Move", "Abort", "SetRoles", "SpanDone",
    "HandedOver", "HandedOver", "Reserve after a loss", "Reserve after a loss", "HandedOver after a loss",
)  # fmt: skip
_LOST_S = (10.5, 18.0)  # of silence, after which a board has declared a process lost
_LATE_S = (10.0, 14.0)  # until what meets such a loss begins
_STRIKE_S = (0.0, 0.005, 0.05, 0.2, 0.6)


@dataclass(frozen=True, slots=True)
class Aim:
    """Says what the faults of a seed are drawn from.

    weights: how often each kind is drawn
    struck_at, struck, muted: what strikes are drawn from, see `Fault`
    max_nth: which message of its kind a strike waits for, at most
    num_kv_tokens: room of each worker
    is_late: freezes last until a board has declared the loss, and all else begins about then
    """

    weights: Mapping[FaultKind, int]
    struck_at: tuple[str, ...] = _STRUCK_AT
    struck: tuple[Struck, ...] = ("itself", "itself", "itself", "another", "another")
    muted: tuple[Muted, ...] = ("", "workers")
    topologies: tuple[str, ...] = _TOPOLOGIES
    num_fronts: tuple[int, ...] = (1, 1, 2, 2, 3)
    num_faults: tuple[int, int] = (2, 7)
    num_kinds: tuple[int, ...] = _NUM_KINDS
    num_leaving: tuple[int, ...] = (0, 0, 1, 2)
    max_nth: int = 4
    poisoned_share: float = 0.15
    num_kv_tokens: tuple[int, ...] = (4096,)
    is_late: bool = False


@dataclass(frozen=True, slots=True)
class Size:
    """Bounds what a world has, whatever its aim.

    num_asked, num_media: questions, and media workers, drawn from these
    asked_s, span_s: in which questions are asked, and in which faults begin
    max_workers, max_fronts, max_nth: of stage workers, of fronts, and as in `Aim`
    fault_share: of an aim's faults
    """

    num_asked: tuple[int, ...] = (10,)
    num_media: tuple[int, ...] = (1, 2)
    asked_s: float = 1.5
    span_s: float = 3.0
    max_workers: int = 6
    max_fronts: int = 3
    max_nth: int = 12
    fault_share: float = 1.0


# A smaller world takes less time, and finds broken lines less often: see the results' page.
SIZES: Mapping[str, Size] = MappingProxyType({
    "large": Size(),
    "middle": Size((5, 6, 7), asked_s=0.5, max_workers=4, max_fronts=2, max_nth=8),
    "small": Size((1, 2, 2, 3), num_media=(1,), asked_s=0.5, span_s=1.5, max_workers=4, max_fronts=2,
                  max_nth=4, fault_share=0.5),
})  # fmt: skip
_SHARES: Mapping[str, int] = MappingProxyType({"large": 1, "middle": 4, "small": 15})
_SPLIT = ("1e1p2d", "1e1p3d", "2e2p2d")
AIMS: Mapping[str, Aim] = MappingProxyType({
    "anything": Aim(_WEIGHTS, struck=("itself", "itself", "another", "another", "front", "client", "board"),
                    muted=("", "", "workers", "fronts"), num_kv_tokens=(4096, 4096, 768)),
    "hand-overs": Aim({"strike": 8, "kill": 1}, ("HandedOver", "SpanDone", "TokenOutput", "Grant"),
                      ("itself", "itself", "another"), ("", "workers", "fronts"), _SPLIT, max_nth=8),
    "losses while placing": Aim({"strike": 1}, ("Prefill", "Reserve", "Redirect", "Reserve after a loss"),
                                ("itself", "another"), ("", "fronts"), _SPLIT, max_nth=8),
    "leaving clients": Aim({"strike": 6, "switch": 3, "drain": 1, "kill": 2},
                           ("Reserve after a loss", "Redirect", "Redirect after a switch", "Move", "Pause"),
                           ("client",), ("",), _SPLIT, max_nth=3),
    "second losses": Aim({"strike": 6, "kill": 1}, ("Prefill", "Reserve", "Redirect", "Redirect"),
                         ("named", "named", "itself"), ("",), _SPLIT, num_faults=(3, 7)),
    "unheard tokens": Aim({"strike": 1}, ("SpanDone", "TokenOutput"), ("itself",), ("fronts",), _SPLIT,
                          num_faults=(1, 3), max_nth=12),
    "closed stages": Aim({"switch": 4, "strike": 3, "copy": 2, "freeze": 1},
                         ("SpanDone", "SpanDone", "TokenOutput", "SetRoles", "StagesClosed"), ("nobody",),
                         ("workers", "workers", "fronts"), _SPLIT, num_faults=(4, 8), max_nth=8),
    "moved answers": Aim({"switch": 4, "strike": 2}, ("Move",), ("named",), ("fronts",), _SPLIT,
                         num_faults=(4, 8), max_nth=2),
    "unheard moves": Aim({"switch": 4, "strike": 2}, ("Move",), ("itself",), ("fronts",), _SPLIT,
                         num_faults=(4, 8), max_nth=2),
    "late members": Aim({"board": 1, "freeze": 2, "strike": 1}, ("PeerLost",), ("board",), ("",),
                        num_faults=(2, 4)),
    "next boards": Aim({"freeze": 3, "kill": 2, "board": 2}, topologies=_SPLIT, num_fronts=(2,),
                       num_faults=(3, 6), num_kinds=(3,), num_leaving=(0,), poisoned_share=0.0, is_late=True),
    "lost leaders": Aim({"switch": 3, "strike": 3}, ("Offload", "AskRemaining", "Onload"), ("front",),
                        num_fronts=(2, 3), max_nth=2),
    "moves": Aim({"strike": 4, "switch": 4, "drain": 1},
                 ("HandedOver after a switch", "Move", "Move", "Pause", "Reserve after a switch"),
                 ("itself", "named", "named", "another"), ("", "workers", "fronts"), _SPLIT, max_nth=3),
    "copies": Aim({"copy": 3, "switch": 1, "kill": 1}),
    "little room": Aim({"strike": 4, "switch": 3, "drain": 2, "kill": 2},
                       ("Pause", "Move", "Redirect", "Reserve after a loss"), topologies=_SPLIT,
                       num_kv_tokens=(512,)),
    "sole workers": Aim({"machine": 1}, topologies=("1e1p2d", "1e1p3d", "1e1p1d"), num_faults=(1, 2)),
    "machines": Aim({"machine": 3, "kill": 1}, num_faults=(1, 4), poisoned_share=0.0),
    "board": Aim({"board": 2, "kill": 2, "freeze": 2, "machine": 1, "cut": 1}, num_faults=(2, 5)),
    "switches": Aim({"switch": 4, "strike": 4},
                    ("Offload", "AskRemaining", "Onload", "SetRoles", "Pause", "Move", "StagesClosed"),
                    ("front", "itself", "another", "board"), num_fronts=(2, 3)),
    "encoders": Aim({"strike": 4, "kill": 1}, ("EncodeGroup",), max_nth=6),
    "poison": Aim({"leave": 1}, num_faults=(0, 0), poisoned_share=1.0),
    "lone losses": Aim({"strike": 1}, ("Prefill", "Reserve", "EncodeGroup", "SpanDone"), ("itself",),
                       num_faults=(1, 1), poisoned_share=0.0),
    "merged roles": Aim({"switch": 6, "strike": 2, "drain": 1, "copy": 1},
                        ("Offload", "Onload", "SetRoles", "HandedOver after a switch"), ("itself", "another"),
                        topologies=("1ed2ep", "1epd1d", "1ed1ep1p1d"), num_faults=(4, 8)),
    "late receipts": Aim({"strike": 5, "switch": 3}, ("HandedOver", "HandedOver", "HandedOver", "Move"),
                         ("nobody", "nobody", "itself"), ("prefill",), ("1e1p2d", "1e1p3d"),
                         num_faults=(6, 10), num_kinds=(2,), max_nth=4),
})  # fmt: skip
# Newer aims are only drawn if they are asked for: the plans of seeds stay as they are.
_AIMS_OF_SEEDS = tuple(name for name in AIMS if name != "merged roles")


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong, at a time from the start.

    target: draws whom it meets, of those that are there then, below 1
    other: draws a second one, or what comes of it, below 1
    lasts_s: how long, where it passes; of a strike, after its cause
    question: of a client that leaves, or of a poisoned request; of a strike, which message of its kind
    struck_at, struck, muted: of a strike, the kind of its message, whom it meets, and what is not said before
    """

    at_s: float
    kind: FaultKind
    target: float = 0.0
    other: float = 0.0
    lasts_s: float = 0.0
    question: int = 0
    struck_at: str = ""
    struck: Struck = "itself"
    muted: Muted = ""

    def __str__(self) -> str:
        drawn = f"{self.target:.2f} {self.other:.2f} {self.lasts_s:.3f} s {self.question}"
        strike = f" {self.struck} at {self.struck_at}, mute to {self.muted or 'nobody'}"
        return f"{self.at_s:.2f} s {self.kind} {drawn}{strike if self.struck_at else ''}"


@dataclass(frozen=True, slots=True)
class Asked:
    """A question that is asked. number: in the pool. front: draws the front, below 1."""

    at_s: float
    number: int
    front: float


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """All that a seed decides before the start.

    num_kv_tokens: room of each worker
    ends_lost: whether members end the processes of their machine that are lost, where those still run
    """

    seed: int
    topology: str
    num_fronts: int
    num_media: int
    slowness: float
    num_kv_tokens: int
    asked: tuple[Asked, ...]
    faults: tuple[Fault, ...]
    aim: str = "anything"
    size: str = "large"
    ends_lost: bool = False

    def without(self, number: int) -> FaultPlan:
        return replace(self, faults=self.faults[:number] + self.faults[number + 1 :])

    @property
    def has_tensors(self) -> bool:
        """Returns whether workers run the tiny model of tensors. The others run `exact_model`."""
        return self.seed % _TENSORS_EVERY == 0

    @property
    def encode_fallback_s(self) -> float | None:
        """Returns the option of that name. In every other seed requests wait for an encoder."""
        return 2.0 if self.seed % 2 else None

    @property
    def poisoned(self) -> dict[int, str]:
        """Returns the poisoned questions, by index, and the kind of message that ends a worker.

        Poison is in the content: another client's question of the same content has it too.
        """
        poison = {self.asked[each.question].number: each for each in self.faults if each.kind == "poison"}
        return {
            index: POISONED_AT[int(poison[asked.number].other * len(POISONED_AT))]
            for index, asked in enumerate(self.asked)
            if asked.number in poison
        }

    @property
    def has_poison_alone(self) -> bool:
        """Returns whether nothing harms workers but poisoned questions."""
        return {each.kind for each in self.faults} <= {"poison", "leave"}

    def lines(self) -> Sequence[str]:
        head = (
            f"seed {self.seed}, {self.aim}: {self.topology}, {self.num_fronts} fronts, "
            f"{self.num_media} media workers"
        )
        return [head, *map(str, self.faults)]


def size_of(seed: int) -> str:
    """Draws the size of a seed's world, for runs of many seeds."""
    return Random(f"{seed} size").choices(list(_SHARES), list(_SHARES.values()))[0]


def drawn(seed: int, num_pool: int, aim: str = "", size: str = "large") -> FaultPlan:
    """Draws a plan. num_pool: questions to choose from. aim: by default the seed's own."""
    rng = Random(f"{seed} plan")
    own = "anything" if rng.random() < 0.5 else rng.choice(_AIMS_OF_SEEDS)
    aim, bounds = aim or own, SIZES[size]
    aimed = _bounded(AIMS[aim], bounds)
    weights = aimed.weights
    kinds = rng.sample(list(weights), min(rng.choice(aimed.num_kinds), len(weights)))
    shares = [weights[kind] for kind in kinds]
    draw = partial(_fault, rng, aimed, bounds.span_s)
    faults = [draw(rng.choices(kinds, shares)[0]) for _ in range(rng.randint(*aimed.num_faults))]
    num_asked = rng.choice(bounds.num_asked) if len(bounds.num_asked) > 1 else bounds.num_asked[0]
    leaving = rng.sample(range(num_asked), min(rng.choice(aimed.num_leaving), num_asked))
    faults += [replace(draw("leave"), question=number) for number in leaving]
    if rng.random() < aimed.poisoned_share:
        faults.append(replace(draw("poison"), question=rng.randrange(num_asked)))
    asked = [
        Asked(rng.uniform(0.0, bounds.asked_s), rng.randrange(num_pool), rng.random())
        for _ in range(num_asked)
    ]
    return FaultPlan(
        seed,
        rng.choice(aimed.topologies),
        rng.choice(aimed.num_fronts),
        rng.choice(bounds.num_media),
        rng.choice((0.3, 1.0, 1.0, 3.0)),
        rng.choice(aimed.num_kv_tokens),
        tuple(asked),
        tuple(sorted(faults, key=lambda each: each.at_s)),
        aim,
        size,
        seed % _ENDS_LOST_EVERY == 2,
    )


def _bounded(aim: Aim, size: Size) -> Aim:
    """Returns what is left of an aim in a world of a size."""
    fits = [name for name in aim.topologies if parse_topology(name).num_workers <= size.max_workers]
    fewest, most = (math.ceil(number * size.fault_share) for number in aim.num_faults)
    return replace(
        aim,
        topologies=tuple(fits),
        num_fronts=tuple(number for number in aim.num_fronts if number <= size.max_fronts),
        num_faults=(fewest, most),
        max_nth=min(aim.max_nth, size.max_nth),
    )


def _fault(rng: Random, aim: Aim, span_s: float, kind: FaultKind) -> Fault:
    lasts_s = rng.choice((rng.uniform(0.2, 3.0), rng.uniform(3.0, 14.0)))
    if kind == "strike":
        return Fault(
            0.0,
            kind,
            rng.random(),
            rng.random(),
            rng.choice(_STRIKE_S),
            rng.randint(1, aim.max_nth),
            rng.choice(aim.struck_at),
            rng.choice(aim.struck),
            rng.choice(aim.muted),
        )
    fault = Fault(rng.uniform(0.1, span_s), kind, rng.random(), rng.random(), lasts_s)
    return _late(fault, rng) if aim.is_late else fault


def _late(fault: Fault, rng: Random) -> Fault:
    """Returns a fault that has to do with the loss of a silent process."""
    if fault.kind == "freeze":
        return replace(fault, lasts_s=rng.uniform(*_LOST_S))
    return replace(fault, at_s=fault.at_s + rng.uniform(*_LATE_S))
