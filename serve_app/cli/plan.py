"""The command `epd plan`, which prints plans, and answers that compare fleets. Its options come first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Self, get_args

import typer
import yaml  # type: ignore[import-untyped]  # its stubs are another package
from rich.table import Table

from epd import console
from epd.console import note
from epd.errors import InfeasibleError, RequestError
from epd.planning.asked import DEFAULT_PROFILE
from epd.planning.asked import plan as planned
from epd.planning.offers import EXPECTED_ERROR, Fleet, Objective, Offer, Wanted, compare
from epd.planning.plan import Plan
from epd.planning.question import Films, rate_of, wished
from epd.planning.report import Answer, page, shown_price
from epd.profiles.accelerators import CATALOGUE, Devices, load_devices
from epd.serve_app.cli.flags import with_options_of
from epd.serve_app.cli.options import Fps, Frames, IsJson, MaxVisualTokens, Out, Profile, _output
from epd.serve_app.cli.traffic_options import Attainment, FleetOptions
from epd.simulate.frame_choice import VideoWishes

_ASKED, _FLEETS = "What is asked", "Devices to choose from"

Gpus = Annotated[int, typer.Option(metavar="N", help="Devices to lay out, 1 to 256.")]
MinRate = Annotated[
    float | None,
    typer.Option(
        metavar="R",
        parser=rate_of,
        help="Requests that must be served: 20 a second, or 20/min, 1000/h, 5000/day.",
    ),
]
MinRetention = Annotated[
    float, typer.Option(metavar="P", help="Lowest share of visual tokens to keep; below 1 costs accuracy.")
]
MaxDegree = Annotated[
    int,
    typer.Option(
        "--max-tensor-parallel",
        metavar="N",
        help="Most devices that a worker may share its layers over: 1, 2, 4 or 8.",
    ),
]
Encoders = Annotated[
    int,
    typer.Option(metavar="N", help="Devices of another kind that encode, beside those of --gpus."),
]
EncoderProfile = Annotated[
    str | None,
    typer.Option(metavar="PROFILE", help="Profile of the devices of --encoders: as --profile."),
]
CacheSpeed = Annotated[
    float | None,
    typer.Option(
        "--cache-mb-per-s",
        metavar="N",
        min=0.001,
        help="MB a second that a disk of --cache-dir reads of media that come again.",
    ),
]
VideosPerMinute = Annotated[
    float | None,
    typer.Option(
        "--videos-per-minute",
        metavar="N",
        min=0.001,
        rich_help_panel=_ASKED,
        help="Requests a minute about one video each, instead of --workload.",
    ),
]
Minutes = Annotated[
    float, typer.Option("--minutes", metavar="M", rich_help_panel=_ASKED, help="Length of each video.")
]
VideoSize = Annotated[
    str, typer.Option("--video-size", metavar="WxH", rich_help_panel=_ASKED, help="Size of each video.")
]
VideoFps = Annotated[
    int,
    typer.Option("--video-fps", metavar="N", rich_help_panel=_ASKED, help="Frames a second of each video."),
]
AnswerTokens = Annotated[
    int, typer.Option("--answer-tokens", metavar="N", rich_help_panel=_ASKED, help="Tokens of each answer.")
]
WhatIf = Annotated[
    list[str] | None,
    typer.Option(
        "--what-if",
        metavar="NAME=VALUE",
        rich_help_panel=_ASKED,
        help="Plan the best fleet again with another frames, fps, max-visual-tokens, minutes or "
        "answer-tokens. Repeatable.",
    ),
]
PlannedModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        rich_help_panel=_FLEETS,
        help="Name of a checkpoint of docs/models.md, a folder with a config.json, or that file.",
    ),
]
FleetNames = Annotated[
    list[str] | None,
    typer.Option(
        "--fleet",
        metavar="FLEET",
        rich_help_panel=_FLEETS,
        help="Devices to compare: 8xh100, a mix 4xh100+8xl40s, or l40s for as many as are needed. "
        "Repeatable.",
    ),
]
DeviceFile = Annotated[
    Path | None,
    typer.Option(
        "--devices", metavar="FILE", rich_help_panel=_FLEETS, help="YAML file of devices and prices of yours."
    ),
]
Budget = Annotated[
    float | None,
    typer.Option(
        "--budget",
        metavar="PRICE",
        parser=lambda text: 3600 * rate_of(text),
        rich_help_panel=_FLEETS,
        help="What all devices may cost: 30/h, 20000/month.",
    ),
]
RankBy = Annotated[
    str,
    typer.Option(
        "--rank-by", metavar="WHAT", rich_help_panel=_FLEETS, help="cost or throughput: the order of fleets."
    ),
]
Report = Annotated[
    Path | None,
    typer.Option(
        "--report", metavar="FILE", callback=_output, help="Write the answer as one HTML page, to hand on."
    ),
]


# Fields that --what-if changes, of the films and of the wishes for their frames.
_BUYER_FIELDS = ("minutes", "answer_tokens")
_WISH_FIELDS = {"frames": "num_frames", "fps": "fps", "max_visual_tokens": "max_visual_tokens"}


@dataclass(frozen=True, slots=True)
class _Asked:
    """Holds what is asked for, however many devices answer it.

    options: of `epd.planning.asked.plan`, the same for all fleets
    films: None where a workload or a trace says what requests are
    """

    options: Mapping[str, Any]
    wishes: VideoWishes
    films: Films | None
    min_rate: float | None
    devices: Devices = CATALOGUE

    @property
    def asked_per_s(self) -> float | None:
        """Returns the rate that must be served."""
        return self.min_rate if self.films is None else self.films.rate_per_s

    @property
    def question(self) -> str:
        """Returns what is asked, for people."""
        traffic = self.options["trace"] or self.options["workload"] or "images"
        rate = "" if self.min_rate is None else f", {self.min_rate:.3g} a second"
        words = [str(self.films) if self.films else f"requests of {traffic}{rate}"]
        words += wished(self.wishes)
        for name, unit in (("slo_ttft_s", "to the first token"), ("slo_tpot_s", "a token after it")):
            if self.options[name] is not None:
                words.append(f"{self.options[name]:g} s {unit} for {self.options['attainment']:.0%} of them")
        return "; ".join(words)

    def plan(self, num_devices: int, profile: str, min_rate: float | None = None) -> Plan:
        """Plans with a bar on a terminal. Raises InfeasibleError."""
        workload = {} if self.films is None else self.films.workload
        with console.progress_bar(f"layouts of {num_devices} x {profile.rpartition('@')[2]}") as show:
            return planned(
                num_devices,
                profile=profile,
                min_rate=min_rate,
                wishes=self.wishes,
                devices=self.devices,
                on_progress=show,
                **self.options,
                **workload,
            )

    def changed(self, change: str) -> Self:
        """Returns what is asked with NAME=VALUE in its place. Raises RequestError."""
        name, _, text = change.partition("=")
        field = name.strip().replace("-", "_")
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        known = (*_WISH_FIELDS, *(_BUYER_FIELDS if self.films else ()))
        if field not in known or not value > 0:
            names = ", ".join(each.replace("_", "-") for each in known)
            raise RequestError(
                f"received what-if {change!r}; allowed: {names}, = and a number; try frames=64"
            )
        number: Any = value if field in ("fps", "minutes") else int(value)
        if field in _WISH_FIELDS:
            named: dict[str, Any] = {"fps": None, "num_frames": None} if field != "max_visual_tokens" else {}
            wishes = replace(self.wishes, **{**named, _WISH_FIELDS[field]: number})
            return replace(self, wishes=wishes)
        assert self.films is not None
        return replace(self, films=replace(self.films, **{field: number}))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options(FleetOptions):
    """Declares the options that `epd.planning.asked.plan` takes as they are."""

    attainment: Attainment = 0.9
    min_retention: MinRetention = 1.0
    max_tensor_parallel: MaxDegree = 1
    encoders: Encoders = 0
    encoder_profile: EncoderProfile = None
    cache_mb_per_s: CacheSpeed = None


@with_options_of(_Options)
def plan(
    gpus: Gpus = 8,
    profile: Profile = DEFAULT_PROFILE,
    model: PlannedModel = None,
    fleet: FleetNames = None,
    devices: DeviceFile = None,
    budget: Budget = None,
    rank_by: RankBy = "cost",
    videos_per_minute: VideosPerMinute = None,
    minutes: Minutes = 10.0,
    video_size: VideoSize = "1920x1080",
    video_fps: VideoFps = 30,
    answer_tokens: AnswerTokens = 200,
    fps: Fps = None,
    frames: Frames = None,
    max_visual_tokens: MaxVisualTokens = None,
    what_if: WhatIf = None,
    min_rate: MinRate = None,
    out: Out = None,
    report: Report = None,
    as_json: IsJson = False,
    **options: Any,
) -> None:
    """Search for the devices and the topology of your traffic.

    Tries every layout with its stages apart, two of them merged or all (2e1p1d, 3ep1d, 1e3pd, 2ed2p, 4epd),
    then mixes of such workers (1ed3ep, 1e2ep1d), step by step from the best. epd serve runs each of them.
    Says when not to split the stages, beside as many plain replicas. Without objectives it seeks the rate
    that is kept up with. With --fleet or --budget it compares devices. When nothing serves what is asked it
    names what limits it, and exits with code 3. --out writes a plan for epd serve --plan.
    """
    if videos_per_minute is not None and (options["workload"], options["trace"]) != (None, None):
        raise RequestError("received --videos-per-minute and a workload or a trace; give one of the two")
    if fps is not None and frames is not None:
        raise RequestError(f"received --fps {fps:g} and --frames {frames}; give one of the two")
    films = videos_per_minute and Films(videos_per_minute, minutes, video_size, video_fps, answer_tokens)
    asked = _Asked(
        options,
        VideoWishes(fps, frames, max_visual_tokens),
        films or None,
        min_rate,
        load_devices(devices),
    )
    if not (fleet or model or budget or films):
        found = asked.plan(gpus, profile, min_rate)
        if as_json:
            console.print_json(found.record())
        else:
            print_plan(found)
        _write(out, [found])
        return
    if rank_by not in get_args(Objective):
        raise RequestError(f"received --rank-by {rank_by!r}; allowed: {', '.join(get_args(Objective))}")
    wanted = Wanted(asked.asked_per_s, budget, rank_by)  # type: ignore[arg-type]  # checked above
    known_model, _, device = profile.rpartition("@")
    fleets = [Fleet.parse(text) for text in fleet or [f"{gpus}x{device}"]]
    answer = _answer(asked, wanted, model or known_model, fleets, what_if or ())
    if as_json:
        console.print_json(answer.record())
    else:
        print_answer(answer)
    if report is not None:
        report.write_text(page(answer), encoding="utf-8")
    _write(out, answer.best.plans)
    answer.check()


def _answer(
    asked: _Asked, wanted: Wanted, model: str, fleets: Sequence[Fleet], changes: Sequence[str]
) -> Answer:
    """Compares the fleets, then plans the best again with each change."""
    if not model:
        raise RequestError(
            "received fleets and the file of a profile, which is of one device; allowed: --model with "
            "fleets, or --profile MODEL@DEVICE; leave --fleet, --budget and --videos-per-minute out"
        )
    others = [(change, asked.changed(change)) for change in changes]  # refused before anything is planned

    def offers(of: _Asked, which: Sequence[Fleet]) -> list[Offer]:
        return compare(
            which,
            replace(wanted, rate_per_s=of.asked_per_s),
            lambda num, device: of.plan(num, f"{model}@{device}"),
            lambda device: of.devices.named(device).price_per_hour,
            lambda each: note(f"planning {each}"),
        )

    found = offers(asked, fleets)
    what_ifs = []
    for change, other in others:
        try:
            what_ifs.append((change, offers(other, [found[0].fleet])[0]))
        except InfeasibleError as error:
            what_ifs.append((change, Offer(found[0].fleet, reason=str(error))))
    return Answer(model, asked.question, tuple(found), asked.asked_per_s, tuple(what_ifs))


def _write(out: Path | None, plans: Sequence[Plan]) -> None:
    """Writes the plan, or one for each kind of device, with its name behind the file's."""
    if out is None:
        return
    for plan in plans:
        path = out if len(plans) == 1 else out.with_stem(f"{out.stem}-{plan.profile.device}")
        path.write_text(yaml.safe_dump(plan.record(), sort_keys=False), encoding="utf-8")


