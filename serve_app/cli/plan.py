"""The command `epd plan`."""

from __future__ import annotations

from typing import Annotated

import typer
import yaml  # type: ignore[import-untyped]  # its stubs are another package

from epd import console
from epd.kv.drafting import DEFAULT_MAX_DRAFT
from epd.planning.asked import DEFAULT_PROFILE
from epd.planning.asked import plan as planned
from epd.planning.plan import Plan
from epd.serve_app.cli.options import (
    CpuThreads,
    DraftAcceptance,
    EncodesBeside,
    GroupTokens,
    IsJson,
    MaxDraft,
    Out,
    Profile,
    QuestionsPerMedia,
    RepeatRate,
    RepeatSkew,
    Seed,
    SloTpot,
    SloTtft,
    Trace,
    Workload,
)

_Gpus = Annotated[int, typer.Option(metavar="N", help="Devices to lay out, 1 to 256.")]
_Attainment = Annotated[
    float, typer.Option(metavar="P", help="Share of the requests that must meet the objectives.")
]
_MinRate = Annotated[
    float | None, typer.Option(metavar="R", help="Requests per second that the plan must serve.")
]
_MinRetention = Annotated[
    float, typer.Option(metavar="P", help="Lowest share of visual tokens to keep; below 1 costs accuracy.")
]

_MaxDegree = Annotated[
    int,
    typer.Option(
        "--max-tensor-parallel",
        metavar="N",
        help="Most devices that a worker may share its layers over: 1, 2, 4 or 8.",
    ),
]


def plan(
    gpus: _Gpus = 8,
    profile: Profile = DEFAULT_PROFILE,
    workload: Workload = None,
    trace: Trace = None,
    repeat_rate: RepeatRate = None,
    repeat_skew: RepeatSkew = None,
    questions_per_media: QuestionsPerMedia = None,
    slo_ttft_s: SloTtft = None,
    slo_tpot_s: SloTpot = None,
    attainment: _Attainment = 0.9,
    min_rate: _MinRate = None,
    min_retention: _MinRetention = 1.0,
    max_tensor_parallel: _MaxDegree = 1,
    cpu_threads: CpuThreads = None,
    encode_beside: EncodesBeside = True,
    group_tokens: GroupTokens = None,
    draft_acceptance: DraftAcceptance = 0.0,
    max_draft: MaxDraft = DEFAULT_MAX_DRAFT,
    seed: Seed = 0,
    out: Out = None,
    as_json: IsJson = False,
) -> None:
    """Search for the topology with the highest goodput per device.

    Tries every layout with its stages apart, two of them merged or all (2e1p1d, 3ep1d, 1e3pd, 2ed2p, 4epd),
    then mixes of such workers (1ed3ep, 1e2ep1d), step by step from the best. epd serve runs each of them.
    Says when not to disaggregate. When no topology meets the objectives it names what limits them, and exits
    with code 3. --out writes a plan for epd serve --plan. By default 64 threads read media, or the cores of
    the profile's machine.
    """
    with console.progress_bar("topologies") as show:
        found = planned(
            gpus,
            profile=profile,
            workload=workload,
            trace=trace,
            repeat_rate=repeat_rate,
            repeat_skew=repeat_skew,
            questions_per_media=questions_per_media,
            slo_ttft_s=slo_ttft_s,
            slo_tpot_s=slo_tpot_s,
            attainment=attainment,
            min_rate=min_rate,
            min_retention=min_retention,
            max_tensor_parallel=max_tensor_parallel,
            cpu_threads=cpu_threads,
            encode_beside=encode_beside,
            group_tokens=group_tokens,
            draft_acceptance=draft_acceptance,
            max_draft=max_draft,
            seed=seed,
            on_progress=show,
        )
    if as_json:
        console.print_json(found.record())
    else:
        _print(found)
    if out is not None:
        out.write_text(yaml.safe_dump(found.record(), sort_keys=False), encoding="utf-8")


def _print(found: Plan) -> None:
    """Prints the answer, then its assumptions."""
    out, winner = console.stdout_console(), found.winner
    cells = f" ({', '.join(map(str, found.cells))})" if len(found.cells) > 1 or found.num_cells > 1 else ""
    out.print(f"run {found.topology}{cells}: {winner.candidate.settings}")
    out.print(f"  {found.goodput:.3g} requests/s within the objectives, {found.per_device:.3g} per device")
    if found.cost_per_thousand is not None:
        price = found.profile.price_per_hour
        out.print(f"  {found.cost_per_thousand:.3g} per thousand requests, at {price:g} per device and hour")
    binding = found.binding
    out.print(f"  busiest: {binding.what}, {binding.load(winner.goodput):.0%}; for more, {binding.cure}")
    for worker in found.memory:
        out.print(f"  memory of {worker}")
    out.print(found.verdict)
    if found.search.runner_up is not None:
        loser = found.search.runner_up
        out.print(f"second: {loser.candidate.topology} with {loser.goodput:.3g} requests/s; {found.reason}")
    if found.search.encoder_scaling:
        steps = ", ".join(f"{count}: {value:.3g}" for count, value in found.search.encoder_scaling)
        out.print(f"requests/s by number of encoders, all else equal: {steps}")
    out.print(
        f"{found.search.num_candidates} candidates, {found.search.num_simulated} simulated; assumptions:"
    )
    for line in found.assumptions:
        out.print(f"  {line}")
