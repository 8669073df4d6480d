"""Checks on the device: kernels against plain arithmetic, tokens against transformers' `generate`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor

from benchmarks.gpu import delta
from benchmarks.gpu.mixtures import products_of_experts
from benchmarks.gpu.sections import OK
from benchmarks.gpu.setup import Setup
from benchmarks.gpu.workers import SplitPipeline
from benchmarks.reporting import Row
from epd.encoders import FrameSampling, load_adapter
from epd.encoders.patches import PatchSpec, patchify, patchify_plain
from epd.engine_config import EngineConfig
from epd.models import embedded_model_path
from epd.serve_app.worker.worker_settings import WorkerSettings
from epd.shapes import SceneRenderer, make_scene
from epd.stages.attention.attention import AttentionBatch, AttentionPlan, attend, write_kv
from epd.stages.attention.device import DeviceHeads
from epd.stages.engine.kv_pool import KVGroupShape, KVLayout, KVPoolsShape
from epd.stages.engine.slot_copies import token_slots
from epd.stages.kernels.quantized_plain import Fp8Matrix, Int4Matrix, multiply_plain
from epd.stages.kernels.scaled_values import scaled, unscaled
from epd.stages.loading.quantized_linear import Fp8Kind, Fp8Product, QuantizedProduct, fp8_kinds
from epd.types import ceil_div
from tests.encoders import tiny_generic
from tests.encoders.families import Clip, Family, Media, Picture
from tests.encoders.tiny_gemma import GEMMA4_EXPERTS
from tests.models import shrunk
from tests.models.published import PUBLISHED
from tests.stages.decoder.quantized_matrices import fp8_matrix, in_float64, int4_matrix, moved

_BLOCK_SIZE = 16
# Query heads, KV heads, head size: Qwen2.5-VL-7B, Qwen3-VL-8B, SmolVLM2-2.2B.
_HEADS = ((28, 4, 128), (32, 8, 128), (32, 32, 64))
# (new tokens, context): of decodes, short chunks and long ones, in one pass.
_SEGMENTS = ((1, 1), (1, 300), (1, 1700), (5, 40), (70, 70), (33, 500))
# The same of a video of ten minutes, and the elements that its blocks lie behind: more than 32 bits count.
_LONG_SEGMENTS, _FAR_ELEMENTS = ((1, 43_200), (64, 43_200)), 2**31
# Of the largest result: sums of rounded products in any order.
_ALLOWED = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
# Tokens that are compared in a type other than float32.
_NUM_IN_TYPE = 16
# Of three of four layers states; windows, with experts beside the MLP; experts, with heads rotated in part.
_FAMILIES = {
    "qwen3_5_moe": tiny_generic.build_qwen3_5_moe,
    "gemma4": partial(tiny_generic.build_gemma4, seed=1, **GEMMA4_EXPERTS),
    "glm4v_moe": tiny_generic.build_glm4v_moe,
}
_QUESTIONS = ("What colour is the shape?", "How many shapes are there?", "Is there a red circle?")
_PATCHES = PatchSpec(14, 2, 2, (122.77, 116.75, 104.09), (68.5, 66.63, 70.32), 3)


def kernels(setup: Setup) -> Iterator[Row]:
    """Attention, caches, states, patches, quantised matrices and experts, on the device against the CPU."""
    yield _patches(setup)
    yield from delta.rule(setup)
    for dtype in dict.fromkeys((torch.float32, setup.placement.dtype)):
        for heads in _HEADS:
            yield _attention(setup, dtype, *heads)
        yield _attention(setup, dtype, *_HEADS[0], int8_values=True)
        for num_rows, (name, matrix) in itertools.product((1, 300), _matrices().items()):
            yield _product(setup, dtype, num_rows, name, matrix)
        for num_rows, kind in itertools.product((1, 300), fp8_kinds(setup.placement.device)):
            yield _fp8_product(setup, dtype, num_rows, kind)
        for name, ours, theirs in products_of_experts(setup, dtype):
            yield _compared(name, dtype, ours, theirs)


def _patches(setup: Setup) -> Row:
    frames = torch.randint(0, 256, (6, 84, 112, 3), dtype=torch.uint8)
    ours = patchify(frames.to(setup.placement.device), _PATCHES).cpu()
    return {"kernel": "patches", OK: torch.equal(ours, patchify_plain(frames, _PATCHES))}


def long_values(setup: Setup) -> Iterator[Row]:
    """Attention in the device's own type over the keys of a long video, in blocks far into the pool."""
    segments = _LONG_SEGMENTS if setup.sizes.is_full else ((1, 300), (5, 300))
    for num_heads, num_kv_heads, head_dim in _HEADS[:2]:
        elements = 2 * _BLOCK_SIZE * num_kv_heads * head_dim  # of a block
        first_block = _FAR_ELEMENTS // elements + 1 if setup.sizes.is_full else 0
        heads = (num_heads, num_kv_heads, head_dim)
        row = _attention(setup, setup.placement.dtype, *heads, segments=segments, first_block=first_block)
        yield {**row, "context": segments[-1][1], "first block": first_block}


