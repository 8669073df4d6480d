"""A decode step of the engine against the matrix products and the attention in it, and nothing else.

products: the merged matrices of all layers and the head, multiplied as the engine does, and one call of
attention a layer over keys and values that lie side by side. What a step takes beyond that is what norms,
rotary positions, the cache, planning, sampling and text cost.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.reporting import Row, median_ratio
from encoders import load_adapter
from encoders.adapter import Adapter
from encoders.identity import prompt_identity
from epd.models import embedded_model_path
from epd.sampling_params import SamplingParams
from stages.decoder.layers import GatedMlp, head_of, layers_of
from stages.engine.engine import LanguageEngine
from stages.engine.generation import GenerateRequest, GenerationSettings
from stages.engine.setup import build_engine
from stages.placement import CPU_FLOAT32
from stages.weights import load_role

PATH = embedded_model_path()
CONTEXTS = (100, 1000)


@dataclass(slots=True)
class Decoding:
    """An engine with requests that all decode."""

    engine: LanguageEngine
    names: list[str]
    context: int

    @classmethod
    def of(cls, engine: LanguageEngine, adapter: Adapter, count: int, context: int, steps: int) -> Decoding:
        prompt = adapter.plan_prompt([], "x" * context)  # the tokenizer has a token for every byte
        names = [f"s{index}" for index in range(count)]
        for name in names:
            sampling = SamplingParams(max_tokens=3 * steps + 64)
            engine.add(GenerateRequest(name, prompt, prompt_identity(prompt, []), sampling))
        while engine.counts.num_steps == 0 or any(not r.is_decoding for r in engine.scheduler.running):
            engine.step()
        return cls(engine, names, len(prompt))

    def end(self) -> None:
        for name in self.names:
            self.engine.abort(name)


class Products:
    """The matrix products and the attention of a decode step, with drawn inputs."""

    def __init__(self, model: Any, count: int, context: int) -> None:
        decoder = model.get_decoder()
        config = decoder.config
        layers = layers_of(decoder).layers
        width, gates = config.hidden_size, config.intermediate_size
        group = config.num_attention_heads // config.num_key_value_heads
        dim = width // config.num_attention_heads
        rows, gated = torch.randn(count, width), torch.randn(count, gates)
        self._work: list[tuple[Callable[[Tensor], Tensor], Tensor]] = []
        for layer in layers:
            assert isinstance(layer.mlp, GatedMlp)
            self._work += [(layer.qkv, rows), (layer.out, rows)]
            self._work += [(layer.mlp.gate_up, rows), (layer.mlp.down, gated)]
        self._work.append((head_of(model), rows))
        heads = count, config.num_key_value_heads
        self._query = torch.randn(*heads, group, dim)
        self._caches = [[torch.randn(*heads, context, dim) for _ in range(2)] for _ in layers]

    @torch.inference_mode()
    def step(self) -> None:
        for multiply, rows in self._work:
            multiply(rows)
        for keys, values in self._caches:
            torch.nn.functional.scaled_dot_product_attention(self._query, keys, values)


def product_rows(counts: Sequence[int], repeats: int) -> list[Row]:
    """Milliseconds of a step with our decoder, with transformers' modules, and of the bare products."""
    adapter = load_adapter(PATH)
    model: Any = load_role(PATH, "language", CPU_FLOAT32).model
    theirs: Any = load_role(PATH, "language", CPU_FLOAT32).model
    settings = GenerationSettings(frozenset())
    ours = build_engine(model, adapter, settings, num_kv_tokens=2**16)
    modules = build_engine(theirs, adapter, settings, num_kv_tokens=2**16, by_modules=True)
    rows = []
    for context in CONTEXTS:
        for count in counts:
            rows.append(_row((ours, modules), adapter, model, count, context, repeats))
            print(rows[-1], file=sys.stderr)
    return rows


def _row(
    engines: tuple[LanguageEngine, LanguageEngine],
    adapter: Adapter,
    model: Any,
    count: int,
    context: int,
    repeats: int,
) -> Row:
    ours, modules = (Decoding.of(engine, adapter, count, context, repeats) for engine in engines)
    products = Products(model, count, ours.context)
    work = {"ours": ours.engine.step, "modules": modules.engine.step, "products": products.step}
    spent: dict[str, list[float]] = {name: [] for name in work}
    for repeat in range(repeats):
        for name in sorted(work, reverse=bool(repeat % 2)):
            spent[name].append(_timed(work[name]))
    ours.end()
    modules.end()
    medians = {f"{name}_ms": round(1e3 * statistics.median(each), 3) for name, each in spent.items()}
    return {
        "requests": count,
        "context": ours.context,
        **medians,
        "ours_over_products": round(median_ratio(spent["ours"], spent["products"]), 3),
        "modules_over_products": round(median_ratio(spent["modules"], spent["products"]), 3),
        "ours_over_modules": round(median_ratio(spent["ours"], spent["modules"]), 3),
        "repeats": repeats,
    }


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
