"""Checks and measures the gated delta rule alone, with the heads of Qwen3.5-35B-A3B, without a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

from benchmarks.gpu.sections import OK
from benchmarks.gpu.setup import Setup
from benchmarks.reporting import Row
from epd.encoders.device import CPU
from epd.stages.decoder.delta_layer import DeltaSizes, GatedDelta
from epd.stages.decoder.delta_rule import DeltaInputs, DeltaPlan
from epd.stages.decoder.operations import RmsNorm
from epd.stages.engine.graphs import CudaGraphMaker

_HEADS, _SMALL = DeltaSizes(16, 32, 128, 128), DeltaSizes(2, 4, 16, 16)
# Of the checks: a decode, a known token and two drafts, the start of a prompt, and a chunk behind others.
_ROWS, _SLOTS = (1, 3, 200, 64), ((0, 4, 0), (1, 5, 2), (None, 6, 0), (2, 7, 0))
# Of the largest number, against float64: three products of TF32 keep what float32 does but for a few bits.
_ALLOWED = 3e-5
# Layers with states of their own, as in the model: those of one would stay in a GPU's cache.
_NUM_LAYERS = 30


def rule(setup: Setup) -> Iterator[Row]:
    """Compares what rows read, and the states, with the twin in float64 on the CPU."""
    device, sizes = setup.placement.device, _sizes(setup)
    inputs, exact = _inputs(sizes, sum(_ROWS)), _states(sizes, 8, CPU).normal_().double()
    there = exact.float().to(device)
    theirs = _plan(_ROWS, _SLOTS, CPU).attend(_moved(inputs, torch.float64), exact)
    ours = _plan(_ROWS, _SLOTS, device).attend(_moved(inputs, device), there)
    for what, one, other in (("rows", ours, theirs), ("states", there, exact)):
        difference = float((one.cpu().double() - other).abs().max() / other.abs().max())
        told = {"difference": f"{difference:.1e}", "allowed": _ALLOWED, OK: difference <= _ALLOWED}
        yield {"kernel": f"delta rule, {what}", "dtype": "float32", **told}
    yield _around(setup)


def _around(setup: Setup) -> Row:
    """Compares what the rule is given, tails, and the gates behind it with the twin on the CPU."""
    device, sizes, found = setup.placement.device, _sizes(setup), []
    rows, tails = _projected(sizes, sum(_ROWS)), torch.randn(8, 3, sizes.num_channels)
    gates = rows[:, sizes.num_channels : sizes.num_channels + sizes.value_channels]
    for where in (CPU, device):
        layer, there = _layer(sizes, where), tails.to(where, copy=True)
        inputs = layer.inputs(rows.to(where), there, _plan(_ROWS, _SLOTS, where))
        found.append([*inputs, there, layer.gated(inputs.value.contiguous(), gates.to(where))])
    pairs = zip(*found, strict=True)
    difference = max(float((our.cpu() - one).abs().max() / one.abs().max()) for one, our in pairs)
    told = {"difference": f"{difference:.1e}", "allowed": _ALLOWED, OK: difference <= _ALLOWED}
    return {"kernel": "around the delta rule", "dtype": "float32", **told}


def measured(setup: Setup) -> Iterator[Row]:
    """Times decodes, whose bound is to read and write their states, and prefill; beside plain torch."""
    sizes, num_tokens = _sizes(setup), setup.sizes.prefill_tokens[-1]
    state_bytes = 4 * sizes.num_heads * sizes.key_dim * sizes.value_dim
    for batch in (1, 32 if setup.sizes.is_full else 2):
        slots = [(each, batch + each, 0) for each in range(batch)]
        row, seconds = _times(setup, sizes, [1] * batch, slots)
        moved = 2 * batch * state_bytes
        told = {"what": f"decode of {batch}", **row, "GB/s of states": round(moved / seconds / 1e9, 1)}
        yield told | _layer_times(setup, sizes, slots)
    for num_runs in (1, 8):
        runs = [num_tokens // num_runs] * num_runs
        row, seconds = _times(setup, sizes, runs, [(None, each, 0) for each in range(num_runs)])
        told = {"what": f"prefill of {num_tokens} in {num_runs}", **row}
        yield told | {"tokens/s": round(num_tokens / seconds)}


def _times(
    setup: Setup, sizes: DeltaSizes, rows: Sequence[int], slots: Sequence[tuple[int | None, int, int]]
) -> tuple[Row, float]:
    """Returns the time of one layer's rule, and how often as long plain torch takes; the time in seconds."""
    device, num_slots = setup.placement.device, 1 + max(target for _, target, _ in slots)
    plan, inputs = _plan(rows, slots, device), _moved(_inputs(sizes, sum(rows)), device)
    layers = [_states(sizes, num_slots, device) for _ in range(_NUM_LAYERS)]

    def seconds_of(attend: Callable[[DeltaInputs, Tensor], Tensor]) -> float:
        return setup.seconds(lambda: [attend(inputs, each) for each in layers]) / _NUM_LAYERS

    seconds, plain = seconds_of(plan.attend), seconds_of(plan.plain.attend)
    told = {"us": round(seconds * 1e6, 1), "plain us": round(plain * 1e6, 1)}
    return told | {"times as fast": round(plain / seconds, 2)}, seconds


