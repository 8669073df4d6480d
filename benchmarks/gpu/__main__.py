"""Checks and measures the pipeline on one GPU: `make gpu`, or on a CPU in tiny: `make gpu-dry`.

    python -m benchmarks.gpu [--dry-run] [--device cuda:0] [--sections a,b] [--resume] [--out FOLDER]

Needs torch, triton, transformers and what they install, neither PyAV nor Ray; with PyAV and what
`epd-vlm[local]` installs it checks the whole path too. Writes gpu.md and gpu.json.
The exit status is 1 if a section failed or did not end in its time, 2 if there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

from benchmarks.gpu import checks, delta, measures, mixtures
from benchmarks.gpu.peers import peers
from benchmarks.gpu.replays import replays
from benchmarks.gpu.sections import GpuSection, Outcome, run_all
from benchmarks.gpu.served import closed_loop, nvdec, published_files, role_switch
from benchmarks.gpu.setup import FULL, TINY, Setup
from benchmarks.gpu.whole_path import whole_path
from benchmarks.reporting import RESULTS, Row, setting, table
from epd.stages.placement import CPU_FLOAT32, Placement

TOTAL_S = 525.0  # of the nine minutes; the rest is for imports
# In the order of their worth, checks first: with --resume a call runs those that are missing.
SECTIONS: Mapping[str, GpuSection] = {
    "kernels": GpuSection("Kernels against plain arithmetic", checks.kernels, 120),
    "long_values": GpuSection("Attention far into a long context and a large pool", checks.long_values, 60),
    "tokens": GpuSection("Tokens of E, P and D in float32 against the CPU", checks.tokens, 110),
    "tokens_in_type": GpuSection("Tokens against generate in the same type", checks.tokens_in_type, 40),
    "whole_path": GpuSection("From H.264 to the answer, against the CPU", whole_path, 200),
    "ceilings": GpuSection("What the device reaches at best", measures.ceilings, 10),
    "load": GpuSection("Loading the checkpoint", measures.load, 120),
    "published_files": GpuSection("From a file to the first token, as published", published_files, 400),
    "closed_loop": GpuSection("Requests a second", closed_loop, 300),
    "nvdec": GpuSection("Reading a video by the CPU and by NVDEC", nvdec, 120),
    "delta": GpuSection("The gated delta rule alone", delta.measured, 60),
    "decode": GpuSection("Decoding", measures.decode, 90),
    "prefill": GpuSection("Prefill", measures.prefill, 40),
    "experts": GpuSection("Mixtures of experts", mixtures.experts, 60),
    "mixture_decode": GpuSection("Decoding by experts, scaled up", mixtures.mixture_decode, 180),
    "in_fp8": GpuSection("Passes with layers in FP8", measures.in_fp8, 90),
    "encode": GpuSection("Encoding", measures.encode, 40),
    "first_token": GpuSection("From decoded frames to the first token", measures.first_token, 90),
    "role_switch": GpuSection("A worker changes roles", role_switch, 120),
    "kept_weights": GpuSection("Roles from files and from pinned memory", measures.kept_weights, 90),
    "transfers": GpuSection("Transfers, by each way", measures.transfers, 60),
    "replays": GpuSection("Passes launched kernel by kernel and replayed", replays, 90),
    "peers": GpuSection("The same by transformers' own modules", peers, 120),
}
NEEDS_CHECKPOINT = (
    "prefill",
    "in_fp8",
    "encode",
    "transfers",
    "decode",
    "replays",
    "first_token",
    "peers",
    "published_files",
    "closed_loop",
    "role_switch",
    "kept_weights",
)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        print("no GPU was found; run this where one is, or with --dry-run on a CPU", file=sys.stderr)
        return 2
    placement = CPU_FLOAT32 if options.dry_run else Placement.resolve(options.device, "bfloat16")
    with tempfile.TemporaryDirectory(prefix="epd-gpu-") as folder:
        setup = Setup(placement, TINY if options.dry_run else FULL, Path(folder))
        before = _before(Path(options.out)) if options.resume else {}
        outcomes = run_all(SECTIONS, _wanted(options.sections, before), setup, TOTAL_S)
    if options.out is not None:
        found = {name: outcomes.get(name) or before.get(name) for name in SECTIONS}
        kept = {name: outcome for name, outcome in found.items() if outcome is not None}
        _write(Path(options.out), kept, placement, is_dry=options.dry_run)
    return int(any(outcome.problem for outcome in outcomes.values()))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu")
    parser.add_argument("--dry-run", action="store_true", help="everything in tiny, on the CPU")
    parser.add_argument("--device", default="cuda", help="cuda or cuda:N")
    parser.add_argument("--sections", default="", help=f"some of {','.join(SECTIONS)}; by default all")
    parser.add_argument("--out", help="folder for gpu.md and gpu.json; by default the results of a GPU only")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep sections that gpu.json has without a problem, run the others",
    )
    options = parser.parse_args(arguments)
    if options.out is None and not options.dry_run:
        options.out = str(RESULTS)
    if options.resume and options.out is None:
        parser.error("received --resume without results to add to; name their folder with --out")
    unknown = set(filter(None, options.sections.split(","))) - set(SECTIONS)
    if unknown:
        parser.error(f"received sections {sorted(unknown)}; allowed: {', '.join(SECTIONS)}")
    return options


def _before(folder: Path) -> dict[str, Outcome]:
    """The sections that earlier calls have measured without a problem; none without a file."""
    path = folder / "gpu.json"
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {
        name: Outcome(results[name]["rows"], results[name]["seconds"])
        for name in SECTIONS
        if name in results and not results[name]["problem"]
    }


def _wanted(sections: str, before: Mapping[str, Outcome]) -> list[str]:
    """The sections in their order; those that measure a checkpoint need it to be written first."""
    named = [name for name in sections.split(",") if name] or list(SECTIONS)
    chosen = [name for name in named if name not in before]
    needed = {"load"} if set(chosen) & set(NEEDS_CHECKPOINT) else set()
    return [name for name in SECTIONS if name in {*chosen, *needed}]


def _write(folder: Path, outcomes: Mapping[str, Outcome], placement: Placement, *, is_dry: bool) -> None:
    here = setting(["torch", "transformers", *_triton()], device=_device(placement), placement=str(placement))
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"setting": here}
    lines = [
        "# One GPU",
        "",
        "`make gpu`" if not is_dry else "`make gpu-dry`: tiny sizes on a CPU, no figures",
        "",
    ]
    lines += [f"- {key}: {value}" for key, value in here.items()]
    for name, outcome in outcomes.items():
        results[name] = {
            "rows": outcome.rows,
            "seconds": round(outcome.seconds, 1),
            "problem": outcome.problem,
        }
        lines += ["", f"## {SECTIONS[name].title}", ""]
        lines += [part for group in _alike(outcome.rows) for part in (table(group), "")]
        lines += [outcome.problem or f"Done in {outcome.seconds:.1f} s."]
    (folder / "gpu.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (folder / "gpu.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _alike(rows: Sequence[Row]) -> list[list[Row]]:
    """Runs of rows with the same columns."""
    groups: list[list[Row]] = []
    for row in rows:
        if groups and list(groups[-1][0]) == list(row):
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _device(placement: Placement) -> str:
    if not placement.is_cuda:
        return "no GPU"
    facts = torch.cuda.get_device_properties(placement.device)
    return f"{facts.name}, {facts.total_memory / 1e9:.1f} GB, {facts.multi_processor_count} processors"


def _triton() -> list[str]:
    try:
        import triton  # type: ignore[import-untyped] # noqa: F401 # not everywhere
    except ImportError:
        return []
    return ["triton"]


if __name__ == "__main__":
    sys.exit(main())
