"""Answers `epd plan`: the layout to run, its assumptions, and the runner-up with the reason."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from epd.errors import InfeasibleError
from epd.planning.bounds import Bound, bounds, outside
from epd.planning.files import FORMAT
from epd.planning.goodput import Demand, simulate_at
from epd.planning.search import OnProgress, Planner, Scored, SearchResult
from epd.planning.space import is_colocated, times, together
from epd.profiles.accelerators import RAY_TYPES
from epd.profiles.memory import WorkerMemory
from epd.profiles.profile import Profile
from epd.topology import Topology

# A smaller gain is not worth the hand-overs: the search resolves little more.
_WORTH = 1.05
# Of its time a resource is busy at least, where it binds and not an objective.
_BINDS = 0.9


@dataclass(frozen=True, slots=True)
class Cells:
    """Counts cells of one layout."""

    num_cells: int
    scored: Scored

    @property
    def topology(self) -> Topology:
        return times(self.scored.candidate.topology, self.num_cells)

    def __str__(self) -> str:
        return f"{self.num_cells} cell{'s' if self.num_cells > 1 else ''} of {self.scored.candidate.layout}"


@dataclass(frozen=True, slots=True)
class Plan:
    """Holds a plan.

    search: of one cell; its winner is the layout to run
    reason: why the runner-up lost, None without one
    verdict: whether to split up
    binding: the tightest limit of the winner's rate
    turns: when the verdict may be another, None where that is not known
    num_cells: copies of the winner
    encoders: the profile of encoders on devices of another kind, None without any
    rest: other cells for the devices that these leave, with the winner's settings
    """

    profile: Profile
    demand: Demand
    search: SearchResult
    reason: str | None
    verdict: str
    assumptions: tuple[str, ...]
    binding: Bound
    turns: str | None = None
    num_cells: int = 1
    rest: tuple[Cells, ...] = ()
    encoders: Profile | None = None

    @property
    def cells(self) -> tuple[Cells, ...]:
        return (Cells(self.num_cells, self.winner), *self.rest)

    @property
    def told_verdict(self) -> str:
        """Returns the verdict, with the devices whose requests it counts where there are several cells."""
        is_one = self.num_cells == 1 and not self.rest
        return self.verdict if is_one else f"each {self.winner.candidate.num_devices} devices: {self.verdict}"

    @property
    def topology(self) -> Topology:
        """Returns the topology of all cells together."""
        return together(each.topology for each in self.cells)

    @property
    def goodput(self) -> float:
        return sum(each.num_cells * each.scored.goodput for each in self.cells)

    @property
    def per_device(self) -> float:
        return self.goodput / self.num_devices

    @property
    def num_devices(self) -> int:
        return sum(each.num_cells * each.scored.candidate.num_devices for each in self.cells)

    @property
    def winner(self) -> Scored:
        return self.search.winner

    @property
    def is_bound_by_threads(self) -> bool:
        """Returns whether what reads media is busy nearly all the time, so that no device raises the rate."""
        return not self.binding.grows and self.binding.load(self.winner.goodput) >= _BINDS

    @property
    def cost_per_thousand(self) -> float | None:
        """Returns the price of a thousand requests at goodput, in the profile's currency."""
        price = self.profile.price_per_hour
        if price is None:
            return None
        return price / (self.per_device * 3600) * 1000

    def record(self) -> dict[str, Any]:
        """Returns a record for `--json` and plan.yaml: `PlanFile` of `epd serve`, and an explanation."""
        return {
            "format": FORMAT,
            "model": self.profile.model,
            "topology": str(self.topology),
            "settings": self._settings(),
            "objectives": {
                "ttft_s": self.demand.slo.ttft_s,
                "tpot_s": self.demand.slo.tpot_s,
                "attainment": self.demand.attainment,
            },
            "explanation": self._explanation(),
        }

    def _settings(self) -> dict[str, Any]:
        """Returns the settings under the names of the application's arguments."""
        settings, deployment = self.winner.candidate.settings, self.winner.candidate.deployment
        shared: dict[str, Any] = {"tensor_parallel": dict(settings.degrees)} if settings.degrees else {}
        if deployment.drafts is not None:
            shared |= {"draft": "auto", "max_draft": deployment.drafts.max_draft}
        if self.encoders is not None:
            shared["worker_classes"] = self._classes(self.encoders)
        if deployment.video_gpus:
            shared["video_device"] = "cuda"
        return shared | {
            "max_batch_patches": settings.encode_patches,
            "max_num_batched_tokens": deployment.language.max_num_batched_tokens,
            "max_chunk_tokens": settings.chunk_tokens,
            "max_num_seqs": settings.language_seqs,
            "decode_max_num_seqs": settings.decode_seqs,
            "sharding": settings.sharding,
            "retention": settings.retention,
            "dtype": self.profile.dtype,
            "kv_cache_dtype": self.profile.kv_cache_dtype,
            "quantization": self.profile.quantization,
            "encode_beside": deployment.encode_beside,
            "num_video_threads": deployment.cpu_threads,
            "num_threads": self.profile.num_threads,
            "num_kv_tokens": self._num_kv_tokens(),
        }

    def _num_kv_tokens(self) -> int:
        """Returns the tokens of a worker's KV cache, equal for all: those of the one with the least room."""
        deployment = self.winner.candidate.deployment
        return deployment.block_size * min(
            deployment.num_blocks(self.profile, group.roles)
            for group in deployment.topology.groups
            if group.roles != {"encode"}
        )

    @property
    def memory(self) -> tuple[WorkerMemory, ...]:
        """Returns the peak of each kind of worker, with the KV cache that the plan gives to all."""
        deployment = replace(self.winner.candidate.deployment, kv_tokens=self._num_kv_tokens())
        return tuple(deployment.memory(self.profile, group.roles) for group in deployment.topology.groups)

    def _classes(self, encoders: Profile) -> dict[str, dict[str, Any]]:
        """Returns the classes of workers: encoders, and the others of each set of roles."""
        own: dict[str, Any] = {"dtype": encoders.dtype, "num_threads": encoders.num_threads}
        classes = {"encoders": {"roles": "e", **_on(encoders), **own}}
        for group in self.topology.groups:
            if group.letters != "e":
                classes[f"language-{group.letters}"] = {"roles": group.letters, **_on(self.profile)}
        return classes

    def _explanation(self) -> dict[str, Any]:
        return {
            "cells": [
                {"num_cells": each.num_cells, **(_scored_record(each.scored) or {})} for each in self.cells
            ],
            "goodput_per_s": round(self.goodput, 4),
            "goodput_per_device_per_s": round(self.per_device, 5),
            "num_devices": self.num_devices,
            "profile": self.profile.name,
            "is_analytic": self.profile.is_analytic,
            "cost_per_thousand_requests": self.cost_per_thousand,
            "runner_up": _scored_record(self.search.runner_up),
            "runner_up_lost_because": self.reason,
            "colocated": _scored_record(self.search.colocated),
            "verdict": self.verdict,
            "turns": self.turns,
            "replicas": _replicas_record(self),
            "others": [_scored_record(each) for each in self.search.others],
            "binds": {"what": self.binding.what, "load": round(self.binding.load(self.winner.goodput), 4)},
            "encoder_scaling": [
                {"encoders": count, "goodput_per_s": round(value, 4)}
                for count, value in self.search.encoder_scaling
            ],
            "memory": [each.record() for each in self.memory],
            "num_candidates": self.search.num_candidates,
            "num_simulated": self.search.num_simulated,
            "assumptions": list(self.assumptions),
        }


