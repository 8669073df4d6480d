"""Whether profiles from published tables of kernels agree with what was measured.

    python -m benchmarks.planning.silicon FOLDER

FOLDER is a copy of github.com/ai-dynamo/aiconfigurator. Each row is listed, and marked where a constant was
taken from it: two of our H100 (qwen2.5-vl-7b, benchmarks/results/gpu_profile.json), and ten of the servers of
vLLM that AIConfigurator lists, as far as 16-bit models without experts go: Qwen3-32B on 2 to 8 H100, whose
language model is qwen3-vl-32b's.

The servers are simulated as AIConfigurator says that it measures (docs/dynamo_deployment_guide.md,
generator/rule_plugin/benchmark/vllm.rule): ten requests of each user, the first ones, which come at once,
counted too, texts of one length, no prefix kept, and as many tokens in a pass as a prompt, the users and
1,500.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any

from benchmarks.reporting import RESULTS, Row, Section, run_sections, setting
from epd.bench.compare_report import p90_of
from epd.kv.scheduling import SchedulerConfig
from epd.profiles.cost import StageTable
from epd.profiles.files import load_profile
from epd.profiles.profile import Profile
from epd.profiles.silicon import load_silicon, silicon_profile
from epd.simulate import Deployment
from epd.simulate.clock import TICKS_PER_S, EventPriority, ticks_of
from epd.simulate.requests import Job, RequestState
from epd.simulate.simulation import Simulation
from epd.topology import parse_topology

SERVED = {"model_path": "Qwen/Qwen3-32B", "system": "h100_sxm", "backend": "vllm", "mode": "agg"}
SERVED_AS = "qwen3-vl-32b"
_TURNS = 10  # requests of each user
_SLACK_TOKENS = 1500
# Of vLLM's servers, from the rows of SEEN: the host's part of a pass, and of a token on a prompt's way to the
# engine, in the mean of what chance makes of it, from nothing to twice that.
PASS_S, ASKED_S = 1.4e-3, 2.5e-6
SEEN = {"devices": 4, "answer": 128}
SEEN_POINTS = ("256 new tokens", "2048 new tokens")  # `epd.profiles.silicon` has its constants from these
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
                "units": (units := f"{point.units:.0f} {getattr(ours, stage).units}"),
                "held out": "no" if units in SEEN_POINTS else "yes",
                "measured ms": f"{1000 * measured_s:.2f}",
                "tables ms": f"{1000 * found_s:.2f}",
                "error": f"{found_s / measured_s - 1:+.0%}",
                "data sheet": f"{sheet_s / measured_s - 1:+.0%}",
            }


def error_rows(rows: Sequence[Row]) -> Iterator[Row]:
    """Yields the errors by stage, without their signs. By tables, of the points held out alone."""
    for stage in (*STAGES, "all"):
        for name in ("error", "data sheet"):
            told = [row for row in rows if name == "data sheet" or row["held out"] == "yes"]
            own = [abs(int(row[name].rstrip("%"))) for row in told if stage in (row["stage"], "all")]
            yield {
                "stage": stage,
                "of": name,
                "points": len(own),
                "median %": median(own),
                "highest %": max(own),
            }


class ClosedLoop(Simulation):
    """Simulates users of texts, each of which asks again as soon as it is answered."""

    def __init__(
        self,
        profile: Profile,
        degree: int,
        config: SchedulerConfig,
        jobs: Sequence[Job],
        asked_s: float = 0.0,
    ) -> None:
        """jobs: that come later, whenever one before has ended. asked_s: of a token on a prompt's way"""
        limits: dict[str, Any] = {"language": config, "decode": config}
        super().__init__(profile, Deployment(parse_topology("1epd"), degrees=(("epd", degree),), **limits))
        self._later, self._asked_s = iter(jobs), asked_s
        self._random = Random(0)

    def _record(self, state: RequestState, *, is_refused: bool = False) -> None:
        super()._record(state, is_refused=is_refused)
        job = next(self._later, None)
        if job is not None:
            self._num_open += 1
            job = replace(job, due=self.events.now)
            share = self._random.uniform(0, 2)
            at = job.due + ticks_of(share * self._asked_s * job.num_prompt_tokens)
            self.events.push(at, EventPriority.ARRIVAL, partial(self._arrive, job, iter(())))


def served(
    profile: Profile, degree: int, users: int, prompt: int, answer: int, asked_s: float = 0.0
) -> tuple[float, float]:
    """Returns mean TTFT and TPOT in seconds. prompt, answer: tokens of each request"""
    jobs = [Job(number, 0, (), prompt, answer, number, number) for number in range(_TURNS * users)]
    num_tokens = users + prompt + _SLACK_TOKENS
    config = SchedulerConfig(num_tokens, users, num_tokens)
    rows = ClosedLoop(profile, degree, config, jobs[users:], asked_s).run(jobs[:users]).rows
    first_s = fmean((row["first_token"] - row["due"]) / TICKS_PER_S for row in rows)
    rest_s = fmean((row["end"] - row["first_token"]) / TICKS_PER_S for row in rows)
    return first_s, rest_s / (answer - 1)


def on_a_server(profile: Profile) -> Profile:
    """Returns the profile with the host's part of each pass of vLLM, on any number of devices."""

    def slower(table: StageTable) -> StageTable:
        return replace(table, cost=replace(table.cost, fixed_s=table.cost.fixed_s + PASS_S))

    assert profile.parallel is not None  # each MODEL@DEVICE has one
    shared = {
        degree: (slower(prefill), slower(decode))
        for degree, (prefill, decode) in profile.parallel.shared.items()
    }
    return replace(profile, parallel=replace(profile.parallel, shared=shared))


def served_rows(profile: Profile, published: Sequence[Mapping[str, str]]) -> Iterator[Row]:
    """Yields each published row of a server, beside the simulation of its users."""
    for each in published:
        users, prompt, answer, degree = (int(each[name]) for name in ("batch_size", "isl", "osl", "tp_size"))
        row: Row = {"devices": degree, "users": users, "prompt": prompt, "answer": answer}
        row["held out"] = "no" if SEEN.items() <= row.items() else "yes"
        for name, found_s in zip(
            ("ttft", "tpot"), served(profile, degree, users, prompt, answer, ASKED_S), strict=True
        ):
            measured_s = float(each[f"silicon_{name}_ms"]) / 1000
            row |= {
                f"{name.upper()} ms": f"{1000 * measured_s:.1f}",
                f"simulated {name.upper()}": f"{1000 * found_s:.1f}",
                f"{name.upper()} error": f"{found_s / measured_s - 1:+.0%}",
            }
        yield row


def served_error_rows(rows: Sequence[Row]) -> Iterator[Row]:
    """Yields the errors of servers that are held out, by their devices, without signs."""
    told = [row for row in rows if row["held out"] == "yes"]
    for degree in (*sorted({row["devices"] for row in told}), "all"):
        own = [row for row in told if degree in (row["devices"], "all")]
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
    large = silicon_profile(load_silicon(options.folder, "h100"), "h100", SERVED_AS, launch_s=0.0)
    servers = list(served_rows(on_a_server(large), published_rows(options.folder)))
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
