"""The verb `epd status`: part of the composition root, see epd/cli/program.py."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from epd import console
from epd.cli.options import SloTpot, SloTtft
from epd.errors import InfeasibleError, RequestError, UnavailableError

if TYPE_CHECKING:
    from epd.bench.endpoint import Endpoint
    from epd.planning.plan import Plan
    from epd.simulate import Job

_Url = Annotated[str, typer.Option(metavar="URL", help="Server of epd serve.")]
_ApiKey = Annotated[
    str | None, typer.Option(envvar="EPD_API_KEY", metavar="KEY", help="What the server wants to be sent.")
]
_Profile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Profile of epd profile, or MODEL@DEVICE: says what epd plan would choose for this load.",
    ),
]
_PlanS = Annotated[float, typer.Option("--plan-seconds", metavar="S", help="To search at most so long.")]
_IsJson = Annotated[bool, typer.Option("--json", help="Print one record instead of text.")]

_TIMEOUT_S = 10.0
_NUM_SHOWN = 5
# A plan needs some requests, and more than these say little more.
_LEAST_REQUESTS, _MOST_REQUESTS = 20, 250
_ATTAINMENT = 0.9
_HORIZON = 5.0  # arrivals are simulated for so many times as long as a request may take


def status(
    url: _Url = "http://127.0.0.1:8000",
    api_key: _ApiKey = None,
    profile: _Profile = None,
    slo_ttft: SloTtft = None,
    slo_tpot: SloTpot = None,
    plan_seconds: _PlanS = 60.0,
    as_json: _IsJson = False,
) -> None:
    """Show the workers, queues and traffic of a server.

    With a profile and an objective: which layout of as many workers epd plan would choose for the requests
    of the last ten minutes.
    """
    from epd.bench.endpoint import parse_endpoints

    if profile is not None and slo_ttft is None and slo_tpot is None:
        raise RequestError("a profile is given and no objective; add --slo-ttft-s or --slo-tpot-s")
    (endpoint,) = parse_endpoints([url], api_key=api_key)
    now = _get(endpoint, "/v1/epd/status")
    recent = _get(endpoint, "/v1/epd/load")["requests"]
    found, reason = None, "give --profile and an objective to be told what epd plan would choose"
    if profile is not None:
        found, reason = _plan(profile, recent, _num_workers(now), (slo_ttft, slo_tpot), plan_seconds)
    if as_json:
        plan = found.record() if found else None
        console.print_json({"status": now, "load": _summary(recent), "plan": plan, "no_plan": reason})
        return
    _print_workers(now)
    _print_changes(now)
    print(_load_line(_summary(recent)))
    print(f"plan: run {found.topology}; {found.verdict}" if found else f"plan: {reason}")


def _get(endpoint: Endpoint, path: str) -> dict[str, Any]:
    """Raises UnavailableError where nobody answers, RequestError for a server that is none of ours."""
    import httpx

    url = f"{endpoint.shown_url}{path}"
    try:
        answer = httpx.get(
            f"{endpoint.url}{path}", headers=endpoint.headers, timeout=_TIMEOUT_S, trust_env=False
        )
        answer.raise_for_status()
        record = answer.json()
    except httpx.HTTPStatusError as error:
        reason = f"status {error.response.status_code}"
        raise RequestError(f"{url} gave {reason}; it must be epd serve, see --url and --api-key") from None
    except httpx.HTTPError as error:
        raise UnavailableError(f"{url} gave {type(error).__name__}; start epd serve, or give --url") from None
    except ValueError:
        raise RequestError(f"{url} gave no JSON; it must be epd serve, see --url") from None
    assert isinstance(record, dict)
    return record


def _num_workers(now: dict[str, Any]) -> int:
    """Those that do what a topology speaks of."""
    return sum("v" not in worker["roles"] for worker in now["workers"])


# What the load asks for


def _summary(recent: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Requests, how many per second, and what they take on average."""
    if not recent:
        return {"num_requests": 0}
    seconds = max(request["age_s"] for request in recent)
    means = {
        name: round(statistics.mean(request[name] for request in recent), 1)
        for name in ("num_patches", "num_prompt_tokens", "max_tokens")
    }
    return {"num_requests": len(recent), "per_s": round(len(recent) / max(seconds, 1.0), 3), **means}


