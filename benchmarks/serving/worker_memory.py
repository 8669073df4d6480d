"""The most memory of a worker that only encodes, against one that does everything, and what a plan says.

    python -m benchmarks.serving.worker_memory [--folder DIR] [--model NAME] [--size W H]

For shapes-vl in 32 bits, and for checkpoints of the shapes of Qwen2.5-VL-7B and InternVL3-8B with random
weights in bfloat16, 16.6 and 15.9 GB, which are written to a temporary folder (17 GB of disk each), or to
--folder/NAME, where a later run finds them. Each worker is a process that loads the weights of its roles,
reads each of them once, and runs the largest batch and pass of its limits, PATCHES and TOKENS. With
InternVL3-8B, whose tower and tiles are those of the EPD paper's InternVL2-8B, the batch is one image of a
size of the paper, of which an encoder keeps the embeddings, and a worker of all roles a second time, as the
receiver that it is too. The peak is the most resident memory above what the process had before it loaded;
mapped pages count, and where there is no room for all weights the run is given up. Planned is
`MemoryNeeds.worker` by the same limits, its activations measured as `epd profile` does, with two and eight
images and 128 and 512 tokens; embeddings are those of the image, pools are empty otherwise.
Results go to benchmarks/results/worker_memory.{json,md}.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.large_checkpoint import on_cpu
from benchmarks.gpu.checkpoint import write_full
from benchmarks.reporting import Row, Section, run_sections, setting
from epd.encoders import Adapter, load_adapter
from epd.encoders.adapter import Embeddings
from epd.encoders.groups import FrameEncoder
from epd.host_memory import resident_bytes
from epd.models import embedded_model_path
from epd.profiles.memory import MemoryLimits, MemoryNeeds
from epd.stages.engine.generation import generation_settings
from epd.stages.engine.setup import BLOCK_SIZE
from epd.stages.loading.weights import load_role
from epd.stages.memory_sizing import run_encode, run_prefill
from epd.stages.placement import use_threads
from epd.stages.profiling import Profiler
from epd.topology import Stage
from tests.models.published import PUBLISHED

LARGE, TILED, FRAME_SIZE = "Qwen2.5-VL-7B", "InternVL3-8B", (448, 448)
DTYPES = {"shapes-vl": "float32", LARGE: "bfloat16", TILED: "bfloat16"}
# (width, height) of the EPD paper's images, pixels; its 313 x 234 is cut into as many tiles as 4032 x 3024.
SIZES = ((4032, 3024), (787, 444))
PATCHES, TOKENS = 4096, 512
LIMITS = MemoryLimits(PATCHES, TOKENS, 1, 0, TOKENS + 2 * BLOCK_SIZE)
ROLES: dict[str, frozenset[Stage]] = {
    "e": frozenset({"encode"}),
    "epd": frozenset({"encode", "prefill", "decode"}),
}
_PIECE = 1 << 20  # values that are read at once


def peak_of(letters: str, folder: Path, dtype: str, size: tuple[int, int] | None) -> Row:
    """Measures a worker in this process. size: of the image that is its batch; None for its largest batch."""
    adapter = load_adapter(folder)
    before = resident_bytes("VmRSS")
    model = load_role(folder, "encode" if letters == "e" else "whole", on_cpu(dtype)).model
    for parameter in model.parameters():
        for piece in parameter.view(-1).split(_PIECE):
            piece.sum()
    tower = adapter.vision_tower(model)
    kept: list[Embeddings] = []
    if size is None:
        run_encode(adapter, tower, PATCHES)
    else:
        kept = encode_image(adapter, tower, size, num_copies=1 if letters == "e" else 2)
    if letters != "e":
        run_prefill(model, adapter, generation_settings(folder, adapter), TOKENS)
    del kept
    return {"bytes": resident_bytes("VmHWM") - before}


@torch.inference_mode()
def encode_image(adapter: Adapter, tower: Any, size: tuple[int, int], num_copies: int) -> list[Embeddings]:
    """Encodes one image of (width, height) as a worker does, and returns what its pools hold of it."""
    plan = adapter.plan_image(size[1], size[0])
    frames = torch.randint(0, 256, (plan.num_units, *plan.size, 3), dtype=torch.uint8)
    encoder = FrameEncoder(adapter, tower, max_patches=PATCHES)
    (embeddings,) = encoder.encode([encoder.patches(frames, plan)])
    return [embeddings.mapped(torch.clone) for _ in range(num_copies)]


def limits_of(folder: Path, size: tuple[int, int] | None) -> MemoryLimits:
    """Returns what a worker's settings and its image allow at once."""
    if size is None:
        return LIMITS
    plan = load_adapter(folder).plan_image(size[1], size[0])
    num_patches = min(PATCHES, plan.grid.num_patches)
    num_tokens = plan.num_units * plan.tokens_per_unit
    return replace(LIMITS, encode_patches=num_patches, num_embeddings=num_tokens)