def _attention(
    setup: Setup,
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    segments: Sequence[tuple[int, int]] = _SEGMENTS,
    first_block: int = 0,
    int8_values: bool = False,
) -> Row:
    device = setup.placement.device
    generator = torch.Generator().manual_seed(head_dim + num_heads)

    def noise(tokens: int, heads: int) -> Tensor:
        return torch.randn(tokens, heads, head_dim, generator=generator).to(dtype)

    contexts = [context for _, context in segments]
    tables = _tables(contexts, first_block)
    num_blocks = first_block + sum(map(len, tables))
    layout = KVLayout(1, num_kv_heads, head_dim, dtype, int8_values)
    shape = KVPoolsShape((KVGroupShape(num_blocks, layout),), _BLOCK_SIZE)
    key_cache, value_cache = shape.build(device=device).layer(0)
    keys = [noise(context, num_kv_heads) for context in contexts]
    values = [noise(context, num_kv_heads) for context in contexts]
    queries = [noise(new, num_heads) for new, _ in segments]
    slots = torch.cat(
        [token_slots(table, 0, context, _BLOCK_SIZE) for table, context in zip(tables, contexts, strict=True)]
    )
    write_kv(
        torch.cat(keys).to(device), torch.cat(values).to(device), key_cache, value_cache, slots.to(device)
    )
    plan = AttentionPlan.build(_batch(tables, segments), device, DeviceHeads.of(key_cache, num_heads))
    ours = attend(torch.cat(queries).to(device), key_cache, value_cache, plan, head_dim**-0.5)
    if int8_values:
        values = [unscaled(scaled(each), dtype) for each in values]
    theirs = torch.cat([_plainly(*each) for each in zip(queries, keys, values, strict=True)])
    kernel = f"attention {num_heads}/{num_kv_heads} heads of {head_dim}" + ", int8 values" * int8_values
    return _compared(kernel, dtype, ours, theirs)


def _matrices() -> dict[str, Fp8Matrix | Int4Matrix]:
    torch.manual_seed(0)
    return {
        "FP8 of blocks": fp8_matrix(320, 448, (128, 128)),
        "FP8 of rows": fp8_matrix(320, 448, None),
        "4 bits": int4_matrix(320, 512, 128),
    }


def _product(
    setup: Setup, dtype: torch.dtype, num_rows: int, name: str, matrix: Fp8Matrix | Int4Matrix
) -> Row:
    device = setup.placement.device
    rows, bias = torch.randn(num_rows, matrix.num_columns).to(dtype), torch.randn(matrix.num_rows).to(dtype)
    ours = QuantizedProduct(moved(matrix, device), bias.to(device))(rows.to(device))
    theirs = multiply_plain(rows.double(), matrix, bias.double())
    return _compared(f"{num_rows} rows times {name}", dtype, ours, theirs)


def _fp8_product(setup: Setup, dtype: torch.dtype, num_rows: int, kind: Fp8Kind) -> Row:
    """FP8 times FP8, against rows that are rounded apart and a product in float64."""
    device, matrix = setup.placement.device, fp8_matrix(384, 512, (128, 128) if kind == "blocks" else None)
    rows, bias = torch.randn(num_rows, 512).to(dtype), torch.randn(384).to(dtype)
    ours = Fp8Product.of(moved(matrix, device), kind, bias.to(device))(rows.to(device))
    theirs = in_float64(rows, matrix, bias, matrix.columns_of_scale)
    return _compared(f"{num_rows} rows in FP8, scaled by {kind}", dtype, ours, theirs)


