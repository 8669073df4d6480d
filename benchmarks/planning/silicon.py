"""Whether profiles from published tables of kernels agree with what was measured.

    python -m benchmarks.planning.silicon FOLDER

FOLDER is a copy of github.com/ai-dynamo/aiconfigurator. Nothing of it is fitted to the measurements, each row
of which is listed: our H100 (qwen2.5-vl-7b, benchmarks/results/gpu_profile.json), and servers of vLLM that
AIConfigurator lists, as far as 16-bit models without experts go: Qwen3-32B on 2 to 8 H100, whose language
model is qwen3-vl-32b's. There a number of users ask again as soon as they are answered, texts of one length.
Simulated are ten requests of each user; the first ones, which come at once, are not counted.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.reporting import RESULTS, Row, Section, run_sections, setting
from epd.bench.compare_report import p90_of
from epd.kv.scheduling import SchedulerConfig
from epd.profiles.files import load_profile
from epd.profiles.profile import Profile
from epd.profiles.silicon import load_silicon, silicon_profile
from epd.simulate import Deployment
from epd.simulate.clock import TICKS_PER_S, EventPriority
from epd.simulate.requests import Job, RequestState
from epd.simulate.simulation import Simulation
from epd.topology import parse_topology

SERVED = {"model_path": "Qwen/Qwen3-32B", "system": "h100_sxm", "backend": "vllm", "mode": "agg"}
SERVED_AS = "qwen3-vl-32b"
_TURNS = 10  # requests of each user
_LIMITS = SchedulerConfig(8192, 256, 8192)  # vLLM's defaults on such a device
MODEL, OURS = "qwen2.5-vl-7b", RESULTS / "gpu_profile.json"
DEVICES = ("h100", "h200", "b200", "gb200", "l40s")
STAGES = ("encode", "prefill", "decode")


def held_out_rows(tables: Profile, ours: Profile) -> Iterator[Row]:
    """Yields each measured point, beside the profile of the tables and that of the data sheet."""
    sheet = load_profile(f"{MODEL}@h100")
    for stage in STAGES:
        for point in getattr(ours, stage).measurements:
            measured_s = point.median_s
            found_s, sheet_s = (
                getattr(each, stage).cost.seconds(point.units, point.items) for each in (tables, sheet)
            )
            yield {
                "stage": stage,
                "units": f"{point.units:.0f} {getattr(ours, stage).units}",
                "measured ms": f"{1000 * measured_s:.2f}",
                "tables ms": f"{1000 * found_s:.2f}",
                "error": f"{found_s / measured_s - 1:+.0%}",
                "data sheet": f"{sheet_s / measured_s - 1:+.0%}",
            }


def error_rows(rows: Sequence[Row]) -> Iterator[Row]:
    """Yields the errors by stage, without their signs."""
    for stage in (*STAGES, "all"):
        for name in ("error", "data sheet"):
            own = [abs(int(row[name].rstrip("%"))) for row in rows if stage in (row["stage"], "all")]
            yield {
                "stage": stage,
                "of": name,
                "points": len(own),
                "median %": median(own),
                "highest %": max(own),
            }


class ClosedLoop(Simulation):
    """Simulates users of texts, each of which asks again as soon as it is answered."""

    def __init__(self, profile: Profile, degree: int, jobs: Sequence[Job]) -> None:
        """jobs: that come later, whenever one before has ended"""
        limits: dict[str, Any] = {"language": _LIMITS, "decode": _LIMITS}
        super().__init__(profile, Deployment(parse_topology("1epd"), degrees=(("epd", degree),), **limits))
        self._later = iter(jobs)

    def _record(self, state: RequestState, *, is_refused: bool = False) -> None:
        super()._record(state, is_refused=is_refused)
        job = next(self._later, None)
        if job is not None:
            self._num_open += 1
            job = replace(job, due=self.events.now)
            self.events.push(job.due, EventPriority.ARRIVAL, partial(self._arrive, job, iter(())))


def served(profile: Profile, degree: int, users: int, prompt: int, answer: int) -> tuple[float, float]:
    """Returns mean TTFT and TPOT in seconds. prompt, answer: tokens of each request"""
    jobs = [Job(number, 0, (), prompt, answer, number, number) for number in range(_TURNS * users)]
    rows = ClosedLoop(profile, degree, jobs[users:]).run(jobs[:users]).rows
    counted = [row for row in rows if row["index"] >= users]
    first_s = fmean((row["first_token"] - row["due"]) / TICKS_PER_S for row in counted)
    rest_s = fmean((row["end"] - row["first_token"]) / TICKS_PER_S for row in counted)
    return first_s, rest_s / (answer - 1)


def served_rows(profile: Profile, published: Sequence[Mapping[str, str]]) -> Iterator[Row]:
    """Yields each published row of a server, beside the simulation of its users."""
    for each in published:
        users, prompt, answer, degree = (int(each[name]) for name in ("batch_size", "isl", "osl", "tp_size"))
        row: Row = {"devices": degree, "users": users, "prompt": prompt, "answer": answer}
        for name, found_s in zip(
            ("ttft", "tpot"), served(profile, degree, users, prompt, answer), strict=True
        ):
            measured_s = float(each[f"silicon_{name}_ms"]) / 1000
            row |= {
                f"{name.upper()} ms": f"{1000 * measured_s:.1f}",
                f"simulated {name.upper()}": f"{1000 * found_s:.1f}",
                f"{name.upper()} error": f"{found_s / measured_s - 1:+.0%}",
            }
        yield row


def served_error_rows(rows: Sequence[Row]) -> Iterator[Row]:
    """Yields the errors of servers by their devices, without signs."""
    for degree in (*sorted({row["devices"] for row in rows}), "all"):
        own = [row for row in rows if degree in (row["devices"], "all")]
        for name in ("TTFT error", "TPOT error"):
            sizes = sorted(abs(int(row[name].rstrip("%"))) for row in own)
            yield {
                "devices": degree,
                "of": name.split()[0],
                "rows": len(sizes),
                "median %": median(sizes),
                "p90 %": p90_of(sizes),
                "highest %": sizes[-1],
            }


def published_rows(folder: Path) -> list[Mapping[str, str]]:
    """Returns the rows that can be planned, of all that were measured."""
    with next(folder.rglob("silicon_sample.csv")).open(encoding="utf-8", newline="") as file:
        return [
            row
            for row in csv.DictReader(file)
            if not row["gemm_quant_mode"] and all(row[name] == value for name, value in SERVED.items())
        ]


def device_rows(profiles: Sequence[Profile]) -> Iterator[Row]:
    """Yields what each device takes for the same work, and how well the cost fits its tables."""
    for each in profiles:
        yield {
            "device": each.device,
            "encode 16384 patches ms": f"{1000 * each.encode.cost.seconds(16_384, 1):.1f}",
            "prefill 8192 tokens ms": f"{1000 * each.prefill.cost.seconds(8192, 8192 * 8193 / 2):.1f}",
            "decode 32 x 2048 ms": f"{1000 * each.decode.cost.seconds(32, 65_536):.2f}",
            "fit error": " / ".join(f"{getattr(each, stage).error:.1%}" for stage in STAGES),
            "tables": each.assumptions[0].partition("(")[2].rstrip(")"),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    profiles = [silicon_profile(load_silicon(options.folder, each), each, MODEL) for each in DEVICES]
    rows = list(held_out_rows(profiles[0], load_profile(str(OURS))))
    large = silicon_profile(load_silicon(options.folder, "h100"), "h100", SERVED_AS)
    servers = list(served_rows(large, published_rows(options.folder)))
    sections = {
        "held_out": Section("Our H100, point by point", lambda: rows),
        "errors": Section("Errors, of tables and of the data sheet", lambda: list(error_rows(rows))),
        "served_errors": Section(
            "Errors beside vLLM's servers of Qwen3-32B", lambda: list(served_error_rows(servers))
        ),
        "served": Section("vLLM's servers of Qwen3-32B on H100, row by row", lambda: servers),
        "devices": Section("The same work on each device", lambda: list(device_rows(profiles))),
    }
    run_sections(
        "silicon",
        "Profiles from published tables",
        sections,
        list(sections),
        lambda: setting(("pyarrow",)),
        module="planning.silicon FOLDER",
    )


if __name__ == "__main__":
    main()