def print_plan(found: Plan) -> None:
    """Prints a plan, then its assumptions."""
    out, winner = console.stdout_console(), found.winner
    cells = f" ({', '.join(map(str, found.cells))})" if len(found.cells) > 1 or found.num_cells > 1 else ""
    out.print(f"run {found.topology}{cells}: {winner.candidate.settings}")
    kept = "that are kept up with" if found.demand.slo.is_empty else "within the objectives"
    out.print(f"  {found.goodput:.3g} requests/s {kept}, {found.per_device:.3g} per device")
    if found.cost_per_thousand is not None:
        price = shown_price(found.profile.price_per_hour, found.profile.currency)
        cost = shown_price(found.cost_per_thousand, found.profile.currency)
        out.print(f"  {cost} per thousand requests, at {price} per device and hour")
    binding = found.binding
    out.print(f"  busiest: {binding.what}, {binding.load(winner.goodput):.0%}; for more, {binding.cure}")
    for worker in found.memory:
        out.print(f"  memory of {worker}")
    out.print(found.told_verdict + (f"; {found.turns}" if found.turns else ""))
    _print_others(found)
    out.print(
        f"{found.search.num_candidates} candidates, {found.search.num_simulated} simulated; assumptions:"
    )
    for line in (*found.assumptions, EXPECTED_ERROR):
        out.print(f"  {line}")


