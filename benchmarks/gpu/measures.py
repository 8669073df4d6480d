"""Measures the language model, the tower and transfers of one checkpoint on the device."""

from __future__ import annotations

import gc
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.between import between_processes
from benchmarks.gpu.checkpoint import write_full
from benchmarks.gpu.sections import OK
from benchmarks.gpu.setup import Setup, room_bytes
from benchmarks.gpu.workers import SplitPipeline
from benchmarks.reporting import Row
from epd.encode.encoder_cache import CachedGroup
from epd.encoders import Adapter, FrameSampling, VideoFacts
from epd.encoders.families.captured_tower import SIZES, captured
from epd.encoders.groups import FrameEncoder, prompt_identity
from epd.encoders.plans import MediaPlan
from epd.engine_config import EngineConfig
from epd.kv.pass_limits import SchedulerConfig
from epd.sampling_params import SamplingParams
from epd.serve_app.network.memory import PoolFiles, new_fleet_id
from epd.serve_app.network.process_transport import ProcessTransport
from epd.serve_app.network.routes import PeerPlace
from epd.serve_app.role_messages import Offload, Onload, SetRoles
from epd.serve_app.worker.worker_core import WorkerCore
from epd.serve_app.worker.worker_settings import WorkerSettings
from epd.serve_app.worker.worker_stages import embedding_layout
from epd.stages.connectors.gpu_memory import CudaMemory
from epd.stages.encode.encoder_pool import EncoderPoolShape
from epd.stages.engine.engine import LanguageEngine
from epd.stages.engine.generation import GenerateRequest, GenerationSettings
from epd.stages.engine.graphs import CudaGraphMaker
from epd.stages.engine.kv_pool import KVGroupShape, KVPools, KVPoolsShape
from epd.stages.engine.model_runner import ModelRunner, kv_bytes_per_token, kv_layouts
from epd.stages.engine.packed_pass import Segment
from epd.stages.engine.setup import build_engine
from epd.stages.loading.weights import load_role
from epd.topology import Stage, role_letters
from epd.transfer.connectors import KVChunk, KVSpan, KVTicket
from epd.types import ceil_div
from tests.models import shrunk
from tests.models.published import PUBLISHED

_BLOCK_SIZE = 16
_SOURCE_FPS = 2.0
ENCODE, ANSWER = frozenset[Stage]({"encode"}), frozenset[Stage]({"prefill", "decode"})


def ceilings(setup: Setup) -> Iterator[Row]:
    """What the device reaches at best: a large copy, and a large product of matrices."""
    size = 8192 if setup.placement.is_cuda else 256
    left, right = (
        torch.randn(size, size, dtype=setup.placement.dtype, device=setup.placement.device) for _ in "12"
    )
    seconds = setup.seconds(lambda: left @ right, warm_up=3)
    yield {"what": f"product of {size} x {size}", "TFLOP/s": round(2 * size**3 / seconds / 1e12, 3)}
    yield {"what": "large copy", "GB/s read and written": round(copy_bytes_per_s(setup) / 1e9)}


