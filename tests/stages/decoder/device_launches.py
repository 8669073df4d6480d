"""Counts what our decoder launches on a GPU that is not here: kernels and operations of torch.

    python -m tests.stages.decoder.device_launches

Tensors are fake; kernels are recorded instead of being run, operations of torch are only counted.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForImageTextToText, Qwen3_5Config

from epd.stages.attention.attention import AttentionBatch, AttentionPlan
from epd.stages.attention.device import DeviceHeads
from epd.stages.decoder.decoder import DecoderInputs, FusedDecoder, LayerCaches
from epd.stages.decoder.delta_rule import DeltaPlan
from epd.stages.decoder.layers import layers_of
from epd.stages.decoder.text_model import text_model
from epd.stages.engine.state_pool import StatePool, StatesShape, state_layout
from tests.stages.decoder.quantized_matrices import to_fp8
from tests.stages.decoder.text_models import CONFIGS, QWEN_VISION, SECTIONS, TEXT
from tests.stages.kernels_ahead import Launch, recorded

_DISPATCHED = (
    "epd.stages.attention.attention",
    "epd.stages.attention.device",
    "epd.stages.decoder.delta_layer",
    "epd.stages.decoder.delta_rule",
    "epd.stages.decoder.experts",
    "epd.stages.decoder.operations",
    "epd.stages.loading.quantized_linear",
)
IN_FP8 = " in FP8"
# One layer of attention, then those with states.
_RECURRENT: dict[str, Any] = {
    "qwen3.5": lambda: Qwen3_5Config(
        text_config={
            **TEXT,
            "head_dim": 16,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "rope_parameters": {**SECTIONS, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
        },
        vision_config={**QWEN_VISION, "num_position_embeddings": 16},
    )
}
_CONTEXTS = (40_000, 900)


class Operations(TorchDispatchMode):
    """Counts operations that launch something: neither views nor new memory do."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_view = any(each.alias_info and not each.alias_info.is_write for each in func._schema.returns)
        if func.namespace == "aten" and not is_view and "empty" not in func.__name__:
            self.names.append(func.overloadpacket.__name__)
        return result


def launches(name: str, num_layers: int, *, is_warm_up: bool = False) -> tuple[list[Launch], list[str]]:
    """The kernels and operations of the first layers of a decode step, or of a warm-up."""
    operations = Operations()

    def launch() -> None:
        with torch.device("cuda"):
            config = (CONFIGS | _RECURRENT)[name.removesuffix(IN_FP8)]()
            model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).eval()
        if name.endswith(IN_FP8):
            to_fp8(model)
        known = text_model(model.get_decoder())
        assert known is not None
        decoder = FusedDecoder(known, layers_of(model.get_decoder()))
        heads = known.num_kv_heads, known.head_dim
        storage = torch.empty(8, 3, 2, 16, *heads, dtype=torch.bfloat16, device="cuda")
        caches = [(storage[:, index, 0], storage[:, index, 1]) for index in range(3)]
        states = _states(model)
        if is_warm_up:
            decoder.warm_up(caches[0])
            if states is not None:
                decoder.warm_up_states(states)
            return
        positions = torch.empty(3 if known.row_of_frequency is not None else 1, 2, device="cuda").long()
        of_states = None
        if states is not None:
            caches = [*caches[:1], states, states]
            of_states = DeltaPlan.build(
                np.arange(3, dtype=np.int32), [(0, 1, 0), (2, 3, 0)], states[0].device
            )
        plans = [_plan(storage[:, 0, 0], known.num_heads)] * 3
        inputs = DecoderInputs(positions, LayerCaches(caches, plans, of_states), positions[0])
        hidden = torch.empty(2, 64, dtype=torch.bfloat16, device="cuda")
        with operations:
            decoder.run(hidden, inputs, range(num_layers))

    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for module in _DISPATCHED:
            stack.enter_context(patch(f"{module}.uses_kernels", lambda tensor: tensor.is_cuda))
        stack.enter_context(patch("epd.stages.attention.device._num_processors", lambda _: 132))
        stack.enter_context(patch("epd.stages.attention.device._chip", lambda _: 90))
        stack.enter_context(patch("torch.cuda.get_device_capability", lambda _: (9, 0)))
        stack.enter_context(patch("epd.stages.loading.quantized_linear.can_multiply", lambda *_: True))
        return recorded(launch), operations.names


def _states(model: Any) -> tuple[Tensor, Tensor] | None:
    """Tails and matrices of four slots, of the model's second layer."""
    layout = state_layout(model)
    if layout is None:
        return None
    shape = StatesShape(4, layout)
    return StatePool(shape, torch.empty(shape.num_bytes, dtype=torch.uint8, device="cuda")).layer(1)


def _plan(key_cache: Tensor, num_heads: int) -> AttentionPlan:
    """Decodes of two requests, one with a context long enough to be cut."""
    tables = np.zeros((2, -(-max(_CONTEXTS) // 16)), np.int32)
    starts, contexts = np.arange(3, dtype=np.int32), np.array(_CONTEXTS, np.int32)
    batch = AttentionBatch(starts, contexts, tables, np.zeros(2, np.int64), 16)
    return AttentionPlan.build(batch, "cuda", DeviceHeads.of(key_cache, num_heads))


def counted(kernels: list[Launch], operations: list[str]) -> Counter[str]:
    return Counter([each.name for each in kernels] + operations)


def variants(found: list[Launch]) -> set[tuple[str, str, str, str]]:
    return {(one.name, str(one.signature), str(one.constants), str(one.attributes)) for one in found}


def main() -> None:
    dense = ("qwen2", "qwen2.5-vl", "qwen3", "qwen3-vl", "llama with biases", f"qwen3{IN_FP8}")
    for name in (*dense, "qwen3 moe", "qwen3-vl moe", *_RECURRENT):
        two, three = (launches(name, num_layers) for num_layers in (2, 3))
        counts, kernels = counted(*three) - counted(*two), three[0]
        warm, _ = launches(name, 3, is_warm_up=True)
        others = {"_attend_kernel", "_merge_kernel"}  # that `epd.stages.engine.model_runner` launches
        missing = {each[0] for each in variants(kernels) - variants(warm)} - others
        print(f"{name}: {counts.total()} launches of {sorted(counts)}; not warm: {sorted(missing)}")


if __name__ == "__main__":
    main()
