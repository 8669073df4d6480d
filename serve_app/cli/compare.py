"""The command `epd bench compare`."""

from __future__ import annotations

import asyncio
import platform
import re
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError
from rich.table import Table

from epd import __version__, console
from epd.bench.bench import Client
from epd.bench.client import ChatClient
from epd.bench.compare import Case, Comparison, Serve, Served, dump, load
from epd.bench.compare_report import (
    Row,
    cell_rows,
    goodput_rows,
    lines_of,
    plot,
    rate_rows,
    regret_rows,
    summary,
)
from epd.bench.media import MediaLibrary
from epd.client.endpoint import find_model, parse_endpoints
from epd.console import note
from epd.errors import RequestError
from epd.late_module import LateModule
from epd.machine import usable_cpus
from epd.planning.replay import group_tokens, replayed, scaled
from epd.profiles.files import load_profile
from epd.profiles.profile import Profile
from epd.serve_app.cli.options import Plot, Seed
from epd.serve_app.cli.traffic_options import AskedModel, Attainment, BenchKey, MediaDir, SloTpot, SloTtft
from epd.video.demo_video import write_scene
from epd.workload.comparison import Layout, Question, Round, Traffic
from epd.workload.config import load_workload
from epd.workload.metrics import SLO

if TYPE_CHECKING:
    from epd.serve_app.local import paced_layouts
else:  # torch, which URLs do without
    paced_layouts = LateModule("epd.serve_app.local.paced_layouts")

_Layouts = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="LAYOUT...",
        help="8x1epd, 8epd, 2e5p1d, 2e5p1d+roles, 8epd+chunk=512, or NAME=URL,URL of servers that run.",
    ),
]
_Workloads = Annotated[
    list[str] | None,
    typer.Option("--workload", metavar="NAME", help="text, images, video, mixed, or a file; repeated."),
]
_Rates = Annotated[
    list[str] | None,
    typer.Option(
        "--rate", metavar="R", help="Requests per second: 4, or 1..16 for 1, 2, 4, 8, 16; repeated."
    ),
]
_NumRequests = Annotated[int | None, typer.Option(metavar="N", min=1, help="Requests of a round.")]
_Rounds = Annotated[int, typer.Option(metavar="N", help="Rounds of each layout and rate, each new content.")]
_Paced = Annotated[
    str | None,
    typer.Option(
        "--paced",
        metavar="PROFILE",
        help="Run topologies here, each worker as if it had a device of this profile. Needs a quiet machine, "
        "or --scale and --dilate.",
    ),
]
_Profile = Annotated[
    str | None, typer.Option("--profile", metavar="PROFILE", help="Costs of servers that run, for the price.")
]
_Scale = Annotated[
    int,
    typer.Option(
        "--scale",
        metavar="N",
        min=1,
        max=1024,
        help="With --paced: a patch or token of the small model stands for N of the device's.",
    ),
]
_Dilate = Annotated[
    float,
    typer.Option(metavar="N", min=0.001, help="With --paced: how much slower all goes than on the devices."),
]
_Devices = Annotated[
    int | None, typer.Option("--num-devices", metavar="N", min=1, help="Devices of servers that run.")
]
_Price = Annotated[
    float | None, typer.Option("--price-per-hour", metavar="P", help="Of a device; else the profile's.")
]
_Again = Annotated[
    Path | None,
    typer.Option("--again", metavar="FILE", help="File of an earlier comparison: its question again."),
]
_Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="FILE",
        help="File of the comparison, with all that repeats it. If it is there, its rounds are kept.",
    ),
]
# Columns that a terminal has no room for; the file has them.
_LONG = ("rounds", "simulated TTFT", "simulated TPOT", "errors")
_RATES = re.compile(r"([0-9.]+)\.\.([0-9.]+)")
_MAX_RATES = 64