def copy_bytes_per_s(setup: Setup) -> float:
    """Returns the bytes that a large copy reads and writes in a second; of a CPU a small one."""
    num_values = 2**30 if setup.placement.is_cuda else 2**20
    source = torch.empty(num_values, dtype=torch.int32, device=setup.placement.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / setup.seconds(lambda: target.copy_(source), warm_up=3)


def load(setup: Setup) -> Iterator[Row]:
    """Writes the checkpoint that all later sections load, and times loading it."""
    sizes, folder = setup.sizes, setup.folder / "measured"
    _check_disk(setup)
    start_s = time.perf_counter()
    if sizes.is_full:
        write_full(sizes.measured, folder, sizes.frame_size, setup.placement)
    else:
        shrunk.build(sizes.measured, folder)
    setup.checkpoint = folder
    num_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    yield {"what": "write random weights", **_rate(num_bytes, time.perf_counter() - start_s)}
    for what in ("load, files dropped from memory", "load, files in memory"):
        if "dropped" in what:
            _drop_from_memory(setup)
        setup.wait()
        start_s = time.perf_counter()
        model = setup.load("whole")
        setup.wait()
        yield {"what": what, **_rate(num_bytes, time.perf_counter() - start_s)}
        del model


def _check_disk(setup: Setup) -> None:
    """Raises RuntimeError where the folder for temporary files has no room for the checkpoint."""
    published = PUBLISHED[setup.sizes.measured].num_parameters or 0
    needed = 1.1 * published * setup.placement.dtype.itemsize if setup.sizes.is_full else 0.0
    free = shutil.disk_usage(setup.folder).free
    if free < needed:
        room = f"{free / 1e9:.1f} GB are free in '{setup.folder.parent}'"
        raise RuntimeError(
            f"{room}, the checkpoint takes {needed / 1e9:.1f} GB; set TMPDIR to a folder with more room"
        )


def _rate(num_bytes: int, seconds: float) -> Row:
    return {
        "GB": round(num_bytes / 1e9, 3),
        "s": round(seconds, 4),
        "GB/s": round(num_bytes / 1e9 / seconds, 2),
    }


def _drop_from_memory(setup: Setup) -> None:
    """Asks the system to forget what it keeps of the files."""
    for file in setup.path.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


# Steps that are timed together: the device is waited for at their end alone.
_STEPS = 6


def decode(setup: Setup) -> Iterator[Row]:
    """A pass over one new token of each request, and steps of the whole engine behind a short context."""
    model = setup.load("language")
    for context in setup.sizes.decode_contexts:
        for batch in setup.sizes.decode_batches:
            yield _decode_pass(setup, model, batch, context)
    for batch in setup.sizes.decode_batches:
        for runs_ahead in (False, True):
            yield _decode_step(setup, model, batch, setup.sizes.step_context, runs_ahead=runs_ahead)
    yield _decode_step(setup, model, 1, setup.sizes.decode_contexts[-1], runs_ahead=True)
    for chunk in setup.sizes.mixed_tokens:
        for runs_ahead in (False, True):
            yield _step_beside(setup, model, setup.sizes.decode_batches[1], chunk, runs_ahead=runs_ahead)


def _decode_pass(setup: Setup, model: Any, batch: int, context: int) -> Row:
    layout, blocks = kv_layouts(model)[0][0], ceil_div(context + 1, _BLOCK_SIZE)
    row: Row = {"what": "pass", "requests": batch, "context": context}
    num_bytes = batch * blocks * _BLOCK_SIZE * layout.bytes_per_token
    if num_bytes > room_bytes(setup.placement):
        return row | {"ms": f"no room for {num_bytes / 1e9:.1f} GB", "tokens/s": "-", "GB/s read": "-"}
    runner = ModelRunner(model, setup.adapter, _pools(setup, model, batch * blocks))
    segments = [_segment(1, context, each * blocks, blocks) for each in range(batch)]

    def one_pass() -> list[int]:
        chosen: list[int] = runner.run(segments).argmax(-1).tolist()
        return chosen

    seconds = setup.seconds(one_pass, warm_up=3)
    read = _language_bytes(model) + batch * context * layout.bytes_per_token
    return row | _times(seconds, batch, read)


def _times(seconds: float, batch: int, read: int) -> Row:
    return {
        "ms": round(seconds * 1e3, 3),
        "tokens/s": round(batch / seconds, 1),
        "GB/s read": round(read / 1e9 / seconds, 1),
    }


def _decode_step(setup: Setup, model: Any, batch: int, context: int, *, runs_ahead: bool) -> Row:
    """Schedule, plan, pass and sampling, behind prompts that were prefilled."""
    seconds = step_s(setup, model, setup.adapter, batch, context, runs_ahead=runs_ahead)
    read = _language_bytes(model) + batch * context * kv_bytes_per_token(model)
    what = "engine step, run ahead" if runs_ahead else "engine step"
    return {"what": what, "requests": batch, "context": context, **_times(seconds, batch, read)}


def _step_beside(setup: Setup, model: Any, batch: int, chunk: int, *, runs_ahead: bool) -> Row:
    """Steps with so many tokens of a prompt beside decodes."""
    context = setup.sizes.step_context
    seconds = step_s(setup, model, setup.adapter, batch, context, chunk=chunk, runs_ahead=runs_ahead)
    what = f"engine step beside {chunk} of a prompt" + (", run ahead" if runs_ahead else "")
    read = _language_bytes(model) + batch * context * kv_bytes_per_token(model)
    return {"what": what, "requests": batch, "context": context, **_times(seconds, batch, read)}


def step_s(
    setup: Setup,
    model: Any,
    adapter: Adapter,
    batch: int,
    context: int,
    *,
    runs_ahead: bool,
    is_captured: bool = True,
    chunk: int = 0,
) -> float:
    """Returns the seconds of a step of an engine, with one more token for each of `batch` requests.

    chunk: tokens of a prompt in each step.
    """
    num_beside = (setup.sizes.repeats + 2) * _STEPS * chunk
    room = batch * (context + 8 * _BLOCK_SIZE) + num_beside + 8 * _BLOCK_SIZE
    limits = {"max_chunk_tokens": chunk} if chunk else {}
    engine = build_engine(
        model,
        adapter,
        GenerationSettings(frozenset()),
        config=SchedulerConfig(max_num_seqs=batch + bool(chunk), **limits),
        options=EngineConfig(num_kv_tokens=room, async_scheduling=runs_ahead, enforce_eager=not is_captured),
    )

    def add(number: int, num_tokens: int) -> None:
        prompt = adapter.plan_prompt([], str(number % 10) * num_tokens)
        sampling = SamplingParams(max_tokens=6 * _BLOCK_SIZE, ignore_eos=True)
        engine.add(GenerateRequest(f"r{number}", prompt, prompt_identity(prompt, []), sampling))

    for number in range(batch):
        add(number, max(1, context - 64))
    with torch.inference_mode():
        _prefill_all(engine, batch)
        if chunk:
            add(batch, num_beside)
        return setup.seconds(lambda: [engine.step() for _ in range(_STEPS)]) / _STEPS


def _prefill_all(engine: LanguageEngine, batch: int) -> None:
    begun: set[str] = set()
    while len(begun) < batch:
        result = engine.step()
        for fault in result.faults:
            raise fault.cause
        begun |= {output.request_id for output in result.outputs}


def prefill(setup: Setup) -> Iterator[Row]:
    """A pass over new tokens of one request."""
    model = setup.load("language")
    for num_tokens in setup.sizes.prefill_tokens:
        seconds = _prefill_s(setup, model, num_tokens)
        operations = _language_operations(model, num_tokens)
        yield {
            "tokens": num_tokens,
            "ms": round(seconds * 1e3, 2),
            "tokens/s": round(num_tokens / seconds),
            "TFLOP/s": round(operations / seconds / 1e12, 3),
        }


def _prefill_s(setup: Setup, model: Any, num_tokens: int) -> float:
    blocks = ceil_div(num_tokens, _BLOCK_SIZE)
    runner = ModelRunner(model, setup.adapter, _pools(setup, model, blocks))
    return setup.seconds(partial(runner.run, [_segment(num_tokens, 0, 0, blocks)]))


def in_fp8(setup: Setup) -> Iterator[Row]:
    """Passes of prefill, and of decodes behind the shortest context, with layers as they are and in FP8."""
    plain, fp8 = (_pass_ms(setup, each) for each in (None, "fp8"))
    for what, ms in plain.items():
        yield {"what": what, "ms": ms, "ms in FP8": fp8[what], "times as fast": round(ms / fp8[what], 2)}


def _pass_ms(setup: Setup, quantization: str | None) -> dict[str, float]:
    placement = replace(setup.placement, quantization=quantization)
    model = load_role(setup.path, "language", placement).model
    found = {
        f"prefill of {each}": _prefill_s(setup, model, each) * 1e3 for each in setup.sizes.prefill_tokens
    }
    for batch in setup.sizes.decode_batches[:4]:
        row = _decode_pass(setup, model, batch, setup.sizes.decode_contexts[0])
        found[f"decode of {batch}"] = float(row["ms"])
    return {what: round(ms, 3) for what, ms in found.items()}


def encode(setup: Setup) -> Iterator[Row]:
    """Frames in host memory to patches on the device, and one call of the tower."""
    tower = setup.adapter.vision_tower(setup.load("encode"))
    encoder, replaying = FrameEncoder(setup.adapter, tower), _replaying(setup, tower)
    for units in setup.sizes.encode_units:
        plan = video_plan(setup, 2 * units)
        frames = torch.randint(0, 256, (plan.num_frames, *plan.size, 3), dtype=torch.uint8)
        with torch.inference_mode():
            patches_s = setup.seconds(partial(encoder.patches, frames, plan))
            runs = [encoder.patches(frames, plan)]
            encode_s = setup.seconds(partial(encoder.encode, runs))
            replayed_s = setup.seconds(partial(replaying.encode, runs))
            ours, theirs = (each.encode(runs)[0].rows.float() for each in (replaying, encoder))
        yield {
            "units": units,
            "patches": plan.grid.num_patches,
            "patches ms": round(patches_s * 1e3, 2),
            "tower ms": round(encode_s * 1e3, 2),
            "replayed ms": round(replayed_s * 1e3, 2),
            OK: bool((ours - theirs).abs().max() <= 2e-2 * theirs.abs().max()),
            "TFLOP/s": round(_tower_operations(tower, plan) / encode_s / 1e12, 3),
        }


def kept_weights(setup: Setup) -> Iterator[Row]:
    """A worker without work there, back and there again, its weights from files and from pinned memory."""
    options = EngineConfig(device=str(setup.placement.device), dtype=setup.placement.dtype_name)
    here = PeerPlace("w0 1", "here", CudaMemory().visible())
    for keeps in (False, True):
        files = PoolFiles(new_fleet_id())
        files.hold()
        transport = ProcessTransport(lambda _worker, _envelope: None, lambda _worker: here, files, here)
        core = WorkerCore("w0", ENCODE, WorkerSettings(setup.path, options, keeps_weights=keeps), transport)
        try:
            for before, roles in ((ENCODE, ANSWER), (ANSWER, ENCODE), (ENCODE, ANSWER)):
                core.handle(Offload(frozenset(), before))
                times = core.handle(Onload(roles))
                core.handle(SetRoles(roles))
                core.step()
                size = core.load().memory.weight_bytes / 1e9
                yield {
                    "weights": "kept" if keeps else "files",
                    "to": role_letters(roles),
                    "GB": round(size, 3),
                    "weights s": round(times.weights_s, 4),
                    "stages s": round(times.total_s - times.weights_s, 3),
                    "GB/s": round(size / max(times.weights_s, 1e-9), 2),
                }
        finally:
            core.close()
            files.release()
        del core, transport
        gc.collect()


def _replaying(setup: Setup, tower: Any) -> FrameEncoder:
    """An encoder that replays small calls; on a CPU the same one."""
    if not setup.placement.is_cuda:
        return FrameEncoder(setup.adapter, tower)
    maker = CudaGraphMaker(setup.placement.device)
    return FrameEncoder(
        setup.adapter, tower, captured=captured(setup.adapter, tower, maker.capture, SIZES[-1])
    )


def transfers(setup: Setup) -> Iterator[Row]:
    """Keys and values from P to D, embeddings from E to P: pools of one process, then those of two."""
    model = setup.load("language")
    for num_tokens in setup.sizes.transfer_tokens:
        blocks = tuple(range(ceil_div(num_tokens, _BLOCK_SIZE)))
        ours, theirs = (_pools(setup, model, len(blocks)) for _ in range(2))
        ticket = KVTicket("t", "d0", "p0", "r", 0, num_tokens, (blocks[::-1],))
        chunk = KVChunk((KVSpan(0, 0, num_tokens, blocks),))
        seconds = setup.seconds(partial(ours.receive, ticket, chunk, theirs))
        num_bytes = num_tokens * kv_bytes_per_token(model)
        yield {"way": "P to D", "by": "same process", "tokens": num_tokens, **_rate(num_bytes, seconds)}
    layout = embedding_layout(model.config, setup.placement.dtype)
    for num_tokens in setup.sizes.transfer_tokens:
        blocks = tuple(range(ceil_div(num_tokens, _BLOCK_SIZE)))
        shape = EncoderPoolShape(len(blocks), _BLOCK_SIZE, layout)
        target, source = (shape.build(device=setup.placement.device) for _ in range(2))
        places = CachedGroup(num_tokens, blocks), CachedGroup(num_tokens, blocks[::-1])
        seconds = setup.seconds(partial(target.copy, source, *places))
        num_bytes = num_tokens * layout.bytes_per_embedding
        yield {"way": "E to P", "by": "same process", "tokens": num_tokens, **_rate(num_bytes, seconds)}
    yield from between_processes(setup, kv_layouts(model)[0][0], layout, setup.sizes.transfer_tokens)


def first_token(setup: Setup) -> Iterator[Row]:
    """A video whose frames are decoded already, through E, P and D as threads, until its first token."""
    plan = video_plan(setup, setup.sizes.num_frames)
    frames = torch.randint(0, 256, (plan.num_frames, *plan.size, 3), dtype=torch.uint8)
    placement = setup.placement
    settings = WorkerSettings(
        setup.path,
        EngineConfig(
            device=str(placement.device),
            dtype=placement.dtype_name,
            num_kv_tokens=ceil_div(2 * plan.num_tokens + 4096, _BLOCK_SIZE) * _BLOCK_SIZE,
        ),
    )
    short = video_plan(setup, min(16, setup.sizes.num_frames))
    for group_tokens, batch_patches in ((256, 4096), (256, 16_384), (2048, 16_384)):
        sized = replace(settings, max_batch_patches=batch_patches)
        first_s = _first_s(sized, group_tokens, short, plan, frames)
        gc.collect()  # pipelines are circles of threads and stages, and a second one has no room
        yield {
            "frames": plan.num_frames,
            "visual tokens": plan.num_tokens,
            "group tokens": group_tokens,
            "batch patches": batch_patches,
            "first token s": round(first_s, 3),
            "frames/s": round(plan.num_frames / first_s, 1),
        }


def _first_s(
    settings: WorkerSettings, group_tokens: int, short: MediaPlan, plan: MediaPlan, frames: torch.Tensor
) -> float:
    with SplitPipeline(settings, group_tokens) as pipeline:
        pipeline.ask("warm up", [short], [frames[: short.num_frames]], "What is shown?", 4)
        return pipeline.ask("measured", [plan], [frames], "What is shown?", 4).first_s


def video_plan(setup: Setup, num_frames: int) -> MediaPlan:
    """A video of so many frames, all of which are sampled."""
    facts = VideoFacts(num_frames, _SOURCE_FPS, *setup.sizes.frame_size)
    return setup.adapter.plan_video(facts, FrameSampling(num_frames=num_frames))


def _pools(setup: Setup, model: Any, num_blocks: int) -> KVPools:
    shape = KVPoolsShape((KVGroupShape(num_blocks, kv_layouts(model)[0][0]),), _BLOCK_SIZE)
    return shape.build(device=setup.placement.device)


def _segment(num_tokens: int, num_cached: int, first_block: int, num_blocks: int) -> Segment:
    """New tokens of one request behind `num_cached` others, which are zeros."""
    positions = np.tile(np.arange(num_cached, num_cached + num_tokens), (3, 1))
    table = np.arange(first_block, first_block + num_blocks, dtype=np.int32)
    return Segment(np.arange(num_tokens) % 250 + 1, positions, [num_cached], [table])


def _language_bytes(model: Any) -> int:
    """Bytes of the weights that a pass reads: all but the embedding of tokens."""
    return sum(each.nbytes for each in model.parameters()) - _embedding(model).nbytes


def _language_operations(model: Any, num_tokens: int) -> float:
    """Of the matrix products and the causal attention of one pass from nothing, with one row of logits."""
    config, layout = model.get_decoder().config, kv_layouts(model)[0][0]
    layers = sum(each.numel() for each in model.get_decoder().layers.parameters())
    attended = num_tokens * (num_tokens + 1) / 2
    attention = 4 * layout.num_layers * config.num_attention_heads * layout.head_dim * attended
    return 2.0 * layers * num_tokens + attention + 2.0 * _embedding(model).numel()


def _embedding(model: Any) -> torch.Tensor:
    weight: torch.Tensor = model.get_input_embeddings().weight
    return weight


def _tower_operations(tower: Any, plan: MediaPlan) -> float:
    """Of a Qwen2.5-VL tower: blocks for every patch, the merger for every token, windows and whole units."""
    config, patches, merge = tower.config, plan.grid.num_patches, tower.config.spatial_merge_size**2
    merger = sum(each.numel() for each in tower.merger.parameters())
    others = sum(each.numel() for each in tower.parameters()) - merger
    window = (config.window_size // config.patch_size) ** 2
    num_whole = len(config.fullatt_block_indexes)
    attended = num_whole * patches // plan.grid.t + (config.depth - num_whole) * min(window, patches)
    return (
        2.0 * others * patches
        + 2.0 * merger * patches / merge
        + 4.0 * config.hidden_size * patches * attended
    )
