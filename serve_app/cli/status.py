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
from epd.errors import RequestError
from epd.serve_app.cli.options import ApiKey, IsJson
from epd.serve_app.observability.figures import Figures, Scrape
from epd.serve_app.worker_info import MemoryUse

_Url = Annotated[str, typer.Option(metavar="URL", envvar="EPD_URL", help="Server of epd serve.")]

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
    watch: _Watch = False,
    as_json: IsJson = False,
) -> None:
    """Show the workers, queues and traffic of a server."""
    (endpoint,) = parse_endpoints([url], api_key=api_key)
    if watch:
        with suppress(KeyboardInterrupt):
            _watch(endpoint, as_json=as_json)
        return
    now = _get(endpoint, "/v1/epd/status")
    summary = _summary(_get(endpoint, "/v1/epd/load")["requests"])
    drafted = _drafted(_scraped(endpoint))
    if as_json:
        console.print_json({"status": now, "load": summary, "drafts": drafted})
        return
    _print_workers(now)
    print(*_draft_lines(drafted), sep="", end="")
    _print_changes(now)
    print(_traffic_line(summary))


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