def compare(
    layouts: _Layouts = None,
    workload: _Workloads = None,
    rate: _Rates = None,
    num_requests: _NumRequests = None,
    slo_ttft_s: SloTtft = None,
    slo_tpot_s: SloTpot = None,
    attainment: Attainment = 0.9,
    rounds: _Rounds = 3,
    seed: Seed = 0,
    paced: _Paced = None,
    scale: _Scale = 1,
    dilate: _Dilate = 1.0,
    profile: _Profile = None,
    num_devices: _Devices = None,
    price_per_hour: _Price = None,
    model: AskedModel = "",
    api_key: BenchKey = None,
    media_dir: MediaDir = None,
    again: _Again = None,
    out: _Out = None,
    plot_file: Plot = None,
) -> None:
    """Compare layouts of equal devices under the same traffic.

    An open loop: each layout gets the same requests at the same times, at rates up to where it is saturated.
    With --paced the layouts run here, with the embedded model, and the simulator's figures stand beside.
    Servers that run may be of any maker. Layouts that cannot run at once are measured one call after the
    other, into the same --out.
    """
    if again is not None:
        question = load(again).question
    else:
        price = price_per_hour or (load_profile(name).price_per_hour if (name := paced or profile) else None)
        question = _question(
            layouts=layouts or (),
            traffic=[
                Traffic(
                    workload=load_workload(each, {"num_requests": num_requests} if num_requests else None),
                    rates=_rates(rate or ()),
                    slo=SLO(slo_ttft_s, slo_tpot_s),
                    dilate=dilate if paced else 1.0,
                )
                for each in workload or ["images"]
            ],
            rounds=rounds,
            seed=seed,
            attainment=attainment,
            profile=paced or profile,
            is_paced=paced is not None,
            patches=scale,
            tokens=scale,
            num_devices=num_devices,
            price_per_hour=price,
        )
    found = continued(question, out)
    run_all(found, question.layouts, out, media_dir, lambda: _started(question, model, api_key))
    print_comparison(found)
    if plot_file is not None:
        plot(found, plot_file)


def _question(**fields: Any) -> Question:
    try:
        return Question(**fields)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise RequestError(
            f"received a comparison whose {where} is wrong ({first['msg']}); change it"
        ) from None


def _rates(texts: Sequence[str]) -> tuple[float, ...]:
    """Returns rates, each once. Raises RequestError for none and for what is no rate."""
    found = list[float]()
    for text in texts:
        ends = _RATES.fullmatch(text)
        low, high = ends.groups() if ends else (text, text)
        try:
            rate, last = float(low), float(high)
        except ValueError:
            rate = last = 0.0
        while 0 < rate <= last < float("inf") and len(found) < _MAX_RATES:
            found.append(rate)
            rate *= 2
    if not found:
        given = ", ".join(texts) or "none"
        raise RequestError(
            f"received the rates {given}; allowed: numbers above 0, or 1..16; give --rate 1..16"
        )
    return tuple(sorted(set(found)))


def continued(question: Question, out: Path | None) -> Comparison:
    """Returns the comparison with the rounds that the file has already. Raises RequestError for another one.

    Layouts may differ: those of the file and those that are asked for stand in one comparison.
    """
    question.parsed()
    if out is None or not out.exists():
        return Comparison(question)
    before = load(out)
    names = tuple(dict.fromkeys((*before.question.layouts, *question.layouts)))
    if before.question.model_copy(update={"layouts": question.layouts}) != question:
        raise RequestError(
            f"received '{out}', which has another question; allowed: a new file, or the same options but for "
            "the layouts; name another --out, or give --again with it"
        )
    found = Comparison(question.model_copy(update={"layouts": names}), before.rounds.values())
    found.simulated = before.simulated
    return found


