"""Asks our server by clients and load generators that others wrote, and checks what they get.

    make clients                                            # 1,000 requests each, 1e1p1d on Ray
    python -m benchmarks.clients --requests 20 --local      # few, and without Ray
    python -m benchmarks.clients --only openai LiteLLM      # others keep their earlier results

Each runs in an environment of its own that is made at the first time (environments.py). vLLM is not
installed: EPD_VLLM_ENVIRONMENT names an environment that has it.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from benchmarks.clients import asks
from benchmarks.clients.asks import CLIENTS, IN_FLIGHT
from benchmarks.clients.environments import Environment, NotInstalledError, environment
from benchmarks.clients.generators import GENERATORS, Order
from benchmarks.clients.questions import drawn_cases
from benchmarks.reporting import RESULTS, Row, markdown, setting

NAMES = (*CLIENTS, *GENERATORS)
_NUM_CASES = 24
_TITLES = {"clients": "Clients", "missing": "Not run", "errors": "First errors"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1000, help="of each client")
    parser.add_argument("--only", nargs="*", choices=NAMES, default=NAMES)
    parser.add_argument("--local", action="store_true", help="serve without Ray")
    parser.add_argument("--topology", default="1e1p1d")
    parser.add_argument("--no-save", action="store_true")
    args = parser.parse_args()
    results = measured(args.only, args.requests, args.topology, local=args.local)
    print(json.dumps(results, indent=1))
    if not args.no_save:
        save(results)
    sys.exit(any(row["errors of ours"] for row in results["clients"]))


def measured(names: Sequence[str], count: int, topology: str, *, local: bool) -> dict[str, list[Row]]:
    """Returns a row for each client that ran, and a reason for each that did not."""
    results: dict[str, list[Row]] = {"clients": [], "missing": [], "errors": []}
    found: dict[str, Environment] = {}
    for name in names:
        try:
            found[name] = environment("libraries" if name in CLIENTS else name)
        except NotInstalledError as error:
            results["missing"].append({"client": name, "why": str(error)})
    with (
        tempfile.TemporaryDirectory(prefix="epd-clients-") as folder,
        served(topology, local, Path(folder) / "files") as url,
    ):
        cases = drawn_cases(url, Path(folder), _NUM_CASES)
        for name, installed in found.items():
            print(f"{name}: {count} requests", file=sys.stderr)
            run = client_row if name in CLIENTS else generator_row
            row, first_error = run(
                name, Order(url, installed.programs, Path(folder), cases, count), installed
            )
            results["clients"].append(row | {"server": f"{topology}{'' if not local else ', no Ray'}"})
            results["errors"] += [{"client": name, "error": first_error}] if first_error else []
    return results


@contextmanager
def served(topology: str, local: bool, files: Path) -> Iterator[str]:
    """Runs `epd serve` on loopback while open. files: the folder for files and batches of clients."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    command = [
        sys.executable,
        "-m",
        "epd",
        "serve",
        "--port",
        port,
    ]
    command += ["--topology", topology, "--files-dir", str(files), *(["--local"] if local else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            if not any(line.startswith("ready") for line in process.stdout):
                raise RuntimeError(f"the server did not start; run epd serve --port {port} to see why")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def client_row(name: str, order: Order, installed: Environment) -> tuple[Row, str]:
    """Returns what a library's answers were like, and the first error."""
    path = order.folder / "cases.json"
    given = {"url": f"{order.url}/v1", "cases": [asdict(case) for case in order.cases]}
    path.write_text(json.dumps(given), encoding="utf-8")
    command = [str(installed.programs / "python"), asks.__file__, name, str(path)]
    before = refused(order.url)
    done = subprocess.run(
        [*command, "--requests", str(order.count)], stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    errors = found["errors"]
    row = {
        "client": name,
        "version": found["version"],
        "asked": ", ".join(f"{kind} {number}" for kind, number in found["asked"].items()),
        "requests": order.count,
        "errors of ours": max(errors.get("ours", 0), refused(order.url) - before),
        "errors of the client": errors.get("theirs", 0),
        "requests/s": round(order.count / found["seconds"], 1),
    }
    return row, "; ".join(found["examples"].values())


def generator_row(name: str, order: Order, installed: Environment) -> tuple[Row, str]:
    """Returns what a load generator counted, and the first error."""
    generator = GENERATORS[name]
    before = refused(order.url)
    report = generator.run(order)
    lost = order.count - report.num_answered - report.num_failed
    row = {
        "client": name,
        "version": installed.version(generator.package),
        "asked": generator.asked,
        "requests": order.count,
        "errors of ours": max(report.num_failed, refused(order.url) - before),
        "errors of the client": max(0, lost),
        "requests/s": round(report.requests_per_s, 1),
    }
    return row, ""


def refused(url: str) -> int:
    """Returns how many requests the server has answered with an error so far."""
    metrics = httpx.get(f"{url}/metrics", trust_env=False, timeout=None).text
    counts = re.findall(r'^epd_requests_total{status="(\d+)".*} (\S+)', metrics, re.MULTILINE)
    return sum(int(float(count)) for status, count in counts if status != "200")


def save(results: dict[str, list[Row]]) -> None:
    """Writes results/clients.{json,md}; clients that were not run keep their rows."""
    path = RESULTS / "clients.json"
    earlier: Row = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    asked = {row["client"] for rows in results.values() for row in rows}
    kept = {key: [row for row in earlier.get(key, ()) if row["client"] not in asked] for key in results}
    merged = {key: sorted(kept[key] + rows, key=_place) for key, rows in results.items()}
    here = setting(["torch", "ray"], in_flight=IN_FLIGHT)
    found = {"setting": here, **{key: rows for key, rows in merged.items() if rows}}
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    text = markdown("Clients that others wrote", "make clients", found, _TITLES)
    path.with_suffix(".md").write_text(text, encoding="utf-8")


def _place(row: Row) -> int:
    return NAMES.index(row["client"])


if __name__ == "__main__":
    main()
