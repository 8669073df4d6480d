"""Searches a space for the highest goodput per device, by branch and bound on simulated goodput.

plain layouts   all of them, with all settings
mixes           from the best two layouts so far: one worker with other roles, or one other setting, and so on
                from what is found, until no step is new

Candidates are simulated in order of their upper bounds (`rate_bound`). One that cannot beat the best two so
far is skipped; one that misses the objectives at a slightly higher rate than these is dropped after that one
simulation. No skipped plain layout can therefore be the answer, to the search's resolution. Mixes are too
many for that, 2,871 of eight devices; tests compare the answer with all of them where devices are few.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain

from epd.errors import InfeasibleError
from epd.planning.bounds import MeanWork, mean_work
from epd.planning.files import is_served
from epd.planning.goodput import MAX_LOAD, Demand, goodput, rate_bound, unloaded
from epd.planning.space import Degrees, Settings, Space, is_colocated, reduced, resized
from epd.profiles.profile import Profile
from epd.simulate.deployment import Deployment
from epd.simulate.kept_media import KeptMedia
from epd.topology import Topology

OnProgress = Callable[[int, int], None]
# A candidate must be better by this much, so that equals are not simulated to the end.
LEAST_GAIN = 1.01


@dataclass(frozen=True, slots=True)
class Candidate:
    """Describes a point of the space. bound: requests per second it cannot exceed."""

    topology: Topology
    settings: Settings
    deployment: Deployment
    bound: float

    @property
    def num_devices(self) -> int:
        return self.deployment.num_devices

    @property
    def layout(self) -> str:
        """Returns the topology as text, with the devices of workers that have several."""
        shared = ", ".join(f"{each} on {n} devices each" for each, n in self.settings.degrees)
        return f"{self.topology} ({shared})" if shared else str(self.topology)


@dataclass(frozen=True, slots=True)
class Scored:
    """Holds a candidate and its goodput, requests per second."""

    candidate: Candidate
    goodput: float


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Holds the result of a search.

    runner_up: the best of another topology; others: up to two more, of which no better settings were sought
    replicas: one device of them that does everything, with its share of the threads; None if it cannot
    colocated: the best where every worker does everything
    num_candidates: plain layouts with their settings, and mixes that were looked at
    encoder_scaling: (encoders, goodput) of the winner with more or fewer workers that only encode
    """

    winner: Scored
    runner_up: Scored | None
    colocated: Scored | None
    num_candidates: int
    num_simulated: int
    encoder_scaling: tuple[tuple[int, float], ...] = ()
    others: tuple[Scored, ...] = ()
    replicas: Scored | None = None


class Points:
    """Makes points of a space into candidates. demands: by retention. base: settings outside the space."""

    def __init__(
        self, profile: Profile, demands: Mapping[float, Demand], space: Space, base: Deployment
    ) -> None:
        self._profile = profile
        self._demands = demands
        self._space = space
        self._base = base
        self._works: dict[Hashable, MeanWork] = {}

    def candidates(self) -> list[Candidate]:
        """Returns the plain layouts whose weights fit, with all settings, the highest bounds first."""
        return self.fitting(
            (topology, settings)
            for topology, degrees in self._space.layouts()
            for settings in self._space.settings(topology, degrees)
        )

    def fitting(self, points: Iterable[tuple[Topology, Settings]]) -> list[Candidate]:
        """Returns those of the points whose weights fit, the highest bounds first."""
        found = (self.candidate(*point) for point in points if self._allows(point[0], point[1].degrees))
        return sorted(
            (each for each in found if each is not None), key=lambda each: (-each.bound, each.layout)
        )

    def _allows(self, topology: Topology, degrees: Degrees) -> bool:
        """Returns whether the model's heads can be shared out so, and a server has such workers."""
        roles = {group.letters: group.roles for group in topology.groups}
        if not is_served({letters: dict(degrees).get(letters, 1) for letters in roles}):
            return False
        parallel = self._profile.parallel
        return all(parallel is None or parallel.allows(roles[each], n) for each, n in degrees)

    def candidate(self, topology: Topology, settings: Settings) -> Candidate | None:
        deployment = settings.deployment(topology, self._base)
        if self._refusal(deployment) is not None:
            return None
        demand, work = self._demands[settings.retention], self._work(deployment, settings)
        return Candidate(topology, settings, deployment, rate_bound(self._profile, deployment, demand, work))

    def _work(self, deployment: Deployment, settings: Settings) -> MeanWork:
        """Returns the work of a request, the same for all candidates that differ in nothing it depends on."""
        letters = tuple(group.letters for group in deployment.topology.groups)
        slots = (deployment.language.max_num_seqs, deployment.decode.max_num_seqs)
        key = (letters, settings.degrees, slots, settings.retention)
        if key not in self._works:
            demand = self._demands[settings.retention]
            self._works[key] = mean_work(self._profile, deployment, demand.jobs, demand.slo)
        return self._works[key]

    def _refusal(self, deployment: Deployment) -> InfeasibleError | None:
        """Returns the error of the first worker that does not fit its device, None if all do."""
        try:
            for group in deployment.topology.groups:
                deployment.memory(self._profile, group.roles)
        except InfeasibleError as error:
            return error
        return None

    def no_memory(self) -> InfeasibleError:
        """Returns the error of the layout that splits the most, with the first settings, where none fits."""
        layouts = sorted(self._space.layouts(), key=lambda each: -len(each[0].groups))
        for topology, degrees in layouts:
            for settings in self._space.settings(topology, degrees):
                error = self._refusal(settings.deployment(topology, self._base))
                if error is not None:
                    return error
        return InfeasibleError(
            f"received {self._space.num_devices} devices, which no layout with these settings uses; allowed "
            "are numbers that its workers divide; take another number of devices"
        )


