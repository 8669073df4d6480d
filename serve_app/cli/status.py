"""The command `epd status`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.table import Table

from epd import console
from epd.client.endpoint import Endpoint, get, parse_endpoints
from epd.errors import InfeasibleError, RequestError
from epd.planning.plan import Plan, make_plan
from epd.planning.space import Space
from epd.planning.traffic import LEAST_REQUESTS, planner_for, recent_jobs
from epd.profiles.files import load_profile
from epd.serve_app.cli.options import ApiKey, IsJson
from epd.serve_app.cli.traffic_options import SloTpot, SloTtft
from epd.serve_app.observability.figures import Figures, Scrape
from epd.serve_app.worker_info import MemoryUse
from epd.workload.metrics import SLO

_Url = Annotated[str, typer.Option(metavar="URL", envvar="EPD_URL", help="Server of epd serve.")]
_Profile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="File of epd profile, or MODEL@DEVICE: also show what epd plan would choose for the traffic.",
    ),
]
_PlanSeconds = Annotated[float, typer.Option(metavar="S", help="Time limit for the plan search, in seconds.")]

_Watch = Annotated[
    bool,
    typer.Option("--watch", help="Show workers, rates and latencies every 2 s, until Ctrl-C."),
]

_NUM_SHOWN = 5
_WATCH_S = 2.0
_ADVICE = "start epd serve there, or change --url or --api-key"


def status(
    url: _Url = "http://127.0.0.1:8000",
    api_key: ApiKey = None,
    profile: _Profile = None,
    slo_ttft_s: SloTtft = None,
    slo_tpot_s: SloTpot = None,
    plan_seconds: _PlanSeconds = 60.0,
    watch: _Watch = False,
    as_json: IsJson = False,
) -> None:
    """Show the workers, queues and traffic of a server.

    With a profile and an objective, also shows which topology of as many workers epd plan would choose for
    the requests of the last ten minutes.
    """
    slo = SLO(slo_ttft_s, slo_tpot_s)
    if profile is not None and slo == SLO():
        raise RequestError("received a profile and no objective; add --slo-ttft-s or --slo-tpot-s")
    (endpoint,) = parse_endpoints([url], api_key=api_key)
    if watch:
        with suppress(KeyboardInterrupt):
            _watch(endpoint, as_json=as_json)
        return
    now = _get(endpoint, "/v1/epd/status")
    recent = _get(endpoint, "/v1/epd/load")["requests"]
    drafted = _drafted(_scraped(endpoint))
    found, reason = None, "give --profile and an objective to see what epd plan would choose"
    if profile is not None:
        num_workers = sum("v" not in worker["roles"] for worker in now["workers"])
        found, reason = _plan(profile, recent, num_workers, slo, plan_seconds)
    summary = _summary(recent)
    if as_json:
        plan = found.record() if found else None
        console.print_json(
            {"status": now, "load": summary, "drafts": drafted, "plan": plan, "no_plan": reason}
        )
        return
    _print_workers(now)
    print(*_draft_lines(drafted), sep="", end="")
    _print_changes(now)
    print(_traffic_line(summary))
    print(f"plan: run {found.topology}; {found.verdict}" if found else f"plan: {reason}")


def _watch(endpoint: Endpoint, *, as_json: bool) -> None:
    """Shows workers, rates and latencies again and again: each front's between two answers of its own."""
    before: dict[str, Scrape] = {}
    while True:
        now = _get(endpoint, "/v1/epd/status")
        scrape = _scraped(endpoint)
        last = before.get(scrape.front)
        figures = None if last is None else Figures.between(last, scrape)
        before[scrape.front] = scrape
        if as_json:
            console.print_json({"status": now, "figures": figures and asdict(figures)})
        else:
            console.stdout_console().clear()  # on a terminal
            _print_workers(now, is_brief=True)
            print(figures.line() if figures else f"rates and latencies follow in {_WATCH_S:g} s", flush=True)
        time.sleep(_WATCH_S)


def _scraped(endpoint: Endpoint) -> Scrape:
    """Raises as `_get`."""
    return Scrape(get(endpoint, "/metrics", _ADVICE, bad_answer=RequestError).text)


def _get(endpoint: Endpoint, path: str) -> dict[str, Any]:
    """Raises UnavailableError when nothing answers, RequestError when the server is not epd serve."""
    answer = get(endpoint, path, _ADVICE, bad_answer=RequestError)
    try:
        record = answer.json()
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise RequestError(f"{endpoint.shown_url}{path} gave no JSON; {_ADVICE}")
    return record


