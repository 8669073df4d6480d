"""A checkpoint of 3B parameters on a CPU: its memory while it loads, and its answer in bfloat16.

    python -m benchmarks.engine.large_checkpoint [--folder DIR] [--section load|answer|switch|host]

The checkpoint has the shape of Qwen2.5-VL-3B and random weights in bfloat16, 7.5 GB; it is written to a
temporary folder (8 GB of disk), or to --folder, where a later run finds it.
load: in a process of its own for each type. Peak is the most resident memory while loading and while every
weight is read once, above what the process had before; mapped pages count. bfloat16 is mapped, float16
converted tensor by tensor.
answer: about a drawn video of 60 s; the same question to `generate`, in the same type, in another process.
switch: an encode worker becomes one that prefills and decodes, as a fleet's worker does on a machine whose
workers share their weights; from the decision to the first token of a short text, and a second text after it.
Each round is a process of its own. Only when asked for, to benchmarks/results/role_switch.{json,md};
--checkpoint names another shape.
host: the part of the host in a GPU worker's switch. Its file of weights has an index, and a hole of their
size; its device has no memory, so nothing is copied. Only when asked for, to
benchmarks/results/role_switch_host.{json,md}; of a 7B unless --checkpoint names another shape.
Results go to benchmarks/results/large_checkpoint.{json,md}.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any
from unittest import mock

import torch
from transformers import AutoConfig, AutoProcessor

from benchmarks.gpu.checkpoint import write_config, write_full
from benchmarks.reporting import Row, Section, run_sections, setting
from epd.encoders import FrameSampling
from epd.encoders.names import WeightSet
from epd.engine_config import EngineConfig
from epd.host_memory import resident_bytes
from epd.sampling_params import SamplingParams
from epd.serve_app.messages import Prefill
from epd.serve_app.network.memory import PoolFiles, new_fleet_id
from epd.serve_app.network.process_transport import ProcessTransport
from epd.serve_app.network.routes import PeerPlace
from epd.serve_app.orchestration.request_planner import RequestPlanner
from epd.serve_app.role_messages import Offload, Onload, SetRoles
from epd.serve_app.worker.worker_core import WorkerCore
from epd.serve_app.worker.worker_settings import WorkerSettings
from epd.shapes import make_scene
from epd.stages.loading.host_weights import HostWeights
from epd.stages.loading.merged_weights import in_merged_order
from epd.stages.loading.weight_files import StoredTensor, file_header, num_weight_bytes
from epd.stages.loading.weights import load_role, skeleton
from epd.stages.placement import DTYPES, Placement
from epd.topology import Stage
from epd.video.demo_video import write_demo_video
from tests.colocated import ColocatedPipeline
from tests.models.files import name_in_files
from tests.positions import trained_positions_in
from tests.reference import processor_inputs
from tests.serve_app.deployments import Question
from tests.tiny_models import load_reference

CHECKPOINT, FRAME_SIZE = "Qwen2.5-VL-3B", (168, 308)
SWITCHED = "Qwen2.5-VL-7B"
DURATION_S, NUM_FRAMES, MAX_TOKENS = 60.0, 8, 24
QUESTION = "Which shape appears first?"
NUM_KV_TOKENS = 4096
TEXT_ROLES: frozenset[Stage] = frozenset({"prefill", "decode"})
_GB = 1e9
_HOST = "The host's part in a role switch"
_PIECE = 1 << 20  # values that are read at once


def on_cpu(dtype: str) -> Placement:
    return Placement(torch.device("cpu"), DTYPES[dtype])


def load(folder: Path, dtype: str) -> Row:
    """Loads the model and reads every weight once."""
    before, start_s = resident_bytes("VmRSS"), time.perf_counter()
    loaded = load_role(folder, "whole", on_cpu(dtype))
    load_s = time.perf_counter() - start_s
    for parameter in loaded.model.parameters():
        for piece in parameter.view(-1).split(_PIECE):
            piece.sum()
    size = num_weight_bytes(folder, DTYPES[dtype])
    peak = resident_bytes("VmHWM") - before
    return {
        "type": dtype,
        "weights, GB": round(size / _GB, 2),
        "peak, GB": round(peak / _GB, 2),
        "peak / weights": round(peak / size, 3),
        "load, s": round(load_s, 1),
    }


def ours(folder: Path, dtype: str) -> Row:
    """Answers with the pipeline."""
    before = resident_bytes("VmRSS")
    pipeline = ColocatedPipeline.load(
        folder, EngineConfig(device="cpu", dtype=dtype, num_kv_tokens=NUM_KV_TOKENS)
    )
    answer = pipeline.ask([clip_in(folder)], QUESTION, num_frames=NUM_FRAMES, max_tokens=MAX_TOKENS)
    peak = resident_bytes("VmHWM") - before
    tpot_s = (answer.timings.total_s - answer.ttft_s) / max(1, len(answer.token_ids) - 1)
    return {
        "token_ids": answer.token_ids,
        "visual tokens": answer.usage.visual_tokens,
        "peak, GB": round(peak / _GB, 2),
        "TTFT, s": round(answer.ttft_s, 1),
        "TPOT, s": round(tpot_s, 2),
    }


@torch.inference_mode()
def theirs(folder: Path, dtype: str) -> Row:
    """Answers with transformers, from the frames that its own processor takes."""
    processor = AutoProcessor.from_pretrained(folder, local_files_only=True)
    sampling = FrameSampling(num_frames=NUM_FRAMES)
    inputs = processor_inputs(processor, [clip_in(folder)], QUESTION, sampling)
    model = load_reference(folder, DTYPES[dtype])
    with trained_positions_in(model):
        found = model.generate(**inputs, max_new_tokens=MAX_TOKENS, do_sample=False)
    return {"token_ids": found[0, inputs["input_ids"].shape[1] :].tolist()}


def switch(folder: Path, dtype: str) -> Row:
    """Switches a worker without work. Faults are of pages of weights that are touched for the first time."""
    files = PoolFiles(new_fleet_id())
    files.hold()
    here = PeerPlace("w0 1", "here")
    transport = ProcessTransport(lambda _worker, _envelope: None, lambda _worker: here, files, here)
    options = EngineConfig(device="cpu", dtype=dtype, num_kv_tokens=NUM_KV_TOKENS)
    settings = WorkerSettings(folder, options, num_embeddings=NUM_KV_TOKENS)
    seconds, before, roles = [time.perf_counter()], frozenset[Stage]({"encode"}), TEXT_ROLES
    core = WorkerCore("w0", before, settings, transport)
    seconds.append(time.perf_counter())
    core.handle(Offload(frozenset(), before), None)
    core.step()
    times = core.handle(Onload(roles), None)
    seconds.append(time.perf_counter())
    core.handle(SetRoles(roles, frozenset()), None)
    seconds.append(time.perf_counter())
    faults = [getrusage(RUSAGE_SELF).ru_minflt]
    for number in range(2):
        first_token(core, folder, f"r{number}")
        seconds.append(time.perf_counter())
        faults.append(getrusage(RUSAGE_SELF).ru_minflt)
    core.close()
    files.release()
    start_s, onload_s, announce_s, first_s, second_s = (b - a for a, b in pairwise(seconds))
    return {
        "type": dtype,
        "weights, GB": round(num_weight_bytes(folder, DTYPES[dtype]) / _GB, 2),
        "start, s": round(start_s, 1),
        "weights, s": round(times.weights_s, 4),
        "stages, s": round(onload_s - times.weights_s, 3),
        "announce, s": round(announce_s, 3),
        "first text, s": round(first_s, 2),
        "second text, s": round(second_s, 2),
        "faults, first": faults[1] - faults[0],
        "faults, second": faults[2] - faults[1],
    }


def first_token(core: WorkerCore, folder: Path, request_id: str) -> None:
    """Lets a worker without other work answer a short text with one token."""
    planner = RequestPlanner(folder, CHECKPOINT)
    plan = planner.plan(Question((), f"{request_id}: {QUESTION}", SamplingParams(max_tokens=1)).request())
    core.handle(Prefill(plan.generate_request(request_id), plan.groups, None), None)
    while not ((report := core.take_report()) and report.outputs):
        core.step()


CHILDREN: Mapping[str, Callable[[Path, str], Row]] = {
    "load": load, "ours": ours, "theirs": theirs, "switch": switch,
}  # fmt: skip


def child(name: str, folder: Path, dtype: str) -> Row:
    """Runs one of CHILDREN in a process of its own, whose memory is its own too."""
    command = [sys.executable, "-m", "benchmarks.engine.large_checkpoint", "--child", name]
    done = subprocess.run(
        [*command, "--folder", str(folder), "--dtype", dtype], stdout=subprocess.PIPE, text=True, check=True
    )
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def load_rows(folder: Path) -> list[Row]:
    return [child("load", folder, dtype) for dtype in ("bfloat16", "float16")]


def answer_rows(folder: Path) -> list[Row]:
    found = child("ours", folder, "bfloat16")
    expected = child("theirs", folder, "bfloat16")["token_ids"]
    got = found.pop("token_ids")
    pairs = zip(got, expected, strict=False)
    num_equal = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(got), len(expected)))
    first = {"type": "bfloat16", "video, s": DURATION_S, "frames": NUM_FRAMES}
    return [first | found | {"first tokens equal to generate's": f"{num_equal} of {len(expected)}"}]


def switch_rows(folder: Path, num_rounds: int) -> list[Row]:
    return [child("switch", folder, "bfloat16") for _ in range(num_rounds)]


def host_rows(checkpoint: str, num_rounds: int) -> list[Row]:
    """Times loading each role's weights onto a device that has no memory, from the second time on."""
    with (
        tempfile.TemporaryDirectory(prefix="epd-holes-") as temporary,
        mock.patch("epd.stages.loading.weights.check_room"),  # of that device there is none to be short of
    ):
        folder, dtype = Path(temporary), torch.bfloat16
        kept = HostWeights(write_holes(checkpoint, folder, dtype), torch.device("cpu"))
        placement = Placement(torch.device("meta"), dtype)
        rows = []
        for role in ("encode", "language"):
            seconds = [_host_seconds(folder, role, placement, kept) for _ in range(num_rounds + 1)][1:]
            whole, first, cpu = (statistics.median(each) for each in zip(*seconds, strict=True))
            loaded = load_role(folder, role, placement, kept)
            rows.append(
                {
                    "role": role,
                    "tensors": len(loaded.tensor_names),
                    "GB": round(loaded.num_bytes / _GB, 2),
                    "until the first copy, s": round(first, 3),
                    "whole, s": round(whole, 3),
                    "CPU, s": round(cpu, 3),
                    "copies at 25 GB/s, s": round(loaded.num_bytes / _GB / 25, 3),
                }
            )
    return rows