def _print_others(found: Plan) -> None:
    """Prints the runners-up, plain replicas and goodput by number of encoders."""
    out, search = console.stdout_console(), found.search
    if search.runner_up is not None:
        loser = search.runner_up
        out.print(f"second: {loser.candidate.layout} with {loser.goodput:.3g} requests/s; {found.reason}")
    names = ("third", "fourth")
    for name, each in zip(names, search.others, strict=False):
        out.print(f"{name}: {each.candidate.layout} with {each.goodput:.3g} requests/s")
    if search.replicas is not None:
        num = found.winner.candidate.num_devices  # of its cell, which runners-up have too
        out.print(f"plain: {num} x 1epd with {num * search.replicas.goodput:.3g} requests/s")
    if search.encoder_scaling:
        steps = ", ".join(f"{count}: {value:.3g}" for count, value in search.encoder_scaling)
        out.print(f"requests/s by number of encoders, all else equal: {steps}")


def print_answer(answer: Answer) -> None:
    """Prints the question, the fleets in their order, and the plan of the best."""
    out = console.stdout_console()
    out.print(f"{answer.model}: {answer.question}")
    for line in answer.demands:
        out.print(f"  {line}")
    table = Table("fleet", "layout", box=None, pad_edge=False)
    for name in ("requests/min", "asked", "price/h", "per thousand", "kW"):
        table.add_column(name, justify="right")
    for offer in answer.offers:
        table.add_row(*_row(offer, answer))
    out.print(table)
    for offer in answer.offers:
        if offer.reason:
            out.print(f"{offer.name}: {offer.reason}")
    out.print(answer.conclusion)
    for line in (*answer.advice, *answer.what_if_lines):
        out.print(f"  {line}")
    for plan in answer.best.plans:
        print_plan(plan)


def _row(offer: Offer, answer: Answer) -> tuple[str, ...]:
    if not offer.plans:
        return offer.name, "none", "", "no", "", "", ""
    asked = "" if answer.rate_per_s is None else "yes" if offer.serves(answer.rate_per_s) else "no"
    power = "" if offer.power_kw is None else f"{offer.power_kw:.3g}"
    cost = shown_price(offer.cost_per_thousand, offer.currency)
    price = shown_price(offer.price_per_hour, offer.currency)
    return offer.name, offer.layout, f"{60 * offer.goodput:.3g}", asked, price, cost, power