class Planner:
    """Searches one space for one demand. base: settings outside the space."""

    def __init__(self, profile: Profile, demand: Demand, space: Space, base: Deployment) -> None:
        self.profile = profile
        self.demand = demand
        self.space = space
        self._base = replace(base, largest_group_patches=_largest_group(demand))
        self._demands = {
            share: replace(demand, jobs=reduced(demand.jobs, share)) for share in space.retentions
        }
        self.points = Points(profile, self._demands, space, self._base)

    @property
    def has_repeats(self) -> bool:
        """Returns whether media come more than once, so that caches are simulated."""
        return self._base.enable_prefix_caching

    @property
    def kept(self) -> KeptMedia | None:
        """Returns the disk of media that came before, if there is one."""
        return self._base.kept

    def demand_of(self, candidate: Candidate) -> Demand:
        return self._demands[candidate.settings.retention]

    def over(self, space: Space) -> Planner:
        """Returns a planner of another space for the same demand."""
        return Planner(self.profile, self.demand, space, self._base)

    def goodput(self, candidate: Candidate, at_least: float = 0.0, known: float | None = None) -> float:
        demand = self.demand_of(candidate)
        return goodput(self.profile, candidate.deployment, demand, at_least=at_least, known=known)

    def search(self, on_progress: OnProgress | None = None) -> SearchResult:
        """Searches the space. Raises InfeasibleError, which names the constraint, when nothing fits."""
        candidates = self.points.candidates()
        if not candidates:
            raise self.points.no_memory()
        best: dict[str, Scored] = {}
        done = num_simulated = 0
        for candidate in chain(_in_turns(candidates), self._climb(candidates, best)):
            done += 1
            if on_progress is not None:
                on_progress(done, max(done, len(candidates)))
            floor = _floor(best, candidate)
            if MAX_LOAD * candidate.bound <= floor:
                continue
            num_simulated += 1
            found = self.goodput(candidate, floor)
            if found > floor:
                best[candidate.layout] = Scored(candidate, found)
        if not best:
            raise InfeasibleError(self._binding(candidates))
        ranked = self._ranked(best)
        colocated = next((each for each in ranked if is_colocated(each.candidate.topology)), None)
        return SearchResult(
            ranked[0],
            ranked[1] if len(ranked) > 1 else None,
            colocated,
            done,
            num_simulated,
            tuple(self.encoder_scaling(ranked[0].candidate)),
            tuple(ranked[2:4]),
            self.replicas(colocated),
        )

    def replicas(self, colocated: Scored | None) -> Scored | None:
        """Returns what one device serves by itself; as many of them share the requests evenly, each its own.

        colocated: whose settings it has, None to search for them
        Its threads are its share of those that read media. None if the model or the objectives are too much.
        """
        if self.space.num_devices == 1 or self.space.num_encoders:
            return None
        threads = max(1, self._base.cpu_threads // self.space.num_devices)
        settings = None if colocated is None else replace(colocated.candidate.settings, degrees=())
        space = replace(self.space, num_devices=1, degrees=(1,), fixed=settings)
        base = replace(self._base, cpu_threads=threads, video_gpus=min(1, self._base.video_gpus))
        alone = Planner(self.profile, self.demand, space, base)
        try:
            return alone.search().winner
        except InfeasibleError:
            return None

    def _climb(self, tried: list[Candidate], best: dict[str, Scored]) -> Iterator[Candidate]:
        """Yields what is a step away from the best two layouts, until nothing new is.

        best: of each layout, to which the caller adds what it finds
        """
        seen = {(each.layout, each.settings) for each in tried}
        while True:
            tops = sorted(best.values(), key=lambda each: -each.goodput)[:2]
            steps = self.points.fitting(
                step
                for each in tops
                for step in self.space.steps(each.candidate.topology, each.candidate.settings)
            )
            new = [each for each in steps if (each.layout, each.settings) not in seen]
            if not new:
                return
            seen.update((each.layout, each.settings) for each in new)
            yield from new

    def _ranked(self, best: dict[str, Scored]) -> list[Scored]:
        """Returns the best four and the colocated one, scored again on the same scale.

        Of equals, the one with fewer kinds of workers is first.
        """
        ranked = sorted(best.values(), key=lambda each: -each.goodput)
        kept = ranked[:4] + [each for each in ranked[4:] if is_colocated(each.candidate.topology)]
        scored = [Scored(each.candidate, self.goodput(each.candidate, known=each.goodput)) for each in kept]
        return sorted(scored, key=lambda each: (-each.goodput, len(each.candidate.topology.groups)))

    def _binding(self, candidates: list[Candidate]) -> str:
        """Returns the objective that is missed even without load, by the layout that comes closest."""
        slo = self.demand.slo
        if slo.is_empty:
            return "no layout keeps up with any rate; send less media or take larger devices"
        times = [
            (*unloaded(self.profile, each.deployment, self.demand_of(each)), each)
            for each in _one_of_each_topology(candidates)
        ]
        ttft_s, _, fastest = min(times, key=lambda each: each[0])
        if slo.ttft_s is not None and ttft_s > slo.ttft_s:
            return (
                f"TTFT binds: alone on {fastest.topology}, the fastest layout, a request takes "
                f"{ttft_s:.3g} s to its first token, the objective is {slo.ttft_s:g} s; raise it above that, "
                "send less media or take faster devices"
            )
        _, tpot_s, fastest = min(times, key=lambda each: each[1])
        if slo.tpot_s is not None and tpot_s > slo.tpot_s:
            return (
                f"TPOT binds: alone on {fastest.topology}, a request takes {tpot_s:.3g} s per output token, "
                f"the objective is {slo.tpot_s:g} s; raise it above that or take faster devices"
            )
        return (
            "TTFT and TPOT bind together: each is kept by some layout, both by none; raise one of them, or "
            f"lower the attainment of {self.demand.attainment:g}"
        )

    def encoder_scaling(self, candidate: Candidate) -> Iterator[tuple[int, float]]:
        """Returns goodput by the number of encoders, up to twice the plan's, all else equal."""
        sizes = {group.letters: group.num_workers for group in candidate.topology.groups}
        if "e" not in sizes:
            return
        for count in _counts_around(sizes["e"]):
            topology = resized(candidate.topology, "e", count)
            other = self.points.candidate(topology, candidate.settings)
            if other is not None:
                yield count, self.goodput(other)


def _in_turns(candidates: list[Candidate]) -> Iterator[Candidate]:
    """Orders colocated layouts first, since every plan is compared with them; then by bound."""
    yield from (each for each in candidates if is_colocated(each.topology))
    yield from (each for each in candidates if not is_colocated(each.topology))


def _floor(best: dict[str, Scored], candidate: Candidate) -> float:
    """Returns the goodput that a candidate must beat.

    That is the best of its own topology, and the second best of the others, to keep a runner-up.
    Colocated layouts need to beat only each other.
    """
    name = candidate.layout
    own = best[name].goodput if name in best else 0.0
    others = sorted((each.goodput for key, each in best.items() if key != name), reverse=True)
    second = others[1] if len(others) > 1 and not is_colocated(candidate.topology) else 0.0
    return LEAST_GAIN * max(own, second)


def _counts_around(count: int) -> list[int]:
    return sorted({max(1, count // 2), max(1, count - 1), count, count + 1, 2 * count})


def _one_of_each_topology(candidates: list[Candidate]) -> list[Candidate]:
    return list({each.layout: each for each in reversed(candidates)}.values())


def _largest_group(demand: Demand) -> int:
    return max((group.media.num_patches for job in demand.jobs for group in job.groups), default=0)