def _host_seconds(
    folder: Path, role: WeightSet, placement: Placement, kept: HostWeights
) -> tuple[float, ...]:
    """Returns the seconds of a load, those until its first copy is queued, and those of CPU."""
    start_s, cpu_s, first_s = time.perf_counter(), time.process_time(), []

    def note(_num_read: int, _num_bytes: int) -> None:
        first_s.append(time.perf_counter() - start_s)

    load_role(folder, role, placement, kept, note)
    return time.perf_counter() - start_s, first_s[0], time.process_time() - cpu_s


def write_holes(checkpoint: str, folder: Path, dtype: torch.dtype) -> Path:
    """Writes a configuration, and a file of weights with a hole in the place of values. Returns the file."""
    write_config(checkpoint, folder, FRAME_SIZE)
    places = skeleton(AutoConfig.from_pretrained(folder, local_files_only=True), dtype).state_dict()
    path = folder / "weights"
    stored = [
        StoredTensor(path, name_in_files(checkpoint, name), tuple(places[name].shape), dtype)
        for name in in_merged_order(list(places))
    ]
    header = file_header(stored, dtype)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(each.num_bytes for each in stored))
    return path


def clip_in(folder: Path) -> Path:
    return folder / "clip.mp4"


def prepare(folder: Path, checkpoint: str) -> Path:
    """Writes the checkpoint and the video, if they are not there."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model.safetensors.index.json").exists():
        torch.manual_seed(0)
        write_full(checkpoint, folder, FRAME_SIZE, on_cpu("bfloat16"))
    if not clip_in(folder).exists():
        write_demo_video(clip_in(folder), make_scene(7, DURATION_S), fps=8, height=180, width=320)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--section", choices=["load", "answer", "switch", "host"])
    parser.add_argument("--checkpoint", help="of tests.models.published")
    parser.add_argument("--rounds", type=int, default=3, help="of a switch, or of the host's part in it")
    parser.add_argument("--child", choices=list(CHILDREN), help=argparse.SUPPRESS)
    parser.add_argument("--dtype", default="bfloat16", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(CHILDREN[options.child](options.folder, options.dtype)))
        return
    if options.section == "host":
        shape = options.checkpoint or SWITCHED
        rows = {"host": Section("Onto a device without memory", partial(host_rows, shape, options.rounds))}
        command = "engine.large_checkpoint --section host"
        run_sections(
            "role_switch_host",
            _HOST,
            rows,
            list(rows),
            partial(here, shape, "a hole for weights"),
            module=command,
        )
        return
    checkpoint = options.checkpoint or CHECKPOINT
    with tempfile.TemporaryDirectory(prefix="epd-large-") as temporary:
        folder = prepare(options.folder or Path(temporary), checkpoint)
        setting_here = partial(here, checkpoint)
        sections: dict[str, Section] = {
            "load": Section("Loading", partial(load_rows, folder)),
            "answer": Section("An answer", partial(answer_rows, folder)),
        }
        if options.section == "switch":
            rows = {
                "switch": Section(
                    "From encode to prefill and decode", partial(switch_rows, folder, options.rounds)
                )
            }
            command = "engine.large_checkpoint --section switch"
            run_sections("role_switch", "A role switch", rows, list(rows), setting_here, module=command)
            return
        wanted = [options.section] if options.section else list(sections)
        run_sections("large_checkpoint", "A checkpoint of 3B parameters", sections, wanted, setting_here)


def here(checkpoint: str, weights: str = "random weights") -> dict[str, Any]:
    return setting(("torch", "transformers", "safetensors"), checkpoint=f"{checkpoint}, {weights}")


if __name__ == "__main__":
    main()
