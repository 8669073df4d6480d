"""Checks and measures mixtures of experts, by themselves and in decodes of a model that does not fit whole.

E experts, C channels, I within an expert, K experts of a row.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers import AutoConfig, AutoModelForImageTextToText

from benchmarks.gpu.measures import copy_bytes_per_s, step_s
from benchmarks.gpu.setup import Setup
from benchmarks.reporting import Row
from epd.encoders import load_adapter
from epd.stages.decoder.experts import Experts
from epd.stages.engine.graphs import CudaGraphMaker
from epd.stages.engine.model_runner import kv_bytes_per_token
from epd.stages.engine.state_pool import state_layout
from tests.models.recurrent import RECURRENT
from tests.tiny_models import EXPERTS, build_qwen3_5

# Its configuration is the one of Qwen3.6-35B-A3B, too.
_MODEL = "Qwen3.5-35B-A3B"
# One round and two of its pattern of layers: what the second adds, every other one does.
_NUM_LAYERS = (4, 8)
# Choices of experts that take turns, so that no matrix is still in a cache of the device.
_NUM_CHOICES = 16
_MANY_ROWS = 1024  # choose all experts: one choice is enough


def products_of_experts(setup: Setup, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yields what experts make of rows, and the same in float64, expert by expert.

    Every row chooses the first expert, and nobody the last, whose matrices are no numbers.
    """
    for name, *sizes in setup.sizes.mixtures:
        experts, num_experts = _drawn(setup, dtype, *sizes[:3]), sizes[0]
        for matrices in _matrices(experts):
            matrices[-1] = torch.nan
        for num_rows in setup.sizes.checked_expert_rows:
            rows = _random(setup, dtype, num_rows, sizes[1])
            scores = torch.rand(num_rows, num_experts, device=rows.device)
            scores[:, 0], scores[:, -1] = 2, -1
            weights, chosen = scores.topk(sizes[3])
            weights = weights.softmax(-1).to(dtype)
            ours = experts(rows, chosen, weights)
            yield f"{num_rows} rows by experts of {name}", ours, _one_by_one(rows, experts, chosen, weights)


def _one_by_one(rows: Tensor, experts: Experts, chosen: Tensor, weights: Tensor) -> Tensor:
    """Computes [T, C] on a CPU, in float64."""
    gate_up, down = _matrices(experts)
    added = torch.zeros(rows.shape, dtype=torch.float64, device=rows.device)
    for number in chosen.unique().tolist():
        row, place = (chosen == number).nonzero(as_tuple=True)
        gate, up = (rows[row].double() @ gate_up[number].double().t()).chunk(2, dim=-1)
        found = (silu(gate) * up) @ down[number].double().t()
        added.index_add_(0, row, found * weights[row, place, None].double())
    return added.cpu()


def _matrices(experts: Experts) -> tuple[Tensor, Tensor]:
    """Returns those of experts that are not quantised."""
    assert isinstance(experts.gate_up, Tensor)
    assert isinstance(experts.down, Tensor)
    return experts.gate_up, experts.down


def experts(setup: Setup) -> Iterator[Row]:
    """Times experts of one layer, replayed: bytes of the chosen ones against the device's large copy."""
    bound = copy_bytes_per_s(setup)
    for name, num_experts, size, width, top_k in setup.sizes.mixtures:
        mixture = _drawn(setup, setup.placement.dtype, num_experts, size, width)
        for num_rows in setup.sizes.expert_rows:
            rows = _random(setup, setup.placement.dtype, num_rows, size)
            choices = _choices(setup, num_rows, num_experts, top_k)
            seconds = _replayed_s(setup, mixture, rows, choices)
            num_chosen = sum(len(chosen.unique()) for chosen, _ in choices) / len(choices)
            num_bytes = num_chosen * 3 * size * width * rows.element_size()
            operations = 2 * num_rows * top_k * 3 * size * width
            yield {
                "experts of": name,
                "rows": num_rows,
                "chosen": round(num_chosen, 1),
                "ms": round(seconds * 1e3, 4),
                "GB/s read": round(num_bytes / 1e9 / seconds, 1),
                "times a copy's": round(seconds * bound / num_bytes, 2),
                "TFLOP/s": round(operations / seconds / 1e12, 3),
            }


def _replayed_s(setup: Setup, mixture: Experts, rows: Tensor, choices: list[tuple[Tensor, Tensor]]) -> float:
    def each() -> None:
        for chosen, weights in choices:
            mixture(rows, chosen, weights)

    with torch.inference_mode():
        is_cuda = setup.placement.is_cuda
        work = CudaGraphMaker(setup.placement.device).capture(each) if is_cuda else each
        return setup.seconds(work) / len(choices)