def _replicas_record(plan: Plan) -> dict[str, Any] | None:
    if plan.search.replicas is None:
        return None
    goodput = plan.num_devices * plan.search.replicas.goodput
    return {"topology": f"{plan.num_devices} x 1epd", "goodput_per_s": round(goodput, 4)}


def _on(profile: Profile) -> dict[str, Any]:
    """Returns where the workers of a profile run, in the words of a class of workers."""
    if profile.num_threads is not None:
        return {"device": "cpu"}
    kind = {"accelerator_type": RAY_TYPES[profile.device]} if profile.device in RAY_TYPES else {}
    return {"device": "cuda", **kind}


def _scored_record(scored: Scored | None) -> dict[str, Any] | None:
    if scored is None:
        return None
    return {"topology": scored.candidate.layout, "goodput_per_s": round(scored.goodput, 4)}


def make_plan(
    planner: Planner,
    *,
    cells: Sequence[tuple[int, int]] | None = None,
    min_rate: float | None = None,
    encoders: Profile | None = None,
    on_progress: OnProgress | None = None,
) -> Plan:
    """Searches and explains.

    encoders: see `Plan`

    cells: (cells, devices in each), the first of the planner's space; a request stays in one cell. By default
        one cell.

    Raises InfeasibleError, which names the binding constraint.
    """
    (num_cells, _), *others = cells or [(1, planner.space.num_devices)]
    result = planner.search(on_progress)
    rest = tuple(
        Cells(count, like) for count, size in others if (like := _like(planner, result.winner, size))
    )
    reason = None
    if result.runner_up is not None:
        reason = why_it_lost(planner, result.runner_up, result.winner)
    assumptions = (*planner.profile.assumptions, _ASSUMED_CACHES[planner.has_repeats], *_ASSUMED)
    if (kept := planner.kept) is not None:
        assumptions += (f"a disk of {kept.bytes_per_s / 1e6:g} MB/s has media that came before",)
    if num_cells > 1 or rest:
        assumptions += (
            "each cell has requests of its own; the runner-up's figures and those by number of encoders are "
            "of the first cell",
        )
    assumptions += tuple(outside(planner.profile, result.winner.candidate.deployment, planner.demand.jobs))
    if len(rest) < len(others):
        left = sum(count * size for count, size in others) - sum(
            each.num_cells * each.scored.candidate.num_devices for each in rest
        )
        assumptions += (f"{left} devices are left over: no cell of them keeps the objectives",)
    binding = what_binds(planner, result.winner)
    found = Plan(
        planner.profile,
        planner.demand,
        result,
        reason,
        verdict(result, binding) if encoders is None else f"split, as asked: encoders on {encoders.device}",
        assumptions,
        binding,
        turning_point(planner, result),
        num_cells,
        rest,
        encoders,
    )
    if min_rate is not None and found.goodput < min_rate:
        raise InfeasibleError(_rate_binds(found, min_rate))
    return found