def _layer_times(setup: Setup, sizes: DeltaSizes, slots: Sequence[tuple[int | None, int, int]]) -> Row:
    """Returns the time of a layer's decodes between its products, launched and replayed."""
    device, dtype = setup.placement.device, setup.placement.dtype
    layer, plan = _layer(sizes, device), _plan([1] * len(slots), slots, device)
    rows, num_slots = _projected(sizes, len(slots)).to(device, dtype), 2 * len(slots)
    tails = [rows.new_zeros(num_slots, 3, sizes.num_channels) for _ in range(_NUM_LAYERS)]
    states = [(each, _states(sizes, num_slots, device)) for each in tails]

    def work() -> None:
        for each in states:
            layer(rows, *each, plan)

    with torch.inference_mode():
        launched = setup.seconds(work) / _NUM_LAYERS
        replay = CudaGraphMaker(device).capture(work) if setup.placement.is_cuda else work
        replayed = setup.seconds(replay) / _NUM_LAYERS
    return {"layer us": round(launched * 1e6, 1), "replayed us": round(replayed * 1e6, 1)}


def _layer(sizes: DeltaSizes, device: torch.device) -> GatedDelta:
    """Draws a layer that is given projected rows."""
    torch.manual_seed(1)
    filters, gates = torch.randn(4, sizes.num_channels), torch.rand(sizes.num_heads).neg()
    norm = RmsNorm.of(torch.rand(sizes.value_dim).to(device), 1e-6)
    return GatedDelta(sizes, lambda rows: rows, filters.to(device), gates.to(device), gates.to(device), norm)


def _projected(sizes: DeltaSizes, num_tokens: int) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(num_tokens, sizes.num_channels + sizes.value_channels + 2 * sizes.num_heads)


def _sizes(setup: Setup) -> DeltaSizes:
    return _HEADS if setup.sizes.is_full else _SMALL


def _plan(
    rows: Sequence[int], slots: Sequence[tuple[int | None, int, int]], device: torch.device
) -> DeltaPlan:
    return DeltaPlan.build(np.cumsum([0, *rows]).astype(np.int32), slots, device)


def _states(sizes: DeltaSizes, num_slots: int, device: torch.device) -> Tensor:
    return torch.zeros(num_slots, sizes.num_heads, sizes.key_dim, sizes.value_dim, device=device)


def _inputs(sizes: DeltaSizes, num_tokens: int) -> DeltaInputs:
    """Draws the inputs of a layer: directions, decays of a half and less, strengths around a half."""
    torch.manual_seed(0)
    of_keys = num_tokens, sizes.num_key_heads, sizes.key_dim
    query, key = (normalize(torch.randn(*of_keys), dim=-1) for _ in range(2))
    value = torch.randn(num_tokens, sizes.num_heads, sizes.value_dim)
    decay, strength = (torch.randn(num_tokens, sizes.num_heads) for _ in range(2))
    return DeltaInputs(query * sizes.key_dim**-0.5, key, value, -softplus(decay), strength.sigmoid())


def _moved(inputs: DeltaInputs, where: torch.device | torch.dtype) -> DeltaInputs:
    return DeltaInputs(*(each.to(where) for each in inputs))