def needs_of(folder: Path, dtype: str) -> Row:
    """Measures what a plan goes by, in this process."""
    with torch.inference_mode():
        return asdict(Profiler(folder, 1, on_cpu(dtype)).memory())


def child(name: str, folder: Path, dtype: str, size: tuple[int, int] | None = None) -> Row:
    """Runs `needs` or a worker of some roles in a process of its own, whose memory is its own too."""
    command = [sys.executable, "-m", "benchmarks.serving.worker_memory", "--child", name]
    command += ["--size", *map(str, size)] if size else []
    done = subprocess.run(
        [*command, "--folder", str(folder), "--dtype", dtype], stdout=subprocess.PIPE, text=True, check=True
    )
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def rows(name: str, folder: Path, wanted: Sequence[tuple[int, int]] = SIZES) -> list[Row]:
    """Measures a model. wanted: sizes of images for TILED."""
    if name in PUBLISHED and not (folder / "model.safetensors.index.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(0)
        write_full(name, folder, FRAME_SIZE, on_cpu("bfloat16"))
    needs = MemoryNeeds(**child("needs", folder, DTYPES[name]))
    check_room(needs.fixed_bytes > 0)
    sizes = wanted if name == TILED else (None,)
    return [row for size in sizes for row in _rows_of(name, folder, needs, size)]


def check_room(has_room: bool) -> None:
    """Ends the run where mapped weights were dropped from memory meanwhile: then less was measured."""
    if not has_room:
        raise SystemExit("others needed the memory of mapped weights; run again when all of them fit")


def _rows_of(name: str, folder: Path, needs: MemoryNeeds, size: tuple[int, int] | None) -> list[Row]:
    """Compares the workers of a model, with a batch of one image or the largest one."""
    limits = limits_of(folder, size)
    peaks = {letters: child(letters, folder, DTYPES[name], size)["bytes"] for letters in ROLES}
    found = []
    for letters, roles in ROLES.items():
        planned = needs.worker(roles, limits)
        check_room(peaks[letters] >= planned.weight_bytes)
        found.append(
            {
                "model": name,
                "type": DTYPES[name],
                "batch": f"image of {size[0]}x{size[1]}" if size else f"{limits.encode_patches} patches",
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
    parser.add_argument("--size", type=int, nargs=2, help=f"of images for {TILED}, instead of the paper's")
    options = parser.parse_args()
    size = (options.size[0], options.size[1]) if options.size else None
    if options.child:
        use_threads(1)
        if options.child == "needs":
            print(json.dumps(needs_of(options.folder, options.dtype)))
        else:
            print(json.dumps(peak_of(options.child, options.folder, options.dtype, size)))
        return
    with tempfile.TemporaryDirectory(prefix="epd-memory-") as temporary:
        root = options.folder or Path(temporary)
        folders = {"shapes-vl": embedded_model_path(), LARGE: root / LARGE, TILED: root / TILED}
        limits = f"batches of {PATCHES} patches, passes of {TOKENS} tokens"
        sections = {
            name: Section(f"{name}, {limits}", partial(rows, name, folder, (size,) if size else SIZES))
            for name, folder in folders.items()
        }
        wanted = [options.model] if options.model else list(sections)
        packages = ("torch", "transformers", "safetensors")
        here = partial(setting, packages, checkpoints=f"{LARGE} and {TILED}, random weights")
        run_sections("worker_memory", "Memory of a worker by its roles", sections, wanted, here)


if __name__ == "__main__":
    main()
