"""The most memory of a worker that only encodes, against one that does everything, and what a plan says.

    python -m benchmarks.worker_memory [--folder DIR] [--model shapes-vl|Qwen2.5-VL-7B]

For shapes-vl in 32 bits, and for a checkpoint of the shape of Qwen2.5-VL-7B with random weights in bfloat16,
16.6 GB, which is written to a temporary folder (17 GB of disk), or to --folder, where a later run finds it.
Each worker is a process that loads the weights of its roles, reads each of them once, and runs the largest
batch and pass of its limits, PATCHES and TOKENS. Its peak is the most resident memory above what it had
before it loaded; mapped pages count. Planned is `MemoryNeeds.worker` by the same limits, without pools of
embeddings, its activations measured as `epd profile` does, with two and eight images and 128 and 512 tokens.
Results go to benchmarks/results/worker_memory.{json,md}.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu.checkpoint import write_full
from benchmarks.large_checkpoint import on_cpu
from benchmarks.reporting import Row, Section, run_sections, setting
from encoders import load_adapter
from epd.host_memory import resident_bytes
from epd.models import embedded_model_path
from epd.profiles.memory import MemoryLimits, MemoryNeeds
from epd.topology import Stage
from stages.engine.generation import generation_settings
from stages.engine.setup import BLOCK_SIZE
from stages.loading.weights import load_role
from stages.memory_sizing import run_encode, run_prefill
from stages.pipeline import use_threads
from stages.profiling import Profiler

LARGE, FRAME_SIZE = "Qwen2.5-VL-7B", (448, 448)
DTYPES = {"shapes-vl": "float32", LARGE: "bfloat16"}
PATCHES, TOKENS = 4096, 512
LIMITS = MemoryLimits(PATCHES, TOKENS, 1, 0, TOKENS + 2 * BLOCK_SIZE)
ROLES: dict[str, frozenset[Stage]] = {
    "e": frozenset({"encode"}),
    "epd": frozenset({"encode", "prefill", "decode"}),
}
_PIECE = 1 << 20  # values that are read at once


def peak_of(letters: str, folder: Path, dtype: str) -> Row:
    """Measures a worker in this process."""
    adapter = load_adapter(folder)
    before = resident_bytes("VmRSS")
    model = load_role(folder, "encode" if letters == "e" else "whole", on_cpu(dtype)).model
    for parameter in model.parameters():
        for piece in parameter.view(-1).split(_PIECE):
            piece.sum()
    run_encode(adapter, adapter.vision_tower(model), PATCHES)
    if letters != "e":
        run_prefill(model, adapter, generation_settings(folder, adapter), TOKENS)
    return {"bytes": resident_bytes("VmHWM") - before}


def needs_of(folder: Path, dtype: str) -> Row:
    """Measures what a plan goes by, in this process."""
    with torch.inference_mode():
        return asdict(Profiler(folder, 1, on_cpu(dtype)).memory())


def child(name: str, folder: Path, dtype: str) -> Row:
    """Runs `needs` or a worker of some roles in a process of its own, whose memory is its own too."""
    command = [sys.executable, "-m", "benchmarks.worker_memory", "--child", name]
    done = subprocess.run(
        [*command, "--folder", str(folder), "--dtype", dtype], stdout=subprocess.PIPE, text=True, check=True
    )
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def rows(name: str, folder: Path) -> list[Row]:
    if name == LARGE and not (folder / "model.safetensors.index.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(0)
        write_full(LARGE, folder, FRAME_SIZE, on_cpu("bfloat16"))
    dtype = DTYPES[name]
    needs = MemoryNeeds(**child("needs", folder, dtype))
    peaks = {letters: child(letters, folder, dtype)["bytes"] for letters in ROLES}
    found = []
    for letters, roles in ROLES.items():
        planned = needs.worker(roles, LIMITS)
        found.append(
            {
                "model": name,
                "type": dtype,
                "roles": letters,
                "peak, MB": round(peaks[letters] / 1e6),
                "planned, MB": round(planned.peak_bytes / 1e6),
                "planned / peak": round(planned.peak_bytes / peaks[letters], 3),
                "planned as": planned.parts(),
                "times less than epd": round(peaks["epd"] / peaks[letters], 1),
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--model", choices=list(DTYPES))
    parser.add_argument("--child", choices=["needs", *ROLES], help=argparse.SUPPRESS)
    parser.add_argument("--dtype", default="bfloat16", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        use_threads(1)
        measure = needs_of if options.child == "needs" else partial(peak_of, options.child)
        print(json.dumps(measure(options.folder, options.dtype)))
        return
    with tempfile.TemporaryDirectory(prefix="epd-memory-") as temporary:
        folders = {"shapes-vl": embedded_model_path(), LARGE: options.folder or Path(temporary)}
        limits = f"batches of {PATCHES} patches, passes of {TOKENS} tokens"
        sections = {
            name: Section(f"{name}, {limits}", partial(rows, name, folder))
            for name, folder in folders.items()
        }
        wanted = [options.model] if options.model else list(sections)
        packages = ("torch", "transformers", "safetensors")
        here = partial(setting, packages, checkpoint=f"{LARGE}, random weights")
        run_sections("worker_memory", "Memory of a worker by its roles", sections, wanted, here)


if __name__ == "__main__":
    main()
