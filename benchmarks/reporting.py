"""What the benchmarks share: where and with what was measured, tables, and files of results."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from epd.machine import usable_cpus

RESULTS = Path(__file__).resolve().parent / "results"
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Section:
    """A table of a benchmark. run: measures its rows."""

    title: str
    run: Callable[[], list[Row]]


def setting(packages: Sequence[str], **more: Any) -> Row:
    """Date, machine, versions."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": cpu_name(),
        "cores": usable_cpus(),
        "torch_threads": torch.get_num_threads(),
        "load_average_1min": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
        **more,
    }


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of the ratios within each repeat."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def table(rows: Sequence[Row]) -> str:
    head = " | ".join(rows[0])
    body = "\n".join(f"| {' | '.join(str(value) for value in row.values())} |" for row in rows)
    return f"| {head} |\n|{'---|' * len(rows[0])}\n{body}"


def markdown(title: str, command: str, results: Mapping[str, Any], titles: Mapping[str, str]) -> str:
    lines = [f"# {title}", "", f"`{command}`", ""]
    lines += [f"- {key}: {value}" for key, value in results["setting"].items()]
    for name, heading in titles.items():
        if results.get(name):
            lines += ["", f"## {heading}", "", table(results[name])]
    return "\n".join(lines) + "\n"


def run_sections(
    name: str,
    title: str,
    sections: Mapping[str, Section],
    wanted: Sequence[str],
    here: Callable[[], Row],
    *,
    save: bool = True,
    module: str = "",
) -> None:
    """Runs the wanted sections, keeps earlier results of the others, writes results/<name>.{json,md}.

    module: of the benchmark below `benchmarks`, where it is not `name`
    """
    path = RESULTS / f"{name}.json"
    found = {section: sections[section].run() for section in wanted}
    results: Row = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    results |= found
    results = {"setting": here(), **{key: results[key] for key in sections if key in results}}
    print(json.dumps(results, indent=1))
    if save:
        RESULTS.mkdir(exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        titles = {key: section.title for key, section in sections.items()}
        command = f"python -m benchmarks.{module or name}"
        path.with_suffix(".md").write_text(markdown(title, command, results, titles), encoding="utf-8")
