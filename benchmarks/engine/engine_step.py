"""A decode step of the engine against the matrix products and the attention in it, and nothing else.

    python -m benchmarks.engine.engine_step [--quick] [--threads N] [--section shapes_vl|half_billion]

products: the merged matrices of all layers and the head, multiplied as the engine does, and one call of
attention a layer over keys and values that lie side by side. What a step takes beyond that is what norms,
rotary positions, the cache, planning, sampling and text cost.
shapes_vl: the embedded checkpoint, also with the modules of transformers.
half_billion: 0.36 billion drawn weights, in the shape of a text model of 0.5B without its vocabulary.
Repeats are interleaved; ratios are medians of the ratios within a repeat. Results go to
benchmarks/results/engine_step.{json,md,png}.
"""

from __future__ import annotations

import argparse
import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from benchmarks.reporting import RESULTS, Row, Section, median_ratio, run_sections, setting
from epd.encoders import load_adapter
from epd.encoders.adapter import Adapter
from epd.encoders.groups import prompt_identity
from epd.engine_config import EngineConfig
from epd.models import embedded_model_path
from epd.profiles.measuring import timed
from epd.sampling_params import SamplingParams
from epd.stages.decoder.layers import GatedMlp, head_of, layers_of
from epd.stages.engine.engine import LanguageEngine
from epd.stages.engine.generation import GenerateRequest, GenerationSettings
from epd.stages.engine.setup import build_engine
from epd.stages.loading.weights import load_role
from epd.stages.placement import CPU_FLOAT32

PATH = embedded_model_path()
COUNTS = (1, 8, 32)
AIM = 1.15
CONTEXTS = (100, 1000)
# Of its text model; the vocabulary is the embedded checkpoint's.
HALF_BILLION = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
}


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
        while sum(request.is_decoding for request in engine.scheduler.running) < count:
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


def shapes_vl_rows(counts: Sequence[int], repeats: int) -> list[Row]:
    """Milliseconds of a step with our decoder, with transformers' modules, and of the bare products."""
    adapter = load_adapter(PATH)
    models: list[Any] = [load_role(PATH, "language", CPU_FLOAT32).model for _ in range(2)]
    engines = {
        "ours": engine_of(models[0], adapter),
        "modules": engine_of(models[1], adapter, by_modules=True),
    }
    return [
        _row(engines, adapter, models[0], count, context, repeats) for context in CONTEXTS for count in counts
    ]


def half_billion_rows(counts: Sequence[int], repeats: int) -> list[Row]:
    """Milliseconds of a step of a larger model; its prompts take a minute, so only short contexts."""
    adapter, model = load_adapter(PATH), half_billion()
    engines = {"ours": engine_of(model, adapter)}
    return [_row(engines, adapter, model, count, CONTEXTS[0], repeats) for count in counts]


def half_billion() -> Any:
    """Draws the weights of the larger model."""
    config = AutoConfig.from_pretrained(PATH, local_files_only=True)
    for name, value in HALF_BILLION.items():
        setattr(config.text_config, name, value)
    config.text_config.layer_types = ["full_attention"] * HALF_BILLION["num_hidden_layers"]
    config.vision_config.out_hidden_size = HALF_BILLION["hidden_size"]
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()


def engine_of(model: Any, adapter: Adapter, *, by_modules: bool = False) -> LanguageEngine:
    settings = GenerationSettings(frozenset())
    options = EngineConfig(num_kv_tokens=2**16)
    return build_engine(model, adapter, settings, options=options, by_modules=by_modules)


def _row(
    engines: dict[str, LanguageEngine], adapter: Adapter, model: Any, count: int, context: int, repeats: int
) -> Row:
    decodings = {
        name: Decoding.of(engine, adapter, count, context, repeats) for name, engine in engines.items()
    }
    num_tokens = decodings["ours"].context
    work: dict[str, Callable[[], object]] = {name: each.engine.step for name, each in decodings.items()}
    work["products"] = Products(model, count, num_tokens).step
    spent: dict[str, list[float]] = {name: [] for name in work}
    for repeat in range(repeats):
        for name in sorted(work, reverse=bool(repeat % 2)):
            spent[name].append(timed(work[name]))
    for each in decodings.values():
        each.end()
    row = {
        "requests": count,
        "context": num_tokens,
        **{f"{name}_ms": round(1e3 * statistics.median(each), 3) for name, each in spent.items()},
        **{
            f"{name}_over_products": round(median_ratio(spent[name], spent["products"]), 3)
            for name in engines
        },
        "repeats": repeats,
    }
    print(row, file=sys.stderr)
    return row


def plot(sections: Sequence[str]) -> None:
    """Draws the ratios that are saved, with the milliseconds of a step."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    results = json.loads((RESULTS / "engine_step.json").read_text(encoding="utf-8"))
    shown = [name for name in sections if results.get(name)]
    figure, all_axes = pyplot.subplots(
        1, len(shown), figsize=(5 * len(shown), 3.6), layout="constrained", squeeze=False, sharey=True
    )
    for axes, name in zip(all_axes[0], shown, strict=True):
        rows = results[name]
        names = [f"{row['requests']} x {row['context']}" for row in rows]
        bars = axes.bar(names, [row["ours_over_products"] for row in rows], width=0.6)
        axes.bar_label(bars, [f"{row['ours_ms']:.0f} ms" for row in rows], fontsize=8)
        axes.axhline(AIM, color="black", linestyle="--", label=f"aim: {AIM}")
        axes.set(title=name, xlabel="requests x context", ylabel="a step over its products", ylim=(1, None))
        axes.legend()
    figure.savefig(RESULTS / "engine_step.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few requests and repeats; writes nothing")
    parser.add_argument("--threads", type=int, default=1, help="of torch, for everyone (default: 1)")
    parser.add_argument("--section", action="append", help="shapes_vl or half_billion; may be repeated")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    counts, few = ((1, 4), 4) if options.quick else (COUNTS, None)
    sections = {
        "shapes_vl": Section(
            f"The embedded checkpoint, 6 layers (aim: at most {AIM}), and with the modules of transformers",
            lambda: shapes_vl_rows(counts, few or 100),
        ),
        "half_billion": Section(
            f"24 layers of 896 channels, 0.36 billion parameters, drawn (aim: at most {AIM})",
            lambda: half_billion_rows(counts, few or 24),
        ),
    }
    run_sections(
        "engine_step",
        "A decode step over its matrix products and attention",
        sections,
        options.section or list(sections),
        lambda: setting(("torch", "transformers", "numpy"), weights="float32"),
        save=not options.quick,
    )
    if not options.quick:
        plot(list(sections))


if __name__ == "__main__":
    main()