def _like(planner: Planner, winner: Scored, num_devices: int) -> Scored | None:
    """Returns the best layout of another number of devices with the winner's settings, or None."""
    space = replace(planner.space, num_devices=num_devices, fixed=winner.candidate.settings)
    try:
        return planner.over(space).search().winner
    except InfeasibleError:
        return None


_ASSUMED_CACHES = {
    False: "nothing is cached: every request brings new media",
    True: "media come again as the workload says, and workers keep what they have room for",
}
_ASSUMED = ("links do not get in each other's way; every device of a kind is as fast as every other",)


def what_binds(planner: Planner, scored: Scored) -> Bound:
    """Returns the tightest limit of a layout's rate."""
    candidate = scored.candidate
    demand = planner.demand_of(candidate)
    return bounds(planner.profile, candidate.deployment, demand.jobs, demand.slo)[0]


def why_it_lost(planner: Planner, loser: Scored, winner: Scored) -> str:
    """Describes the effect of the winner's rate on the runner-up."""
    demand = planner.demand_of(loser.candidate)
    result = simulate_at(planner.profile, loser.candidate.deployment, demand, winner.goodput)
    busiest = what_binds(planner, loser)
    missed = []
    for name, limit_s, values in (
        ("TTFT", demand.slo.ttft_s, result.ttft_s),
        ("TPOT", demand.slo.tpot_s, result.tpot_s),
    ):
        place = min(len(values) - 1, int(demand.attainment * len(values)))
        if limit_s is not None and len(values) and sorted(values)[place] > limit_s:
            missed.append(f"{name} of {sorted(values)[place]:.3g} s against {limit_s:g} s")
    return (
        f"at {winner.goodput:.3g} requests/s {busiest.what} would be busy "
        f"{busiest.load(winner.goodput):.0%} of the time and {result.attainment(demand.slo):.0%} of requests "
        "would keep the objectives"
        + (f" ({' and '.join(missed)} at the {demand.attainment:.0%} mark)" if missed else "")
    )