def _started(question: Question, model: str, api_key: str | None) -> Serve:
    """Returns what serves a layout: here, or the servers that run."""
    if question.is_paced:
        return paced_serve(question)

    @asynccontextmanager
    async def serve(layout: Layout, traffic: Traffic) -> AsyncIterator[Served]:  # noqa: ARG001 - as it is
        async with AsyncExitStack() as stack:
            clients: list[tuple[str, Client]] = []
            for url in layout.urls:
                (endpoint,) = parse_endpoints([url], model=model, api_key=api_key)
                client = ChatClient(endpoint, timeout_s=question.timeout_s)
                name = endpoint.model or await asyncio.to_thread(find_model, endpoint)
                clients.append((name, await stack.enter_async_context(client)))
            yield _Running(clients)

    return serve


def paced_serve(question: Question) -> Serve:
    """Returns what serves the layouts of a question here."""
    return paced_layouts.paced_layouts(question, costs_of(question))


def costs_of(question: Question) -> Profile:
    assert question.profile is not None
    return scaled(load_profile(question.profile), question.patches, question.tokens)


@dataclass(frozen=True, slots=True)
class _Running:
    """Holds servers that run. Their passes are never late."""

    clients: Sequence[tuple[str, Client]]
    late_share: float = 0.0

    def begin(self) -> None:
        """Counts nothing."""


def run_all(
    found: Comparison,
    layouts: Sequence[str],
    out: Path | None,
    media_dir: Path | None,
    start: Callable[[], Serve],
) -> None:
    """Runs the rounds that are not known, and keeps each when it ends.

    layouts: to run, of those of the comparison
    start: returns what serves a layout; called if there is anything to run
    """
    serve: Serve | None = None
    names = {Layout.parse(each).name for each in layouts}
    folder = nullcontext(media_dir) if media_dir else tempfile.TemporaryDirectory(prefix="epd-bench-")
    with folder as name:
        library = MediaLibrary(Path(name), write_scene)
        for case in found.cases(names):
            serve = serve or start()
            _run_case(found, case, serve, library)
            if out is not None:
                part = out.with_suffix(".part")
                part.write_text(dump(found, made(), summary(found)), encoding="utf-8")
                part.replace(out)


def _run_case(found: Comparison, case: Case, serve: Serve, library: MediaLibrary) -> None:
    requests = found.requests(case)
    with console.progress_bar("drawing frames") as show:
        library.draw([*requests, *found.warm_requests(case)], show)
    one = asyncio.run(found.run(case, serve, library))
    found.rounds[one.key] = one
    if found.question.is_paced:
        found.simulated[one.key] = simulated(found, case)
    kept = "" if one.counts else f"; not reported: {one.late_share:.1%} late passes"
    note(
        f"{case.traffic.name}, {case.layout.name}, {case.rate:g}/s, round {case.index + 1}: "
        f"{one.attained(case.traffic.slo):.0%} kept the objectives{kept}"
    )


def simulated(found: Comparison, case: Case) -> Round:
    """Returns what the simulator says of a round of paced devices."""
    question, requests, warm_requests = found.question, found.requests(case), found.warm_requests(case)
    maker = paced_layouts.PacedJobs(paced_layouts.MODEL, group_tokens(question.tokens))
    kinds = [each.shape.kind for each in requests]
    jobs, warm = maker.jobs(requests), maker.jobs(warm_requests)
    return Round(*case.key, replayed(costs_of(question), case.layout, question, jobs, kinds, warm))


def made() -> dict[str, Any]:
    """Returns when and where a comparison was made."""
    return {
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "epd": __version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "cores": usable_cpus(),
    }


def print_comparison(found: Comparison) -> None:
    """Prints who wins and loses, then each rate."""
    out = console.stdout_console()
    for title, rows in (
        ("Goodput", goodput_rows(found)),
        ("Rates", rate_rows(found)),
        ("Cells", cell_rows(found) if found.simulated else []),
        ("Regret", regret_rows(found)),
    ):
        if rows:
            out.print(_table(title, rows))
            out.print()
    for line in lines_of(found):
        out.print(line)


def _table(title: str, rows: Sequence[Row]) -> Table:
    names = [each for each in rows[0] if each not in _LONG]
    table = Table(*names, title=title, title_justify="left", box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(str(row[each]) for each in names))
    return table
