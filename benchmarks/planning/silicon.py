"""Whether profiles from published tables of kernels agree with what was measured.

    python -m benchmarks.planning.silicon FOLDER

FOLDER is a copy of github.com/ai-dynamo/aiconfigurator. Each row is listed, and marked where a constant was
taken from it: two of our H100 (qwen2.5-vl-7b, benchmarks/results/gpu_profile.json), and ten of the servers of
vLLM that AIConfigurator lists: Qwen3-32B on 2 to 8 H100. Its products in 8 bits, and experts in 8 bits
(Qwen3-235B-A22B on 2 or 4 H200), gave none. Their language models are those of Qwen3-VL.

The servers are simulated as AIConfigurator says that it measures (docs/dynamo_deployment_guide.md,
generator/rule_plugin/benchmark/vllm.rule, eval/benchmarks/genai_perf_runner.py of February 2026): after
others that have ended ten requests of each user, the first ones, which are sent at once, counted too, texts
of one length, no prefix kept, and as many tokens in a pass as a prompt, the users and 1,500.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any

from benchmarks.reporting import RESULTS, Row, Section, run_sections, setting
from epd.bench.compare_report import p90_of
from epd.kv.pass_limits import SchedulerConfig
from epd.profiles.cost import StageTable
from epd.profiles.files import load_profile
from epd.profiles.profile import Profile
from epd.profiles.silicon import load_silicon, silicon_profile
from epd.simulate import Deployment
from epd.simulate.clock import TICKS_PER_S, EventPriority, ticks_of
from epd.simulate.requests import Job, RequestState
from epd.simulate.simulation import Simulation
from epd.topology import parse_topology

MODEL, OURS = "qwen2.5-vl-7b", RESULTS / "gpu_profile.json"


@dataclass(frozen=True, slots=True)
class Server:
    """Names published rows of vLLM's servers, and what plans them.

    quantised: of the rows, products: of the tables
    """

    model_path: str
    system: str
    quantised: str
    device: str
    model: str
    products: str

    @property
    def name(self) -> str:
        return f"{self.model_path.partition('/')[2]} on {self.device}, {self.products}"

    def has(self, row: Mapping[str, str]) -> bool:
        """Returns whether it is a row of it, whose experts are shared by width alone."""
        wanted = {"model_path": self.model_path, "system": self.system, "gemm_quant_mode": self.quantised}
        wanted |= {"backend": "vllm", "mode": "agg"}
        by_width = row["moe_tp_size"] in ("", "0", "1", row["tp_size"])
        by_expert = row["moe_ep_size"] not in ("", "0", "1")
        return by_width and not by_expert and all(row[name] == value for name, value in wanted.items())


SERVED = Server("Qwen/Qwen3-32B", "h100_sxm", "", "h100", "qwen3-vl-32b", "bfloat16")
IN_8_BITS = (
    replace(SERVED, quantised="fp8", products="fp8"),
    Server("Qwen/Qwen3-235B-A22B-FP8", "h200_sxm", "fp8", "h200", "qwen3-vl-235b-a22b", "fp8_block"),
)
_TURNS = 10  # requests of each user
_SLACK_TOKENS = 1500
# Of vLLM's servers, from the rows of SEEN: the host's part of a pass, and of a token on a prompt's way to the
# engine, in the mean of what chance makes of it, from nothing to twice that.
PASS_S, ASKED_S = 1.4e-3, 2.5e-6
SEEN = {"devices": 4, "answer": 128}
SEEN_POINTS = ("256 new tokens", "2048 new tokens")  # `epd.profiles` has its constants from these
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
                "data sheet ms": f"{1000 * sheet_s:.2f}",
                "data sheet": f"{sheet_s / measured_s - 1:+.0%}",
            }


def error_rows(rows: Sequence[Row]) -> Iterator[Row]:
    """Yields the errors by stage, without their signs, of the points held out alone."""
    for stage in (*STAGES, "all"):
        for name in ("error", "data sheet"):
            told = [row for row in rows if row["held out"] == "yes"]
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

    def _arrive(self, job: Job, source: Iterator[Job]) -> None:
        """Lets a question, one of the first too, reach the engine when it has been on its way."""
        self._plan_arrival(source)
        on_its_way_s = self._random.uniform(0, 2) * self._asked_s * job.num_prompt_tokens
        arrive = partial(super()._arrive, job, iter(()))
        self.events.push(self.events.now + ticks_of(on_its_way_s), EventPriority.ARRIVAL, arrive)

    def _record(self, state: RequestState, *, is_refused: bool = False) -> None:
        super()._record(state, is_refused=is_refused)
        job = next(self._later, None)
        if job is not None:
            self._num_open += 1
            self._arrive(replace(job, due=self.events.now), iter(()))


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
    parallel = replace(profile.parallel, shared=shared)
    return replace(profile, prefill=slower(profile.prefill), decode=slower(profile.decode), parallel=parallel)


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


def published_rows(folder: Path, of: Server = SERVED) -> list[Mapping[str, str]]:
    """Returns the rows of servers, of all that were measured."""
    with next(folder.rglob("silicon_sample.csv")).open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if of.has(row)]


def least_tpot_s(row: Mapping[str, str], profile: Profile, bytes_per_s: float) -> float:
    """Returns how long reading the keys of all users takes, and weights that every step reads.

    Weights of experts are left out. bytes_per_s: of a device's memory, by its data sheet
    """
    users, prompt, answer, degree = (int(row[name]) for name in ("batch_size", "isl", "osl", "tp_size"))
    needs = profile.memory
    weight_bytes = 0 if profile.decode.cost.experts_s else needs.language_weight_bytes
    kv_bytes = users * (prompt + answer / 2) * needs.kv_bytes_per_token
    return (weight_bytes + kv_bytes) / degree / bytes_per_s


def rows_in_8_bits(folder: Path) -> Iterator[Row]:
    """Yields rows of servers in 8 bits. One that outruns its memory had its users on more servers."""
    for server in IN_8_BITS:
        silicon = load_silicon(folder, server.device, products=server.products)
        profile = on_a_server(silicon_profile(silicon, server.device, server.model, launch_s=0.0))
        for published in published_rows(folder, server):
            (row,) = served_rows(profile, [published])
            least_s = least_tpot_s(published, profile, silicon.device.memory_bytes_per_s)
            is_possible = float(published["silicon_tpot_ms"]) / 1000 > least_s
            yield {"server": server.name, **row, "held out": "yes" if is_possible else "impossible"}


def device_rows(profiles: Sequence[Profile]) -> Iterator[Row]:
    """Yields what each device takes for the same work, and how well the cost fits its tables."""
    for each in profiles:
        yield {
            "device": each.device,
            "encode 16384 patches ms": f"{1000 * each.encode.cost.seconds(16_384, 1):.1f}",
            "prefill 8192 tokens ms": f"{1000 * each.prefill.cost.seconds(8192, 8192 * 8193 / 2):.1f}",
            "decode 32 x 2048 ms": f"{1000 * each.decode.cost.seconds(32, 65_536):.2f}",
            "fit error": " / ".join(f"{getattr(each, stage).error:.1%}" for stage in STAGES),
            "tables": each.assumptions[0].partition("(")[2].partition(")")[0],
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    profiles = [silicon_profile(load_silicon(options.folder, each), each, MODEL) for each in DEVICES]
    rows = list(held_out_rows(profiles[0], load_profile(str(OURS))))
    large = silicon_profile(load_silicon(options.folder, "h100"), "h100", SERVED.model, launch_s=0.0)
    servers = list(served_rows(on_a_server(large), published_rows(options.folder)))
    in_8_bits = list(rows_in_8_bits(options.folder))
    sections = {
        "held_out": Section("Our H100, point by point", lambda: rows),
        "errors": Section("Errors, of tables and of the data sheet", lambda: list(error_rows(rows))),
        "served_errors": Section(
            "Errors beside vLLM's servers of Qwen3-32B", lambda: list(served_error_rows(servers))
        ),
        "served": Section("vLLM's servers of Qwen3-32B on H100, row by row", lambda: servers),
        "errors_in_8_bits": Section(
            "Errors beside vLLM's servers in 8 bits", lambda: list(served_error_rows(in_8_bits))
        ),
        "served_in_8_bits": Section("vLLM's servers in 8 bits, row by row", lambda: in_8_bits),
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