def verdict(result: SearchResult, binding: Bound) -> str:
    """Returns whether to split the stages, beside as many plain replicas, and why."""
    winner, plain = result.winner, _plain(result)
    if plain is None:
        return f"split: one device cannot do everything within the objectives, {winner.candidate.layout} can"
    name, goodput = plain
    if is_colocated(winner.candidate.topology) or winner.goodput < _WORTH * goodput:
        gain = winner.goodput / goodput - 1
        found = "no layout serves more" if gain <= 0 else f"the best layout gains {gain:.1%}, too little"
        why = "which no split changes" if not binding.grows else "and every device can do any of it"
        busiest, load = f"{binding.what} bind, {why}", binding.load(winner.goodput)
        if load < _BINDS:
            busiest = f"latency binds before {binding.what} do, which are {load:.0%} busy"
        return f"do not split: {name} serves {goodput:.3g} requests/s, {found}; {busiest}"
    return f"split: {winner.candidate.layout} serves {winner.goodput / goodput:.2f} times what {name} does"


def _plain(result: SearchResult) -> tuple[str, float] | None:
    """Returns the better of plain replicas and of workers that do everything behind one router."""
    num = result.winner.candidate.num_devices
    found = (
        [] if result.colocated is None else [(result.colocated.candidate.layout, result.colocated.goodput)]
    )
    if result.replicas is not None:
        found.append((f"{num} x 1epd", num * result.replicas.goodput))
    return max(found, key=lambda each: each[1], default=None)


def turning_point(planner: Planner, result: SearchResult) -> str | None:
    """Returns when plain replicas stop to be enough: the objective of a token that they miss at their rate.

    None where they are not enough now, or where no answer has a second token.
    """
    alone = result.replicas
    if alone is None or result.winner.goodput >= _WORTH * result.winner.candidate.num_devices * alone.goodput:
        return None
    demand = planner.demand_of(alone.candidate)
    tpot_s = sorted(simulate_at(planner.profile, alone.candidate.deployment, demand, alone.goodput).tpot_s)
    if not tpot_s:
        return None
    place = min(len(tpot_s) - 1, int(demand.attainment * len(tpot_s)))
    return (
        f"that may turn with an objective below {tpot_s[place]:.2g} s a token, which plain replicas miss at "
        "this rate: encoding and prefill stall their answers"
    )


def _rate_binds(found: Plan, min_rate: float) -> str:
    """Returns the refusal. Devices are advised only where they bind, and then more than there are."""
    binding = found.binding
    advice = binding.cure
    if binding.grows:
        needed = max(math.ceil(min_rate / found.per_device), found.num_devices + 1)
        advice = f"take about {needed} devices or relax the objectives"
    return (
        f"throughput binds: {min_rate:g} requests/s are asked for, the best layout, "
        f"{' and '.join(map(str, found.cells))}, serves {found.goodput:.3g} with {binding.what} busy "
        f"{binding.load(found.winner.goodput):.0%}; {advice}"
    )
