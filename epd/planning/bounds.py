"""Bounds the rate of a deployment by costs alone, without queues and waits, and names what binds.

    reading media     threads that decode media, for all workers of a machine
    workers           for each set of stages, the workers that do any of it
    cores             where workers share the cores of one machine

Merged roles may do any of their stages, so every set of stages must fit the workers that do any of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from epd.profiles.profile import Profile
from epd.simulate.clock import TICKS_PER_S
from epd.simulate.deployment import Deployment
from epd.simulate.requests import Job
from epd.topology import STAGES, Stage, role_letters
from epd.workload.metrics import SLO

# The cure of workers that are busy, by the letters of the stages that they are busy with.
_CURES = {
    "e": "take more workers that encode, or send fewer or smaller frames",
    "p": "take more workers that prefill, or send fewer visual tokens",
    "d": "take more workers that decode, or ask for shorter answers",
}
_MORE_DEVICES = "take more devices, or send fewer frames"


@dataclass(frozen=True, slots=True)
class Bound:
    """Describes a limit of the rate.

    what: the resource, for people
    rate_per_s: requests per second at which it has no time left
    cure: how to raise it, for people
    grows: whether more devices raise it
    """

    what: str
    rate_per_s: float
    cure: str
    grows: bool = True

    def load(self, rate_per_s: float) -> float:
        """Returns the share of its time that it is busy at a rate; above 1 it falls behind."""
        return rate_per_s / self.rate_per_s


@dataclass(frozen=True, slots=True)
class MeanWork:
    """Holds the seconds of one worker that a request takes in each stage, on average, without waits.

    read_s: of a thread that reads its media; video_s: of that, its videos
    """

    encode_s: float
    prefill_s: float
    decode_s: float
    read_s: float = 0.0
    video_s: float = 0.0

    def seconds(self, roles: frozenset[Stage]) -> float:
        parts: dict[Stage, float] = {
            "encode": self.encode_s, "prefill": self.prefill_s, "decode": self.decode_s,
        }  # fmt: skip
        return sum(parts[stage] for stage in roles)


def mean_work(profile: Profile, deployment: Deployment, jobs: Sequence[Job], slo: SLO) -> MeanWork:
    """Returns the least cost of a request: batches as full as allowed, and no waits."""
    encode = _fastest(profile, deployment, "encode").encode.cost
    prefill = _fastest(profile, deployment, "prefill").prefill.cost
    decode = _fastest(profile, deployment, "decode").decode.cost
    batch_size = _largest_batch(profile, deployment, slo)
    step_s = decode.seconds(batch_size) / batch_size
    encode_s = prefill_s = read_ticks = video_ticks = 0.0
    for job, known in _with_known(jobs, has_caches=deployment.enable_prefix_caching):
        total = job.num_prompt_tokens
        if not known:
            encode_s += encode.per_unit_s * job.num_patches
            read_ticks += sum(group.decode_ticks for group in job.groups)
            video_ticks += sum(group.decode_ticks for group in job.groups if group.is_video)
        pairs = (total * (total + 1) - known * (known + 1)) / 2
        prefill_s += prefill.per_unit_s * (total - known) + prefill.per_item_s * pairs
    most_tokens = 1.0 if deployment.drafts is None else deployment.drafts.most_tokens  # of a pass
    decode_s = sum(
        (job.output_tokens - 1)
        / most_tokens
        * (step_s + decode.per_item_s * (job.num_prompt_tokens + job.output_tokens / 2))
        for job in jobs
    )
    totals_s = (encode_s, prefill_s, decode_s, read_ticks / TICKS_PER_S, video_ticks / TICKS_PER_S)
    return MeanWork(*(total_s / len(jobs) for total_s in totals_s))


def _with_known(jobs: Iterable[Job], *, has_caches: bool) -> Iterator[tuple[Job, int]]:
    """Yields jobs, and the tokens of their prompts that caches have which forget nothing."""
    seen: set[tuple[bool, int]] = set()
    for job in jobs:
        key = (True, job.media_key) if job.groups else (False, job.text_key)
        known = job.num_visual_tokens if job.groups else job.num_prompt_tokens - 1
        yield job, known if has_caches and key in seen else 0
        seen.add(key)


def _fastest(profile: Profile, deployment: Deployment, stage: Stage) -> Profile:
    """Returns the profile of the workers that have the most devices for a stage."""
    groups = deployment.topology.groups
    return profile.on(max(deployment.degree(group.roles) for group in groups if stage in group.roles))


def _largest_batch(profile: Profile, deployment: Deployment, slo: SLO) -> int:
    """Returns the sequences in a step: as the slots allow, and as the objective for output tokens does."""
    batch_size = max(deployment.decode.max_num_seqs, deployment.language.max_num_seqs)
    limit_s = slo.tpot_s
    decode = _fastest(profile, deployment, "decode").decode.cost
    while limit_s is not None and batch_size > 1 and decode.seconds(batch_size) > 2 * limit_s:
        batch_size -= 1
    return batch_size


def bounds(
    profile: Profile,
    deployment: Deployment,
    jobs: Sequence[Job],
    slo: SLO,
    work: MeanWork | None = None,
) -> list[Bound]:
    """Returns what limits the rate, the tightest first.

    jobs: at least one, which stand for all
    work: of a request, where it is known; by default `mean_work`
    """
    work = work or mean_work(profile, deployment, jobs, slo)
    found = [*_of_workers(profile, deployment, work), *_of_threads(deployment, work)]
    return sorted(found, key=lambda each: each.rate_per_s)


def _of_workers(profile: Profile, deployment: Deployment, work: MeanWork) -> Iterator[Bound]:
    """Yields the bound of each set of stages that takes time.

    The workers do any of the stages, so that nobody else does any of these seconds. One that encodes beside
    other stages of the set counts for as many as do the same in turns.
    """
    for mask in range(1, 8):
        chosen = frozenset(stage for place, stage in enumerate(STAGES) if mask >> place & 1)
        groups = [group for group in deployment.topology.groups if group.roles & chosen]
        seconds = work.seconds(chosen)
        if seconds > 0:
            speed = sum(
                group.num_workers * _speed(deployment, group.roles & chosen, profile.beside)
                for group in groups
            )
            kinds = " and ".join(group.letters for group in groups)
            yield Bound(f"{kinds} workers", speed / seconds, _CURES.get(role_letters(chosen), _MORE_DEVICES))


def _speed(deployment: Deployment, roles: frozenset[Stage], beside: float) -> float:
    """Returns the seconds of work that a worker does in a second, at most."""
    return max(1.0, 2 / beside) if deployment.encodes_beside(roles) else 1.0


def _of_threads(deployment: Deployment, work: MeanWork) -> Iterator[Bound]:
    if work.read_s:
        threads = deployment.cpu_threads
        of_all = (threads + deployment.gpu_threads) / work.read_s
        beside = f" and {deployment.video_gpus} GPUs" if deployment.video_gpus else ""
        yield Bound(
            f"reading media: {threads} threads{beside}",
            min(of_all, threads / max(1e-12, work.read_s - work.video_s)),
            f"one medium takes a thread {work.read_s:.3g} s; raise --cpu-threads on more cores, or send "
            "smaller or shorter videos",
            grows=False,
        )


def outside(profile: Profile, deployment: Deployment, jobs: Sequence[Job]) -> Iterator[str]:
    """Yields what these requests need of a profile beyond the range that it was measured or computed for."""
    longest = max(job.num_prompt_tokens for job in jobs)
    chunk = min(longest, deployment.language.max_chunk_tokens)
    largest = max((group.media.num_patches for job in jobs for group in job.groups), default=0)
    batch = deployment.decode.max_num_seqs
    for name, table, units, items in (
        ("encode", profile.encode, largest, 0),
        ("prefill", profile.prefill, chunk, chunk * (longest - chunk / 2)),
        ("decode", profile.decode, batch, batch * longest),
    ):
        for unit, value, known in (
            (table.units, units, table.valid_units),
            (table.items, items, table.valid_items),
        ):
            if value > known.high > 0:
                yield (
                    f"{name} is extrapolated: {value:,.0f} {unit} are needed, the profile goes to "
                    f"{known.high:,.0f}"
                )
