"""Simulates the rounds of a comparison of paced devices: the same requests, at the same times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from epd.encode.sharding import DEFAULT_BATCH_PATCHES, GROUP_TOKENS
from epd.kv.pass_limits import SchedulerConfig
from epd.profiles.profile import Profile
from epd.simulate.clock import TICKS_PER_S, ticks_of
from epd.simulate.deployment import Deployment
from epd.simulate.placement import Elasticity
from epd.simulate.requests import Job
from epd.simulate.simulation import Simulation
from epd.topology import Topology
from epd.workload.comparison import Layout, Outcome, Question

# Of keys and values, and of embeddings, tokens of the small model: never what binds.
_ROOM = 32_768
READERS = 64  # threads that read media, which takes no time in a simulation
_DEFAULT = SchedulerConfig()
_WARM_TICKS = ticks_of(600.0)  # for one request that comes before all others


def scaled(profile: Profile, patches: int, tokens: int) -> Profile:
    """Returns the costs of a device by the patches and tokens of a smaller model.

    patches, tokens: of the device's model, that one of the smaller model stands for
    """
    encode, prefill, decode = profile.encode.cost, profile.prefill.cost, profile.decode.cost
    return replace(
        profile,
        encode=replace(profile.encode, cost=replace(encode, per_unit_s=patches * encode.per_unit_s)),
        prefill=replace(
            profile.prefill,
            cost=replace(
                prefill,
                per_unit_s=tokens * prefill.per_unit_s,
                per_item_s=tokens**2 * prefill.per_item_s,
                read_s=tokens * prefill.read_s,
                active_share=1 - (1 - prefill.active_share) ** tokens,
            ),
        ),
        decode=replace(profile.decode, cost=replace(decode, per_item_s=tokens * decode.per_item_s)),
    )


def group_tokens(tokens: int) -> int:
    """Returns the visual tokens of a group, of a small model that stands for one with more."""
    return max(1, GROUP_TOKENS // tokens)


def paced_deployment(layout: Layout, question: Question) -> Deployment:
    """Returns one server of a layout, with the limits that `epd serve` has, by the small model's tokens.

    Merged workers encode in turns with their other stages, since a pause is no work beside others.
    """
    assert isinstance(layout.topology, Topology)
    chunk = max(1, (layout.chunk_tokens or _DEFAULT.max_chunk_tokens) // question.tokens)
    seqs = _DEFAULT.max_num_seqs
    limits = SchedulerConfig(max(chunk, seqs), seqs, chunk)
    return Deployment(
        layout.topology,
        language=limits,
        decode=limits,
        max_batch_patches=max(1, DEFAULT_BATCH_PATCHES // question.patches),
        cpu_threads=READERS,
        kv_tokens=_ROOM,
        num_embeddings=_ROOM,
        enable_prefix_caching=True,
        encode_beside=False,
    )


def replayed(
    profile: Profile,
    layout: Layout,
    question: Question,
    jobs: Sequence[Job],
    kinds: Sequence[str],
    warm: Sequence[Job] = (),
) -> tuple[Outcome, ...]:
    """Returns what the simulator says of a round.

    profile: of `scaled`
    jobs: the requests, by the small model's patches and tokens; kinds: of each, as in `RequestShape`
    warm: requests before them, one after the other
    Raises InfeasibleError where a worker does not fit its device.
    """
    deployment = paced_deployment(layout, question)
    found: dict[int, Outcome] = {}
    for copy in range(layout.num_copies):
        own = jobs[copy :: layout.num_copies]
        if own:
            elasticity = Elasticity() if layout.has_roles else None
            before = [
                replace(job, index=-1 - number, due=number * _WARM_TICKS)
                for number, job in enumerate(warm[copy :: layout.num_copies])
            ]
            after = [replace(job, due=job.due + len(before) * _WARM_TICKS) for job in own]
            rows = Simulation(profile, deployment, elasticity=elasticity).run([*before, *after]).rows
            told = [row for row in rows if row["index"] >= 0]
            pairs = zip(told, kinds[copy :: layout.num_copies], strict=True)
            found |= {int(row["index"]): _outcome(row, kind) for row, kind in pairs}
    return tuple(found[job.index] for job in jobs)


def _outcome(row: Mapping[str, int], kind: str) -> Outcome:
    if row["is_refused"]:
        return Outcome(kind, error="refused")
    first, num_gaps = int(row["first_token"]), int(row["output_tokens"]) - 1
    return Outcome(
        kind,
        (first - int(row["due"])) / TICKS_PER_S,
        (int(row["end"]) - first) / num_gaps / TICKS_PER_S if num_gaps else None,
        (int(row["end"]) - int(row["due"])) / TICKS_PER_S,
        int(row["prompt_tokens"]),
    )