def _load_line(summary: dict[str, float]) -> str:
    if not summary["num_requests"]:
        return "load: nothing was asked for in the last ten minutes"
    return (
        f"load: {summary['num_requests']:g} requests in the last ten minutes, {summary['per_s']:g} per "
        f"second; on average {summary['num_patches']:g} patches, {summary['num_prompt_tokens']:g} prompt "
        f"tokens, answers of at most {summary['max_tokens']:g} tokens"
    )


def _plan(
    profile: str,
    recent: Sequence[dict[str, Any]],
    num_workers: int,
    objectives: tuple[float | None, float | None],
    limit_s: float,
) -> tuple[Plan | None, str]:
    """The plan, or why there is none. Raises RequestError for a profile that is none."""
    if len(recent) < _LEAST_REQUESTS:
        return None, f"{len(recent)} requests are too few to plan for, {_LEAST_REQUESTS} are needed"
    from epd.planning.goodput import Demand
    from epd.planning.plan import make_plan
    from epd.planning.search import Planner
    from epd.planning.space import Space
    from epd.profiles import load_profile
    from epd.simulate import Deployment
    from epd.topology import parse_topology
    from epd.workload.metrics import SLO

    loaded = load_profile(profile)
    jobs = _jobs(recent[-_MOST_REQUESTS:], loaded.media.merge**2)
    ttft_s, tpot_s = objectives
    longest_s = (ttft_s or 1.0) + (tpot_s or 0.05) * max(job.output_tokens for job in jobs)
    demand = Demand.of(jobs, SLO(ttft_s, tpot_s), _ATTAINMENT, _HORIZON * longest_s)
    planner = Planner(loaded, demand, Space(num_workers), Deployment(parse_topology("1epd")))
    end_s = time.monotonic() + limit_s

    def stop_in_time(_done: int, _all: int) -> None:
        if time.monotonic() > end_s:
            raise InfeasibleError(f"the search took more than {limit_s:g} s; raise --plan-seconds")

    try:
        return make_plan(planner, on_progress=stop_in_time), ""
    except InfeasibleError as error:
        return None, str(error)


def _jobs(recent: Sequence[dict[str, Any]], patches_per_token: int) -> list[Job]:
    """Requests as the simulator wants them, their media as one group each, none of it seen before."""
    from epd.profiles import MediaWork
    from epd.simulate import Job
    from epd.simulate.clock import ticks_of
    from epd.simulate.requests import GroupWork

    jobs = []
    for number, request in enumerate(recent):
        patches, num_prompt = request["num_patches"], request["num_prompt_tokens"]
        num_visual = min(patches // patches_per_token, num_prompt - 1)
        groups = (GroupWork(MediaWork(patches, num_visual), 0),) if num_visual else ()
        due = ticks_of(max(0.0, recent[0]["age_s"] - request["age_s"]))
        text = num_prompt - num_visual if groups else num_prompt
        num_output = request.get("expected_tokens") or request["max_tokens"]
        jobs.append(Job(number, due, groups, text, num_output, number, number))
    return jobs


# Text


def _print_workers(now: dict[str, Any]) -> None:
    from rich.table import Table

    ready = "ready" if now["is_ready"] else "not ready: a role has no worker"
    print(f"{now['topology']}, {ready}; {now['num_requests']} requests, {now['num_waiting']} wait for room")
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


def _share(usage: float | None) -> str:
    return "-" if usage is None else f"{usage:.0%}"


def _print_changes(now: dict[str, Any]) -> None:
    """The last decisions and switches, a line each."""
    for each in now["decisions"][-_NUM_SHOWN:]:
        print(f"{_clock(each['at_s'])} {each['verdict']}: {each['reason']}")
    for each in now["switches"][-_NUM_SHOWN:]:
        seconds = sum(each[f"{phase}_s"] for phase in ("offload", "migrate", "onload", "announce"))
        outcome = f"rolled back, {each['error']}" if each["error"] else f"done in {seconds:.2f} s"
        print(f"{_clock(each['at_s'])} {each['worker']}: {each['before']} to {each['after']}, {outcome}")


def _clock(at_s: float) -> str:
    return datetime.fromtimestamp(at_s).astimezone().strftime("%H:%M:%S")