def _plan(
    profile: str, recent: Sequence[Mapping[str, Any]], num_workers: int, slo: SLO, limit_s: float
) -> tuple[Plan | None, str]:
    """Returns a plan, or the reason that there is no plan. Raises RequestError for an invalid profile."""
    if len(recent) < LEAST_REQUESTS:
        return None, f"received {len(recent)} requests; a plan needs at least {LEAST_REQUESTS}"
    loaded = load_profile(profile)
    planner = planner_for(loaded, recent_jobs(loaded, recent), slo, Space(num_workers))
    end_s = time.monotonic() + limit_s

    def stop_in_time(_done: int, _all: int) -> None:
        if time.monotonic() > end_s:
            raise InfeasibleError(f"the search took more than {limit_s:g} s; raise --plan-seconds")

    try:
        return make_plan(planner, on_progress=stop_in_time), ""
    except InfeasibleError as error:
        return None, str(error)


def _summary(recent: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The number of requests, how many came per second, and their mean sizes."""
    if not recent:
        return {"num_requests": 0}
    seconds = max(request["age_s"] for request in recent)
    means = {
        name: round(statistics.mean(request[name] for request in recent), 1)
        for name in ("num_patches", "num_prompt_tokens", "max_tokens")
    }
    return {"num_requests": len(recent), "per_s": round(len(recent) / max(seconds, 1.0), 3), **means}


def _traffic_line(summary: Mapping[str, float]) -> str:
    if not summary["num_requests"]:
        return "traffic: no requests in the last ten minutes"
    return (
        f"traffic: {summary['num_requests']:g} requests in the last ten minutes, {summary['per_s']:g} per "
        f"second; on average {summary['num_patches']:g} patches, {summary['num_prompt_tokens']:g} prompt "
        f"tokens, answers of at most {summary['max_tokens']:g} tokens"
    )


def _print_workers(now: dict[str, Any], *, is_brief: bool = False) -> None:
    """Prints a table of workers. is_brief: without what each has room for and how it sends."""
    ready = "ready" if now["is_ready"] else "not ready: a role lacks workers"
    print(f"{now['topology']}, {ready}; {now['num_requests']} requests, {now['num_waiting']} waiting")
    table = Table("worker", "roles", box=None, pad_edge=False)
    for name in ("waiting", "running", "KV cache", "encoder cache", "switches"):
        table.add_column(name, justify="right")
    for worker in now["workers"]:
        state = "" if worker["is_alive"] else " (lost)"
        state = " (switching)" if worker["is_switching"] else state
        table.add_row(
            worker["name"],
            worker["roles"] + state,
            str(worker["num_waiting"]),
            str(worker["num_running"]),
            _share(worker["kv_usage"]),
            _share(worker["encoder_cache_usage"]),
            str(worker["num_role_switches"]),
        )
    console.stdout_console().print(table)
    for worker in () if is_brief else now["workers"]:
        if worker["memory"]:
            print(f"{worker['name']} has {MemoryUse(**worker['memory']).line()}")
        if worker["transports"]:
            print(f"{worker['name']} sends by {_ways(worker['transports'])}")


def _drafted(scrape: Scrape) -> dict[str, float]:
    """Returns what was drafted: see `SERVICE_COUNTERS`."""
    found = scrape.sums("epd_spec_decode_num_")
    return {name.removesuffix("_total"): total for name, total in found.items() if name.endswith("_total")}


def _draft_lines(drafted: Mapping[str, float]) -> list[str]:
    """Returns a line about drafts; none if there are none."""
    num_drafts = drafted.get("drafts", 0)
    if not num_drafts:
        return []
    tokens, accepted = drafted["draft_tokens"], drafted["accepted_tokens"]
    per_pass = f"{accepted / num_drafts:.2f} in each pass that checked a draft"
    return [f"drafts: {accepted:g} of {tokens:g} drafted tokens accepted, {per_pass}\n"]


def _ways(transports: Mapping[str, str]) -> str:
    """Returns the workers that data went to, by the way it took last: "shared memory to d0, d1"."""
    ways: dict[str, list[str]] = {}
    for name, way in sorted(transports.items()):
        ways.setdefault(way, []).append(name)
    return "; ".join(f"{way} to {', '.join(names)}" for way, names in sorted(ways.items()))


def _share(usage: float | None) -> str:
    return "-" if usage is None else f"{usage:.0%}"


def _print_changes(now: dict[str, Any]) -> None:
    """Prints advised replicas, and the last decisions and switches, a line each."""
    for deployment, each in now["advice"].items():
        print(f"{_clock(each['at_s'])} {deployment}: {each['reason']}")
    for each in now["decisions"][-_NUM_SHOWN:]:
        print(f"{_clock(each['at_s'])} {each['verdict']}: {each['reason']}")
    for each in now["switches"][-_NUM_SHOWN:]:
        seconds = sum(each[f"{phase}_s"] for phase in ("offload", "migrate", "onload", "announce"))
        outcome = f"rolled back, {each['error']}" if each["error"] else f"done in {seconds:.2f} s"
        print(f"{_clock(each['at_s'])} {each['worker']}: {each['before']} to {each['after']}, {outcome}")


def _clock(at_s: float) -> str:
    return datetime.fromtimestamp(at_s).astimezone().strftime("%H:%M:%S")
