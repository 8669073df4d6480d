"""The engine against transformers' `generate`: the same checkpoint, the same cores, the same requests.

    python -m benchmarks.engine.engine [--quick] [--threads N] [--section throughput|step|memory]

throughput: requests that come all at once, each about one image, with answers of different lengths:
`generate` one after another, `generate` on a padded batch, and the engine. All encode images themselves;
output tokens per second count what was asked for, TTFT is the mean over requests, counted from the start.
step: a decode step of the engine, all of it, against the bare forward of the model with transformers' cache.
memory: bytes of keys and values per token, and how much of the blocks is used.
Repeats are interleaved; figures are medians, ratios are medians of the ratios within a repeat. Results go to
benchmarks/results/engine.{json,md}.
"""

from __future__ import annotations

import argparse
import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    DynamicCache,
    StoppingCriteria,
    StoppingCriteriaList,
)

from benchmarks.reporting import Row, Section, median_ratio, run_sections, setting
from epd.encoders import load_adapter
from epd.encoders.adapter import Adapter, PatchRun
from epd.encoders.groups import prompt_identity
from epd.engine_config import EngineConfig
from epd.models import embedded_model_path
from epd.profiles.measuring import timed
from epd.sampling_params import SamplingParams
from epd.shapes import SceneRenderer, make_questions, make_scene
from epd.stages.engine.engine import LanguageEngine
from epd.stages.engine.generation import GenerateRequest, GenerationSettings
from epd.stages.engine.setup import build_engine
from epd.stages.loading.weights import load_role
from epd.stages.placement import CPU_FLOAT32
from epd.stages.visual_inputs import PlacedEmbeddings

COUNTS = (1, 8, 32)
MAX_TOKENS = (16, 128)  # of an answer, drawn evenly between
MAX_IMAGES = 16  # that are encoded together
STEP_CONTEXTS = (100, 1000)
PATH = embedded_model_path()


@dataclass(frozen=True, slots=True)
class Request:
    """One image, uint8 [H, W, 3], one question, and how many tokens the answer is to have."""

    image: np.ndarray[Any, Any]
    question: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """seconds: until the last answer ended. ttft_s: mean over requests."""

    seconds: float
    ttft_s: float
    tokens: list[tuple[int, ...]]


def requests(count: int, seed: int) -> list[Request]:
    rng = np.random.default_rng(seed)
    made = []
    for index in range(count):
        scene = make_scene(seed * 1000 + index, 10.0)
        image = SceneRenderer(scene, 224, 224).frame(float(rng.uniform(1, 9)))
        length = int(rng.integers(*MAX_TOKENS, endpoint=True))
        made.append(Request(image, make_questions(scene, random.Random(index))[0].text, length))
    return made


class Ours:
    """The engine, with the model's own vision tower in the same process."""

    def __init__(self, path: Path = PATH) -> None:
        self.adapter: Adapter = load_adapter(path)
        model: Any = load_role(path, "whole", CPU_FLOAT32).model
        self.tower = self.adapter.vision_tower(model)
        self.engine: LanguageEngine = build_engine(
            model, self.adapter, GenerationSettings(frozenset()), options=EngineConfig(num_kv_tokens=2**16)
        )

    @torch.inference_mode()
    def answer(self, asked: Sequence[Request]) -> Outcome:
        start = time.perf_counter()
        self.add(asked)
        tokens: dict[str, list[int]] = {f"r{index}": [] for index in range(len(asked))}
        first: dict[str, float] = {}
        while self.engine.has_work():
            for output in self.engine.step().outputs:
                first.setdefault(output.request_id, time.perf_counter() - start)
                tokens[output.request_id].append(output.token.token_id)
        seconds = time.perf_counter() - start
        return Outcome(seconds, statistics.mean(first.values()), [tuple(each) for each in tokens.values()])

    @torch.inference_mode()
    def add(self, asked: Sequence[Request]) -> None:
        """Queues requests; images of one size are encoded together, as the encode stage does."""
        runs, items = [], []
        for index, request in enumerate(asked):
            pixels = torch.from_numpy(request.image)
            plan = self.adapter.plan_image(*pixels.shape[:2])
            prompt = self.adapter.plan_prompt([plan], request.question)
            sampling = SamplingParams(max_tokens=request.num_tokens)
            identity = prompt_identity(prompt, [f"r{index}"])
            self.engine.add(GenerateRequest(f"r{index}", prompt, identity, sampling))
            patches = self.adapter.preprocess(self.adapter.resize(pixels, plan), plan)
            runs.append(PatchRun("image", patches, plan.grid))
            items.append(prompt.media[0])
        for start in range(0, len(runs), MAX_IMAGES):
            encoded = self.adapter.encode_batch(self.tower, runs[start : start + MAX_IMAGES])
            for index, rows in enumerate(encoded, start):
                placed = PlacedEmbeddings(rows, items[index].token_indices(0, 1))
                self.engine.add_embeddings(f"r{index}", placed)


