"""Compares fleets of devices for one question: what each serves, costs and draws, and which is best.

8xh100             eight of one kind
4xh100+8xl40s      servers of two kinds, which share the requests by what each serves
h100               as many as the rate or the budget asks for
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from epd.errors import InfeasibleError, RequestError
from epd.planning.plan import Plan
from epd.topology import MAX_WORKERS

Objective = Literal["cost", "throughput"]
# Plans so many devices of a kind. Raises InfeasibleError.
PlanOf = Callable[[int, str], Plan]
# What plans for the kind of device cost an hour, before any is planned.
PriceOf = Callable[[str], float]
# Looks at a number of devices before the final one.
_LOOKS = 3
# benchmarks/results/score.md and gpu_profile.md; a test compares the figures.
EXPECTED_ERROR = (
    "expect 10 to 25 % off. Beside the application on 2 CPU cores, 24 predictions were 9.7% off at the "
    "median, and 20.5% at the 90th percentile. A computed H100 takes 1.0 to 1.1 times as long as the "
    "measured one for prefill and decoding, two points of which gave constants. No fleet of GPUs was "
    "measured"
)


@dataclass(frozen=True, slots=True)
class FleetPart:
    """Names devices of a kind. num_devices: None for as many as are needed."""

    num_devices: int | None
    device: str

    def __str__(self) -> str:
        return self.device if self.num_devices is None else f"{self.num_devices} x {self.device}"


@dataclass(frozen=True, slots=True)
class Fleet:
    """Names the devices to compare. A mix has a number of each."""

    parts: tuple[FleetPart, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises RequestError for anything but the notation of the module."""
        parts = tuple(map(_part, text.split("+")))
        if len(parts) > 1 and any(part.num_devices is None for part in parts):
            raise RequestError(
                f"received the fleet {text!r}; allowed: a number of each kind in a mix; try 4xh100+8xl40s"
            )
        return cls(parts)

    def __str__(self) -> str:
        return " + ".join(map(str, self.parts))


def _part(text: str) -> FleetPart:
    match = re.fullmatch(r"(?:(\d+)\s*x\s*)?([\w.-]+)", text.strip())
    number = None if match is None or match[1] is None else int(match[1])
    if match is None or (number is not None and not 1 <= number <= MAX_WORKERS):
        raise RequestError(
            f"received the fleet {text!r}; allowed: 1 to {MAX_WORKERS} devices and their kind; try 8xh100"
        )
    return FleetPart(number, match[2])