def _compared(kernel: str, dtype: torch.dtype, ours: Tensor, theirs: Tensor) -> Row:
    difference = float((ours.cpu().double() - theirs).abs().max() / theirs.abs().max())
    return {
        "kernel": kernel,
        "dtype": str(dtype).removeprefix("torch."),
        "difference": f"{difference:.1e}",
        "allowed": _ALLOWED[dtype],
        OK: difference <= _ALLOWED[dtype],
    }


def _tables(contexts: Sequence[int], first_block: int) -> list[list[int]]:
    """A block table for each context, of blocks in no order."""
    counts = [ceil_div(context, _BLOCK_SIZE) for context in contexts]
    blocks = (first_block + np.random.default_rng(0).permutation(sum(counts))).tolist()
    return [[blocks.pop() for _ in range(count)] for count in counts]


def _batch(tables: Sequence[Sequence[int]], segments: Sequence[tuple[int, int]]) -> AttentionBatch:
    padded = np.zeros((len(tables), max(map(len, tables))), np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    slots = [
        token_slots(table, context - new, context, _BLOCK_SIZE).numpy()
        for table, (new, context) in zip(tables, segments, strict=True)
    ]
    starts = np.cumsum([0, *(new for new, _ in segments)]).astype(np.int32)
    contexts = np.array([context for _, context in segments], np.int32)
    return AttentionBatch(starts, contexts, padded, np.concatenate(slots), _BLOCK_SIZE)


def _plainly(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention in float64: queries [n, Hq, D] are the last of keys and values [context, Hkv, D]."""
    group = queries.shape[1] // keys.shape[1]
    wide = [each.double().repeat_interleave(group, dim=1) for each in (keys, values)]
    scores = torch.einsum("qhd,khd->hqk", queries.double(), wide[0]) * queries.shape[-1] ** -0.5
    first = len(keys) - len(queries)
    is_later = torch.arange(len(keys))[None] > first + torch.arange(len(queries))[:, None]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(is_later, -torch.inf).softmax(-1), wide[1])


def tokens(setup: Setup) -> Iterator[Row]:
    """In float32: E, P and D on the device against `generate` on the CPU, for a checkpoint of each family."""
    torch.backends.cudnn.allow_tf32 = False
    for name in setup.sizes.checked:
        path = shrunk_checkpoint(name, setup.folder)
        yield from _tokens_of(setup, name, PUBLISHED[name].config["model_type"], path)
    for name in setup.sizes.checked_families:
        path = _with_positions(_FAMILIES[name](setup.folder / name))
        yield from _tokens_of(setup, f"tiny {name}", name, path)


def _tokens_of(setup: Setup, name: str, model_type: str, path: Path) -> Iterator[Row]:
    family = Family.load(model_type, path)
    compared = _Compared(name, family, _settings(setup, path, "float32"), setup.sizes.num_tokens)
    yield from compared.rows(_cases(family))


def tokens_in_type(setup: Setup) -> Iterator[Row]:
    """In the device's own type: the embedded checkpoint against `generate` on the same device."""
    path, dtype = embedded_model_path(), setup.placement.dtype
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=dtype, local_files_only=True)
    processor = AutoProcessor.from_pretrained(path, local_files_only=True)
    model = model.to(setup.placement.device).eval()
    family = Family("qwen2_5_vl", path, load_adapter(path), model, processor)
    settings = _settings(setup, path, str(dtype).removeprefix("torch."))
    yield from _Compared("shapes-vl", family, settings, _NUM_IN_TYPE).rows(_scenes(family))


def shrunk_checkpoint(name: str, folder: Path) -> Path:
    """A shrunk checkpoint with the positions of the installed transformers, which the reference has."""
    return _with_positions(shrunk.build(name, folder / name))


def _with_positions(path: Path) -> Path:
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    (path / "config.json").write_text(
        json.dumps(config | {"position_layout": "transformers"}), encoding="utf-8"
    )
    return path


def _settings(setup: Setup, path: Path, dtype: str) -> WorkerSettings:
    device = str(setup.placement.device)
    engine = EngineConfig(device=device, dtype=dtype, num_kv_tokens=16_384)
    return WorkerSettings(path, engine, num_embeddings=16_384)


@dataclass(frozen=True, slots=True)
class _Case:
    name: str
    media: list[Media]
    question: str

    @property
    def sampling(self) -> FrameSampling:
        """All frames of a video."""
        clips = [item for item in self.media if isinstance(item, Clip)]
        return FrameSampling(num_frames=len(clips[0].frames)) if clips else FrameSampling()


def _cases(family: Family) -> Iterator[_Case]:
    """Text, an image and a video of noise. Its frames come at whole seconds: some releases cut others."""
    generator = torch.Generator().manual_seed(1)

    def noise(*shape: int) -> Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

    rough = Clip(torch.zeros(8, 96, 64, 3, dtype=torch.uint8), 2.0)
    height, width = family.plan(rough, FrameSampling(num_frames=8)).size
    yield _Case("text", [], "What is shown? Ä, 漢")
    yield _Case("image", [Picture(noise(150, 170, 3))], "What is shown?")
    yield _Case("video", [Clip(noise(8, height, width, 3), 2.0)], "What is shown?")


def _scenes(family: Family) -> Iterator[_Case]:
    """Drawn pictures, which the embedded checkpoint has learnt to read."""
    for seed, question in enumerate(_QUESTIONS):
        rough = Clip(torch.zeros(16, 112, 140, 3, dtype=torch.uint8), 2.0)
        renderer = SceneRenderer(
            make_scene(seed, 8.0), *family.plan(rough, FrameSampling(num_frames=16)).size
        )
        frames = torch.from_numpy(np.stack([renderer.frame(index / 2) for index in range(16)]))
        yield _Case(f"video {seed}", [Clip(frames, 2.0)], question)
        yield _Case(f"image {seed}", [Picture(frames[4])], question)


@dataclass(frozen=True, slots=True)
class _Compared:
    """A checkpoint as transformers has it, and as E, P and D have it by these settings.

    num_tokens: of each answer, also behind its end.
    """

    name: str
    family: Family
    settings: WorkerSettings
    num_tokens: int

    def rows(self, cases: Iterator[_Case]) -> Iterator[Row]:
        bias = tuple((token_id, -100.0) for token_id in self._media_ids)
        with SplitPipeline(self.settings, group_tokens=64) as ours:
            for case in cases:
                expected = self._generated(case)
                plans = [self.family.plan(item, case.sampling) for item in case.media]
                frames = [
                    self.family.frames(item, plan) for item, plan in zip(case.media, plans, strict=True)
                ]
                answer = ours.ask(case.name, plans, frames, case.question, len(expected), bias).in_order()
                yield {
                    "checkpoint": self.name,
                    "dtype": self.settings.engine.dtype,
                    "case": case.name,
                    "equal tokens": f"{_num_equal(answer, expected)} of {len(expected)}",
                    OK: answer == expected,
                }

    @property
    def _media_ids(self) -> list[int]:
        """The tokens that stand for media: transformers looks for these behind an answer that has them."""
        config = self.family.model.config
        ids = {getattr(config, f"{kind}_token_id", None) for kind in ("image", "video")}
        return sorted(token_id for token_id in ids if token_id is not None)

    @torch.inference_mode()
    def _generated(self, case: _Case) -> list[int]:
        model = self.family.model
        inputs: Any = self.family.their_inputs(case.media, case.sampling, case.question).to(model.device)
        inputs = {name: _in_type(value, model.dtype) for name, value in inputs.items()}
        exactly = {"max_new_tokens": self.num_tokens, "min_new_tokens": self.num_tokens, "eos_token_id": []}
        out = model.generate(**inputs, **exactly, do_sample=False, suppress_tokens=self._media_ids)
        found: list[int] = out[0, inputs["input_ids"].shape[1] :].tolist()
        return found


def _in_type(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _num_equal(ours: Sequence[int], theirs: Sequence[int]) -> int:
    differing = (index for index, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    return next(differing, len(theirs))
