"""Compares passes that replay a captured one with those that launch every kernel: tokens, and time.

On a CPU, where nothing can be captured, what would be is run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.checks import shrunk_checkpoint
from benchmarks.gpu.sections import OK
from benchmarks.gpu.setup import Setup
from benchmarks.reporting import Row
from epd.encoders import Adapter, load_adapter
from epd.encoders.groups import prompt_identity
from epd.engine_config import EngineConfig
from epd.kv.pass_limits import SchedulerConfig
from epd.sampling_params import SamplingParams
from epd.stages.engine.engine import LanguageEngine
from epd.stages.engine.generation import GenerateRequest, GenerationSettings
from epd.stages.engine.graphs import Capturing, CudaGraphMaker
from epd.stages.engine.model_runner import ModelRunner
from epd.stages.engine.packed_pass import Segment
from epd.stages.engine.setup import build_engine, kv_shape
from epd.stages.loading.weights import load_role
from epd.types import Int32Array, ceil_div

_BLOCK_SIZE = 16
_NUM_TOKENS = 24
# Steps that are timed together: the device is waited for at their end alone.
_STEPS = 6
_NUM_DECODES = 4  # beside a chunk
# The model's own, which Qwen2.5-VL is asked with unless a request says another.
_PENALTY = 1.05


def replays(setup: Setup) -> Iterator[Row]:
    """Tokens of a small model in float32, then steps of the measured one, and passes with a chunk."""
    placement = replace(setup.placement, dtype=torch.float32)
    path = shrunk_checkpoint(setup.sizes.checked[0], setup.folder)
    model, adapter = load_role(path, "language", placement).model, load_adapter(path)
    for batch in (1, 3):
        yield _equality(model, adapter, setup, batch)
    model = setup.load("language")
    for batch in setup.sizes.decode_batches:
        yield _speed(model, setup, batch)
    for num_tokens in setup.sizes.mixed_tokens:
        yield _mixed(model, setup, num_tokens)


def _equality(model: Any, adapter: Adapter, setup: Setup, batch: int) -> Row:
    """Answers of other lengths, so that the batch gets smaller; a size of four pads three.

    Eager and in step, and replayed and ahead of what is read; prompts come in chunks beside decodes.
    """
    found = []
    config = SchedulerConfig(setup.sizes.pass_tokens, max_num_seqs=4, max_chunk_tokens=8)
    for is_fast in (False, True):
        options = EngineConfig(num_kv_tokens=1024, async_scheduling=is_fast, enforce_eager=not is_fast)
        engine, has_graphs = _engine(model, adapter, setup, config, options)
        tokens: dict[str, list[int]] = {}
        while engine.has_work() or engine.counts.num_steps == 0:
            if engine.counts.num_steps in range(0, 4 * batch, 4):
                number = engine.counts.num_steps // 4
                _add(engine, adapter, [number], _NUM_TOKENS - 4 * number, 16)
            result = engine.step()
            for fault in result.faults:
                raise fault.cause
            for output in result.outputs:
                tokens.setdefault(output.request_id, []).append(output.token.token_id)
        found.append(tokens)
    num_tokens = sum(map(len, found[0].values()))
    return {
        "what": "tokens in float32",
        "requests": batch,
        "captured": has_graphs,
        "tokens": num_tokens,
        OK: has_graphs and found[0] == found[1],
    }


def _speed(model: Any, setup: Setup, batch: int) -> Row:
    row: Row = {"what": "step", "requests": batch, "context": setup.sizes.step_context}
    for name, enforce_eager in (("eager ms", True), ("replayed ms", False)):
        room = batch * (setup.sizes.step_context + 16 * _BLOCK_SIZE)
        options = EngineConfig(num_kv_tokens=room, async_scheduling=True, enforce_eager=enforce_eager)
        config = SchedulerConfig(setup.sizes.pass_tokens, max_num_seqs=batch)
        engine, has_graphs = _engine(model, setup.adapter, setup, config, options)
        _decode(engine, setup, batch)
        seconds = setup.seconds(lambda engine=engine: [engine.step() for _ in range(_STEPS)]) / _STEPS  # type: ignore[misc]
        row[name] = round(seconds * 1e3, 3)
    return row | {"captured": has_graphs, OK: has_graphs}


def _mixed(model: Any, setup: Setup, num_tokens: int) -> Row:
    """Passes with a chunk beside some decodes: logits, and the time, of the host and in all."""
    maker = CudaGraphMaker(setup.placement.device) if setup.placement.is_cuda else _Repeats()
    context = setup.sizes.step_context
    width = ceil_div(context + num_tokens, _BLOCK_SIZE)
    nums_new = *[1] * _NUM_DECODES, num_tokens - _NUM_DECODES
    tables = np.arange(len(nums_new) * width, dtype=np.int32).reshape(-1, width)
    segments = [_segment(each, context, table) for each, table in zip(nums_new, tables, strict=True)]
    row: Row = {"what": "pass with a chunk", "requests": len(segments), "context": context}
    row["tokens"] = num_tokens
    found = []
    for name, capturing in (("eager", None), ("replayed", Capturing(maker, len(segments), num_tokens))):
        room = (len(segments) * width + 1) * _BLOCK_SIZE
        pools = kv_shape(model, room, _BLOCK_SIZE).build(device=setup.placement.device)
        runner = ModelRunner(model, setup.adapter, pools, capturing=capturing)
        work = partial(runner.run, segments)
        found.append(runner.run(segments).float())
        for what, on_host in (("ms", False), ("host ms", True)):
            row[f"{name} {what}"] = round(setup.seconds(work, on_host=on_host) * 1e3, 3)
    difference, most = (found[0] - found[1]).abs().max(), found[0].abs().max()
    has_graphs = runner.num_spare_blocks > 0
    return row | {"captured": has_graphs, OK: has_graphs and bool(difference <= 2e-2 * most)}


def _segment(num_tokens: int, num_cached: int, table: Int32Array) -> Segment:
    """New tokens of one request behind `num_cached` others, which are zeros. table: int32 [blocks]."""
    positions = np.tile(np.arange(num_cached, num_cached + num_tokens), (3, 1))
    return Segment(np.arange(num_tokens) % 250 + 1, positions, [num_cached], [table])


def _engine(
    model: Any, adapter: Adapter, setup: Setup, config: SchedulerConfig, options: EngineConfig
) -> tuple[LanguageEngine, bool]:
    """Builds an engine; returns also whether its passes were captured."""
    engine = build_engine(
        model,
        adapter,
        GenerationSettings(frozenset()),
        config=config,
        options=options,
        graphs=None if setup.placement.is_cuda else _Repeats(),
    )
    return engine, engine.has_graphs


def _decode(engine: LanguageEngine, setup: Setup, batch: int) -> None:
    """Lets so many requests begin to decode."""
    _add(engine, setup.adapter, range(batch), 12 * _BLOCK_SIZE, setup.sizes.step_context)
    while sum(each.is_decoding for each in engine.scheduler.running) < batch:
        for fault in engine.step().faults:
            raise fault.cause


class _Repeats:
    """Stands in for CUDA graphs on a CPU."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run


def _add(
    engine: LanguageEngine, adapter: Adapter, numbers: Iterable[int], max_tokens: int, context: int
) -> None:
    for number in numbers:
        prompt = adapter.plan_prompt([], str(number % 10) * max(1, context - 64))
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, repetition_penalty=_PENALTY)
        engine.add(GenerateRequest(f"r{number}", prompt, prompt_identity(prompt, []), sampling))