@dataclass(frozen=True, slots=True)
class Offer:
    """Holds a fleet's plans, one of each kind of device; or the reason why it has none."""

    fleet: Fleet
    plans: tuple[Plan, ...] = ()
    reason: str = ""

    @property
    def name(self) -> str:
        if not self.plans:
            return str(self.fleet)
        return " + ".join(f"{plan.num_devices} x {plan.profile.device}" for plan in self.plans)

    @property
    def layout(self) -> str:
        return " + ".join(str(plan.topology) for plan in self.plans)

    @property
    def goodput(self) -> float:
        return sum(plan.goodput for plan in self.plans)

    @property
    def price_per_hour(self) -> float | None:
        """Returns the price of all devices, None where one of them has none or another currency."""
        prices = [plan.profile.price_per_hour for plan in self.plans]
        if not prices or len({plan.profile.currency for plan in self.plans}) > 1:
            return None
        known = [price * plan.num_devices for price, plan in zip(prices, self.plans, strict=True) if price]
        return sum(known) if len(known) == len(prices) else None

    @property
    def currency(self) -> str:
        return self.plans[0].profile.currency if self.plans else ""

    @property
    def cost_per_thousand(self) -> float | None:
        """Returns the price of a thousand requests at goodput."""
        price = self.price_per_hour
        return None if price is None or not self.goodput else price / self.goodput / 3.6

    @property
    def power_kw(self) -> float | None:
        """Returns what the devices draw at most, without their machines."""
        powers = [plan.profile.power_w for plan in self.plans]
        total = [w * plan.num_devices / 1000 for w, plan in zip(powers, self.plans, strict=True) if w]
        return sum(total) if len(total) == len(powers) > 0 else None

    def serves(self, rate_per_s: float | None) -> bool:
        """Returns whether it has a plan, and serves the rate where one is asked for."""
        return bool(self.plans) and (rate_per_s is None or self.goodput >= rate_per_s)

    def record(self) -> dict[str, Any]:
        return {
            "fleet": self.name,
            "topology": self.layout,
            "goodput_per_s": round(self.goodput, 4),
            "price_per_hour": self.price_per_hour,
            "currency": self.currency,
            "cost_per_thousand_requests": self.cost_per_thousand,
            "power_kw": self.power_kw,
            "binds": [plan.binding.what for plan in self.plans],
            "verdicts": [plan.verdict for plan in self.plans],
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class Wanted:
    """Says what fleets are compared for.

    rate_per_s: of requests, None for as many as each serves
    budget_per_hour: that no fleet may exceed, None for any price
    """

    rate_per_s: float | None = None
    budget_per_hour: float | None = None
    objective: Objective = "cost"


def compare(
    fleets: Sequence[Fleet],
    wanted: Wanted,
    plan_of: PlanOf,
    price_of: PriceOf,
    on_fleet: Callable[[Fleet], None] = lambda _: None,
) -> list[Offer]:
    """Returns an offer of each fleet, the best first.

    on_fleet: called before each is planned
    Raises RequestError for a fleet whose number nothing decides, InfeasibleError where no fleet has a plan.
    """
    offers = []
    for fleet in fleets:
        on_fleet(fleet)
        offers.append(_offer(fleet, wanted, plan_of, price_of))
    if not any(offer.plans for offer in offers):
        raise InfeasibleError("; ".join(f"{offer.name}: {offer.reason}" for offer in offers))
    return sorted(offers, key=lambda offer: _rank(offer, wanted))


def _rank(offer: Offer, wanted: Wanted) -> tuple[bool, float]:
    """Orders offers: those that serve the rate come first, then by the objective."""
    is_short = not offer.serves(wanted.rate_per_s)
    if is_short or wanted.objective == "throughput":
        return is_short, -offer.goodput
    price = offer.cost_per_thousand if wanted.rate_per_s is None else offer.price_per_hour
    return is_short, math.inf if price is None else price


def _offer(fleet: Fleet, wanted: Wanted, plan_of: PlanOf, price_of: PriceOf) -> Offer:
    try:
        plans = tuple(_planned(part, wanted, plan_of, price_of) for part in fleet.parts)
    except InfeasibleError as error:
        return Offer(fleet, reason=str(error))
    offer, most = Offer(fleet, plans), wanted.budget_per_hour
    if most is not None and (offer.price_per_hour or 0.0) > most:
        reason = f"{offer.name} costs {offer.price_per_hour:.4g} an hour, the budget is {most:.4g}"
        return Offer(fleet, reason=reason)
    return offer


def _planned(part: FleetPart, wanted: Wanted, plan_of: PlanOf, price_of: PriceOf) -> Plan:
    if part.num_devices is not None:
        return plan_of(part.num_devices, part.device)
    if wanted.rate_per_s is not None:
        return _sized(part.device, wanted.rate_per_s, plan_of)
    if wanted.budget_per_hour is None:
        raise RequestError(
            f"received the fleet {part.device!r} without a number; allowed: a number, a rate or a budget; "
            f"try 8x{part.device}, or --videos-per-minute 20"
        )
    affordable = min(MAX_WORKERS, int(wanted.budget_per_hour / price_of(part.device)))
    if affordable < 1:
        raise InfeasibleError(
            f"one {part.device} costs {price_of(part.device):g} an hour, above the budget of "
            f"{wanted.budget_per_hour:g}"
        )
    return plan_of(affordable, part.device)


def _sized(device: str, rate_per_s: float, plan_of: PlanOf) -> Plan:
    """Returns the plan of the fewest devices that was found to serve a rate: from one device, or a machine's.

    Raises InfeasibleError for a rate that too many devices would be needed for.
    """
    try:
        found = plan_of(1, device)
    except InfeasibleError:
        found = plan_of(8, device)
    for _ in range(_LOOKS):
        needed = math.ceil(rate_per_s / found.per_device)
        if needed > MAX_WORKERS:
            raise InfeasibleError(
                f"about {needed} x {device} would be needed, at most {MAX_WORKERS} are planned; ask for a "
                "part of the rate"
            )
        if needed == found.num_devices:
            break
        if found.goodput >= rate_per_s and needed > found.num_devices:
            break
        found = plan_of(max(needed, 1), device)
    return found
