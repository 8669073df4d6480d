"""Asks what would have to be true for table 5's goodput, which is simulated 74 % high.

One assumption is changed at a time, on the published optimum 6E1P1D. Beside its goodput stand three figures
that the paper gives too: mean TTFT and TPOT at 1.25 requests/s, and table 4's TTFT of six images at 0.25
requests/s, which an assumption must leave where it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.published.encoder_calls import CALL_S, call_profile, deployment_of
from benchmarks.published.paper import Experiment, images, paper_deployment, paper_profile
from benchmarks.published.table5 import paper_demand
from benchmarks.published.tables import TABLE_4, TABLE_5, TABLE_5_AT_OPTIMUM, Row
from epd.planning.goodput import Demand, goodput, simulate_at
from epd.profiles.profile import Profile
from epd.simulate.deployment import Deployment

_TABLE_4_RATE, _NUM_REQUESTS = 0.25, 100
_HAND_OVER_S = 0.1


@dataclass(frozen=True, slots=True)
class Assumption:
    """Describes what is changed.

    profile_alone: the costs at table 4's low rate, None for the same
    fitted: metrics at the published goodput that a number was chosen for
    """

    name: str
    profile: Profile
    deployment: Deployment
    demand: Demand
    profile_alone: Profile | None = None
    fitted: frozenset[str] = frozenset()

    def rows(self) -> Iterator[Row]:
        rate = TABLE_5["optimum"]
        loaded = simulate_at(self.profile, self.deployment, self.demand, rate)
        found = goodput(self.profile, self.deployment, self.demand)
        yield Row(self.name, "6e1p1d", "goodput 1/s", found, rate)
        for metric, value in (("TTFT mean s", loaded.ttft_s.mean()), ("TPOT mean s", loaded.tpot_s.mean())):
            published, is_fitted = TABLE_5_AT_OPTIMUM[metric], metric in self.fitted
            yield Row(self.name, f"{rate} requests/s", metric, float(value), published, is_fitted)
        alone = Experiment(self.deployment, _TABLE_4_RATE, [images(6)] * _NUM_REQUESTS)
        ttft_s = alone.means(self.profile_alone or self.profile)["TTFT mean s"]
        yield Row(self.name, "table 4, 6 images", "TTFT mean s", ttft_s, TABLE_4["sharding on"][6])


def slower(profile: Profile, *, encode: float = 1.0, prefill: float = 1.0, decode: float = 1.0) -> Profile:
    """Returns the profile with stages that take so many times as long."""
    return replace(
        profile,
        encode=profile.encode.times(encode),
        prefill=profile.prefill.times(prefill),
        decode=profile.decode.times(decode),
    )


def assumptions() -> Iterator[Assumption]:
    """Yields what is known first, then one change at a time, then those that explain more."""
    profile, deployment, demand = paper_profile(), paper_deployment("6e1p1d"), paper_demand()
    as_it_is = Assumption("as in table 5", profile, deployment, demand)
    yield as_it_is
    yield replace(as_it_is, name="every request must keep both", demand=replace(demand, attainment=1.0))
    half = replace(demand, slo=replace(demand.slo, ttft_s=1.8))
    yield replace(as_it_is, name="TTFT objective 1.8 s, not 3.9", demand=half)
    yield replace(
        as_it_is, name="4 threads read images, not 64", deployment=replace(deployment, cpu_threads=4)
    )
    yield replace(as_it_is, name="encode takes 1.5 times as long", profile=slower(profile, encode=1.5))
    yield replace(as_it_is, name="prefill takes 2.5 times as long", profile=slower(profile, prefill=2.5))
    loaded = slower(profile, encode=1.5, prefill=1.5, decode=1.5)
    name = "under load all stages take 1.5 times as long"
    yield replace(as_it_is, name=name, profile=loaded, profile_alone=profile)
    yield from _with_calls(as_it_is)


def _with_calls(as_it_is: Assumption) -> Iterator[Assumption]:
    """Yields a cost of encoder calls instead of reading images, in batches of two, and slow hand-overs."""
    profile, deployment = call_profile(), deployment_of("6e1p1d", 2, 1, 128, "groups")
    calls = replace(as_it_is, profile=profile, deployment=deployment, demand=paper_demand(profile))
    yield replace(calls, name=f"a call of the encoder costs {CALL_S} s, reading nothing")
    transfer = replace(profile.transfer, cost=replace(profile.transfer.cost, fixed_s=_HAND_OVER_S))
    name = f"the same, and a hand-over takes {_HAND_OVER_S} s"
    fitted = frozenset({"TPOT mean s"})
    yield replace(calls, name=name, profile=replace(profile, transfer=transfer), fitted=fitted)


def study() -> list[Row]:
    return [row for each in assumptions() for row in each.rows()]