def _choices(setup: Setup, num_rows: int, num_experts: int, top_k: int) -> list[tuple[Tensor, Tensor]]:
    """Draws experts, each as often as any other, and their weights: int64 and floats, [T, K]."""
    device, dtype = setup.placement.device, setup.placement.dtype
    count = 1 if num_rows >= _MANY_ROWS else _NUM_CHOICES
    drawn = [torch.rand(num_rows, num_experts, device=device).topk(top_k) for _ in range(count)]
    return [(found.indices, found.values.softmax(-1).to(dtype)) for found in drawn]


def _drawn(setup: Setup, dtype: torch.dtype, num_experts: int, size: int, width: int) -> Experts:
    gate_up = _random(setup, dtype, num_experts, 2 * width, size).mul_(size**-0.5)
    return Experts(gate_up, _random(setup, dtype, num_experts, size, width).mul_(width**-0.5))


def _random(setup: Setup, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=setup.placement.device).normal_()


def mixture_decode(setup: Setup) -> Iterator[Row]:
    """Engine steps of a few layers of Qwen3.6-35B-A3B with random weights, scaled up to all 40.

    Passes are replayed, and for the time beside it launched as with `--enforce-eager`.

    The bound: bytes of the matrices that are read, of keys and values, and of states, which are written too,
    at the rate of the device's large copy. As many experts as are chosen if all are equally likely.
    """
    config, adapter = _config(setup), load_adapter(_tiny(setup))
    context, bound = setup.sizes.step_context, copy_bytes_per_s(setup)
    seconds: dict[tuple[int, int], float] = {}
    launched: dict[tuple[int, int], float] = {}
    read: dict[tuple[int, int], float] = {}
    for num_layers in _NUM_LAYERS:
        model = _built(config, num_layers, setup)
        for batch in setup.sizes.mixture_batches:
            of, step = (num_layers, batch), partial(step_s, setup, model, adapter, batch, context)
            seconds[of], launched[of] = (
                step(runs_ahead=True, is_captured=is_captured) for is_captured in (True, False)
            )
            read[of] = read_bytes(model, batch, context)
        del model
        gc.collect()  # layers and engines are circles, and the next model may have no room
    for batch in setup.sizes.mixture_batches:
        times, eager, sizes = (
            [each[num, batch] for num in _NUM_LAYERS] for each in (seconds, launched, read)
        )
        whole_s, least_s = scaled(*times), scaled(*sizes) / bound
        yield {
            "requests": batch,
            "context": context,
            **{
                f"ms of {num} layers": round(each * 1e3, 3)
                for num, each in zip(_NUM_LAYERS, times, strict=True)
            },
            "ms of 40, scaled": round(whole_s * 1e3, 3),
            "launched": round(scaled(*eager) * 1e3, 3),
            "bound ms": round(least_s * 1e3, 3),
            "times the bound": round(whole_s / least_s, 2),
        }


def scaled(of_one_round: float, of_two: float, num_rounds: int = 10) -> float:
    """Returns what so many rounds of layers take, if each one more takes as much as the second."""
    return of_one_round + (num_rounds - 1) * (of_two - of_one_round)


def read_bytes(model: Any, batch: int, context: int) -> float:
    """Counts the bytes that a decode reads, and those of states that it writes."""
    decoder, state = model.get_decoder(), state_layout(model)
    total: float = model.get_output_embeddings().weight.nbytes
    for name, each in decoder.layers.named_parameters():
        share = 1.0
        if ".experts." in name:
            share = 1 - (1 - decoder.config.num_experts_per_tok / len(each)) ** batch
        total += share * each.nbytes
    of_states = 0 if state is None else 2 * state.bytes_per_sequence
    return total + batch * (context * kv_bytes_per_token(model) + of_states)


def _tiny(setup: Setup) -> Path:
    """A small checkpoint of the same family, whose adapter plans prompts of text."""
    folder = setup.folder / "mixture"
    return folder if folder.exists() else build_qwen3_5(folder, **EXPERTS)


def _config(setup: Setup) -> Any:
    published = RECURRENT[_MODEL].config
    path = _tiny(setup) / "config.json"
    config = published if setup.sizes.is_full else json.loads(path.read_text(encoding="utf-8"))
    return AutoConfig.for_model(**config)


def _built(config: Any, num_layers: int, setup: Setup) -> Any:
    """Makes the model of a configuration on the device, with its first layers alone."""
    text = config.get_text_config()
    kinds, all_layers = text.layer_types, text.num_hidden_layers
    text.layer_types, text.num_hidden_layers = kinds[:num_layers], num_layers
    with torch.device(setup.placement.device):
        model = AutoModelForImageTextToText.from_config(config, dtype=setup.placement.dtype).eval()
    text.layer_types, text.num_hidden_layers = kinds, all_layers
    return model.requires_grad_(requires_grad=False)