class FirstToken(StoppingCriteria):
    """Notes when `generate` has its first token."""

    def __init__(self) -> None:
        self.at: float | None = None

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:  # noqa: ARG002 # as it is called
        self.at = self.at or time.perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Theirs:
    """transformers as its users run it: processor and `generate`."""

    def __init__(self) -> None:
        self.model: Any = AutoModelForImageTextToText.from_pretrained(
            PATH, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        )
        self.processor: Any = AutoProcessor.from_pretrained(PATH, local_files_only=True)
        self.processor.tokenizer.padding_side = "left"

    @torch.inference_mode()
    def sequential(self, asked: Sequence[Request]) -> Outcome:
        start = time.perf_counter()
        tokens, first = [], []
        for request in asked:
            (ids,), at = self._generate([request], request.num_tokens)
            tokens.append(ids)
            first.append(at - start)
        return Outcome(time.perf_counter() - start, statistics.mean(first), tokens)

    @torch.inference_mode()
    def padded(self, asked: Sequence[Request]) -> Outcome:
        """One batch: all go on until the longest is done."""
        start = time.perf_counter()
        ids, at = self._generate(asked, max(request.num_tokens for request in asked))
        seconds = time.perf_counter() - start
        cut = [each[: request.num_tokens] for each, request in zip(ids, asked, strict=True)]
        return Outcome(seconds, at - start, cut)

    def _generate(self, asked: Sequence[Request], num_tokens: int) -> tuple[list[tuple[int, ...]], float]:
        inputs = self.processor(
            text=[self._text(request.question) for request in asked],
            images=[request.image for request in asked],
            padding=True,
            return_tensors="pt",
        )
        first = FirstToken()
        sequences = self.model.generate(
            **inputs,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=[],
            stopping_criteria=StoppingCriteriaList([first]),
        )
        new = sequences[:, inputs["input_ids"].shape[1] :].tolist()
        return [tuple(each) for each in new], first.at or time.perf_counter()

    def _text(self, question: str) -> str:
        content = [{"type": "image"}, {"type": "text", "text": question}]
        render = self.processor.apply_chat_template
        text: str = render([{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True)
        return text


def throughput_rows(counts: Sequence[int], repeats: int) -> list[Row]:
    ours, theirs = Ours(), Theirs()
    who: dict[str, Callable[[Sequence[Request]], Outcome]] = {
        "engine": ours.answer,
        "generate, one by one": theirs.sequential,
        "generate, padded batch": theirs.padded,
    }
    for answer in who.values():
        answer(requests(2, seed=99))
    rows = []
    for count in counts:
        outcomes: dict[str, list[Outcome]] = {name: [] for name in who}
        for repeat in range(repeats):
            asked = requests(count, seed=repeat)
            for name in sorted(who, reverse=bool(repeat % 2)):
                outcomes[name].append(who[name](asked))
        num_tokens = [sum(each.num_tokens for each in requests(count, i)) for i in range(repeats)]
        rows += _throughput(count, outcomes, num_tokens)
        print(*rows[-3:], sep="\n", file=sys.stderr)
    return rows


def _throughput(count: int, outcomes: dict[str, list[Outcome]], num_tokens: Sequence[int]) -> list[Row]:
    ours = outcomes["engine"]
    rows = []
    for name, each in outcomes.items():
        rates = [n / outcome.seconds for n, outcome in zip(num_tokens, each, strict=True)]
        pairs = [p for a, b in zip(ours, each, strict=True) for p in zip(a.tokens, b.tokens, strict=True)]
        rows.append(
            {
                "requests": count,
                "who": name,
                "tokens_per_s": round(statistics.median(rates), 1),
                "ttft_s": round(statistics.median(outcome.ttft_s for outcome in each), 4),
                "engine_is_times_as_fast": round(
                    median_ratio([o.seconds for o in each], [o.seconds for o in ours]), 2
                ),
                "answers_equal_the_engines": round(sum(a == b for a, b in pairs) / len(pairs), 3),
                "repeats": len(each),
            }
        )
    return rows


def step_rows(counts: Sequence[int], repeats: int) -> list[Row]:
    """Seconds of a decode step, ours and the model's alone."""
    ours, theirs = Ours(), Theirs()
    rows = []
    for context in STEP_CONTEXTS:
        for count in counts:
            row = _step(ours.engine, ours.adapter, theirs.model, count, context, repeats)
            rows.append(row)
            print(row, file=sys.stderr)
    return rows


def _step(
    engine: LanguageEngine, adapter: Adapter, model: Any, count: int, context: int, repeats: int
) -> Row:
    words = "x" * context  # the tokenizer has a token for every byte
    prompt = adapter.plan_prompt([], words)
    names = [f"s{index}" for index in range(count)]
    for name in names:
        identity = prompt_identity(prompt, [])
        engine.add(GenerateRequest(name, prompt, identity, SamplingParams(max_tokens=3 * repeats + 64)))
    while engine.counts.num_steps == 0 or any(not r.is_decoding for r in engine.scheduler.running):
        engine.step()
    bare = BareForward(model, count, len(prompt))
    seconds: list[tuple[float, float]] = []
    for repeat in range(repeats):
        work = (engine.step, bare.step) if repeat % 2 else (bare.step, engine.step)
        spent = {each: timed(each) for each in work}
        seconds.append((spent[engine.step], spent[bare.step]))
    for name in names:
        engine.abort(name)
    ours, theirs = [a for a, _ in seconds], [b for _, b in seconds]
    return {
        "requests": count,
        "context": len(prompt),
        "engine_ms": round(1e3 * statistics.median(ours), 3),
        "bare_forward_ms": round(1e3 * statistics.median(theirs), 3),
        "ratio": round(median_ratio(ours, theirs), 3),
        "repeats": repeats,
    }


class BareForward:
    """The decoder and its head alone, on a padded batch that needs no padding, with transformers' cache."""

    def __init__(self, model: Any, count: int, context: int) -> None:
        self._decoder, self._head = model.get_decoder(), model.get_output_embeddings()
        self._embeds = model.get_input_embeddings()(torch.zeros(count, context, dtype=torch.long)).detach()
        self._cache: Any = DynamicCache()
        self._position = 0
        self._forward(self._embeds)

    def step(self) -> None:
        self._forward(self._embeds[:, :1])

    @torch.inference_mode()
    def _forward(self, embeds: Tensor) -> None:
        count, length, _ = embeds.shape
        positions = torch.arange(self._position, self._position + length).expand(3, count, length)
        hidden = self._decoder(
            inputs_embeds=embeds, position_ids=positions, past_key_values=self._cache, use_cache=True
        ).last_hidden_state
        self._head(hidden[:, -1]).argmax(-1)
        self._position += length


def memory_rows(counts: Sequence[int]) -> list[Row]:
    """Bytes of keys and values per token, counted in the pools while requests run."""
    rows = []
    for count in counts:
        ours = Ours()
        engine, pools = ours.engine, ours.engine.pools
        ours.add(requests(count, seed=0))
        for _ in range(8):
            engine.step()
        tokens = sum(engine.kv.num_tokens(each.request_id) for each in engine.scheduler.running)
        blocks = round(engine.kv.usage * pools.groups[0].num_blocks)
        stored = sum(pool.storage[0].nbytes for pool in pools.groups) * blocks
        theory = pools.bytes_per_token
        rows.append(
            {
                "requests": count,
                "tokens": tokens,
                "theoretical_bytes_per_token": theory,
                "bytes_per_token_in_blocks_held": round(stored / tokens, 1),
                "ratio": round(stored / tokens / theory, 3),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few requests and repeats; writes nothing")
    parser.add_argument("--threads", type=int, default=1, help="of torch, for everyone (default: 1)")
    parser.add_argument("--section", action="append", help="throughput, step or memory; may be repeated")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    counts = (1, 4) if options.quick else COUNTS
    sections = {
        "throughput": Section(
            "Output tokens per second and TTFT (aim: 6 times `generate` at 32 requests, not slower at 1)",
            lambda: throughput_rows(counts, 1 if options.quick else 5),
        ),
        "step": Section(
            "A decode step against the bare model forward (aim: at most 1.15)",
            lambda: step_rows(counts, 20 if options.quick else 200),
        ),
        "memory": Section("Keys and values: bytes per token", lambda: memory_rows(counts)),
    }
    run_sections(
        "engine",
        "The language-model engine",
        sections,
        options.section or list(sections),
        lambda: setting(("torch", "transformers", "numpy"), checkpoint="shapes-vl, float32"),
        save=not options.quick,
    )


if __name__ == "__main__":
    main()
