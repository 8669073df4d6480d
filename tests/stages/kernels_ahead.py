"""Compiles the project's Triton kernels for GPUs that are not here, as the program itself would launch them.

    python -m tests.stages.kernels_ahead        every variant: a table of registers, spills and shared memory
    python -m tests.stages.kernels_ahead JSON   those of some shapes, as `test_kernels_ahead.py` has them

The launching functions run on fake CUDA tensors; what they would launch is recorded, with the types,
alignments and constants of the arguments, and compiled ahead of time. ptxas and cuobjdump come with Triton.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from epd.encoders.device import constants
from epd.encoders.kernels.layer_fusions import (
    add_rms_norm_fused,
    patchify_fused,
    rotate_pairs_fused,
    silu_mul_fused,
)
from epd.machine import usable_cpus
from epd.stages.attention.attention import AttentionBatch, warm_up
from epd.stages.attention.device import DeviceHeads, DevicePlan
from epd.stages.decoder.delta_layer import DeltaSizes, GatedDelta
from epd.stages.decoder.delta_rule import DeltaPlan
from epd.stages.decoder.operations import RmsNorm
from epd.stages.engine.kv_pool import KVLayout, KVPool
from epd.stages.kernels.grouped_products import experts_fused
from epd.stages.kernels.kv_slots import copy_blocks_fused, norm_rotate_write_fused, write_slots
from epd.stages.kernels.quantized_plain import Fp8Matrices, Fp8Matrix, Int4Matrix
from epd.stages.kernels.quantized_products import fp8_product, fp8_rows, int4_product

# Shared memory that one block of threads may have (CUDA C++ Programming Guide, compute capabilities).
SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024}
# Those whose every kernel is compiled; of others, attention, for which tiles are chosen by chip.
ARCHS = (80, 90)
FP8_SINCE = 89
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Query heads to a KV head of Qwen2.5-VL 7B and 3B, of Llama 8B, and one to one.
GROUPS = (7, 8, 4, 1)
HEAD_DIMS = (64, 80, 128)
WIDE_DIM = 256  # of one group, since the table of tiles has an entry for it
BLOCK_SIZES = (1, 4, 16, 32, 64, 128, 256)
PATCHES = [((8, 448, 448, 3), 2, 14, 2), ((8, 448, 448, 3), 2, 16, 2), ((3, 384, 384, 3), 1, 384, 1)]
# Experts, channels, channels within an expert, and experts of a row: Qwen3.6-35B-A3B, Qwen3-VL-30B-A3B.
EXPERTS = ((256, 2048, 512, 8), (128, 2048, 768, 8))
# Of experts: those that are not in FP8, blocks whose values share a scale, and rows that do.
FP8_EXPERTS = (None, (128, 128), (1, None))
# Heads of keys and of values, channels of each: Qwen3.5-35B-A3B, and one of four ranks of a 27B.
DELTA_HEADS = ((16, 32, 128, 128), (4, 12, 128, 128))
_OPTIONS = frozenset({"num_warps", "num_stages"})
_NAMES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32",
    torch.int64: "*i64", torch.uint8: "*u8", torch.int8: "*i8", torch.float8_e4m3fn: "*fp8e4nv",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Launch:
    """Holds what Triton would compile a kernel for. options: of the compiler."""

    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    attributes: Mapping[tuple[int], Any]
    options: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    @property
    def variant(self) -> tuple[str, ...]:
        """Equal for launches that Triton compiles once."""
        return (self.name, *map(str, (self.signature, self.constants, self.attributes, self.options)))


@dataclass(frozen=True, slots=True)
class Report:
    """Says what the compiled kernel needs. shared_bytes: of a block of threads."""

    registers: int
    stack_bytes: int
    spilled_bytes: int
    shared_bytes: int

    def fits(self, arch: int) -> bool:
        """Nothing spills, which ptxas puts on the stack, and shared memory is within the chip's."""
        return self.stack_bytes == self.spilled_bytes == 0 and self.shared_bytes <= SHARED_BYTES[arch]


@dataclass(slots=True)
class Recorder:
    """Records launches instead of running them."""

    launches: list[Launch] = field(default_factory=list)

    def run(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **arguments: Any) -> None:
        assert not warmup
        assert all(isinstance(size, int) and size > 0 for size in grid), f"the grid is {grid}"
        options = {name: arguments.pop(name) for name in _OPTIONS & arguments.keys()}
        named = dict(zip(kernel.arg_names, args, strict=False)) | arguments
        assert list(named) == list(kernel.arg_names)
        signature, constants, attributes = {}, {}, {}
        for place, parameter in enumerate(kernel.params):
            value = named[parameter.name]
            kind = "constexpr" if parameter.is_constexpr else _kind(value, parameter.do_not_specialize)
            signature[parameter.name] = kind
            if kind == "constexpr":
                constants[parameter.name] = value
            elif _is_aligned(value) and not parameter.do_not_specialize:
                attributes[(place,)] = [["tt.divisibility", 16]]
        self.launches.append(Launch(kernel, signature, constants, attributes, options))


def _is_aligned(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0)


def _kind(value: Any, is_plain: bool) -> str:
    if isinstance(value, Tensor):
        assert value.is_cuda, "a kernel takes tensors of the device"
        return _NAMES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "constexpr" if value == 1 and not is_plain else "i32" if value < 2**31 else "i64"


@contextmanager
def fake_tensors() -> Iterator[None]:
    """A mode in which "cuda" needs no GPU, nor pinned memory, and of which nothing is kept."""
    try:
        with (
            FakeTensorMode(allow_non_fake_inputs=False),
            patch.object(Tensor, "pin_memory", lambda tensor: tensor),
        ):
            yield
    finally:
        constants.cache_clear()


def recorded(launching: Any) -> list[Launch]:
    """The launches of a function that is called with the fake mode active."""
    recorder = Recorder()
    with (
        fake_tensors(),
        patch.object(JITFunction, "run", lambda self, *args, **named: recorder.run(self, *args, **named)),
    ):
        launching()
    return recorder.launches


def attention_launches(
    heads: tuple[int, int, int],
    block_size: int,
    dtype: torch.dtype,
    arch: int,
    *,
    int8_values: bool = False,
) -> list[Launch]:
    """The launches of a pass: a decode with a long context, drafts and a chunk, and the write before."""

    def launch() -> None:
        query_heads, kv_heads, dim = heads
        lens, contexts = np.array([1, 4, 300]), np.array([40_000, 900, 9000], np.int32)
        starts = np.cumsum([0, *lens]).astype(np.int32)
        tables = np.zeros((3, -(-40_000 // block_size)), np.int32)
        batch = AttentionBatch(starts, contexts, tables, np.zeros(starts[-1], np.int64), block_size)
        unit = DeviceHeads(query_heads // kv_heads, kv_heads, dim, dtype, num_processors=132, chip=arch)
        plan = DevicePlan.build(batch, torch.device("cuda"), unit)
        num_rows = int(starts[-1])
        layout = KVLayout(28, kv_heads, dim, dtype, int8_values)
        caches = KVPool(8, block_size, layout, device="cuda").layer(3)
        query, keys, values = (
            torch.empty(count, num_rows, dim, dtype=dtype, device="cuda").transpose(0, 1)
            for count in (query_heads, kv_heads, kv_heads)
        )
        write_slots(keys, values, *caches, plan.slot_mapping)
        plan.attend_by_kernels(query, *caches, dim**-0.5)
        marked = replace(batch, both_ways=np.arange(starts[-1]) % 3 == 0)
        for other in (replace(batch, window=1024), marked):
            DevicePlan.build(other, torch.device("cuda"), unit).attend_by_kernels(query, *caches, dim**-0.5)

    return recorded(launch)


def fusion_launches(
    heads: tuple[int, int, int], dtype: torch.dtype, *, has_norms: bool, int8_values: bool = False
) -> list[Launch]:
    """The launches of a decoder layer between its matrix products; widths are those of 7B and 8B models."""

    def launch() -> None:
        query_heads, kv_heads, dim = heads
        empty = partial(torch.empty, dtype=dtype, device="cuda")
        rows, width, gates = 9, query_heads * dim, 18_944
        weight, head_weight = empty(width), empty(dim)
        for added in (empty(rows, width), None):
            add_rms_norm_fused(empty(rows, width), added, weight, 1e-6)
        pool = KVPool(8, 16, KVLayout(28, kv_heads, dim, dtype, int8_values), device="cuda")
        norm_rotate_write_fused(
            empty(rows, (query_heads + 2 * kv_heads) * dim).view(rows, -1, dim),
            (query_heads, kv_heads),
            (head_weight, head_weight) if has_norms else None,
            1e-6,
            empty(rows, 1, 1, dim // 2),
            empty(rows, 1, 2, dim // 2),
            pool.layer(3),
            torch.empty(rows, dtype=torch.int64, device="cuda"),
        )
        silu_mul_fused(empty(rows, 2 * gates))
        turns = torch.empty(rows, dim, device="cuda")
        rotate_pairs_fused(empty(rows, 3, kv_heads, dim)[:, :2], turns, turns)
        blocks = torch.empty(4, dtype=torch.int64, device="cuda")
        for plane in pool.planes:
            copy_blocks_fused(plane, plane, blocks, blocks)

    return recorded(launch)


def quantized_launches(dtype: torch.dtype, group: int) -> list[Launch]:
    """The launches of products with quantised matrices, of decodes and of chunks; sizes of 7B and 4B models.

    group: columns that share a scale, with 4 bits. FP8 has scales of blocks or, in a 4B model, of rows.
    """

    def launch() -> None:
        empty = partial(torch.empty, device="cuda")
        for num_out, num_in, block in ((4608, 3584, (128, 128)), (2560, 4096, (1, 4096))):
            values = empty(num_out, num_in, dtype=torch.float8_e4m3fn)
            scales = empty(num_out // block[0], num_in // block[1], dtype=torch.bfloat16)
            of_eight_bits = Fp8Matrix(values, scales, *block)
            zeros = empty(num_out, num_in // group, dtype=torch.uint8)
            packed = empty(num_out, num_in // 2, dtype=torch.uint8)
            of_four_bits = Int4Matrix(packed, zeros, empty(*zeros.shape, dtype=torch.float16))
            for num_rows in (1, 2, 16, 17, 2048):
                rows, bias = empty(num_rows, num_in, dtype=dtype), empty(num_out, dtype=dtype)
                fp8_product(rows, of_eight_bits, None)
                int4_product(rows, of_four_bits, bias)

    return recorded(launch)


def expert_launches(
    sizes: tuple[int, int, int, int],
    dtype: torch.dtype,
    num_rows: int,
    block: tuple[int, int | None] | None = None,
) -> list[Launch]:
    """The launches of a mixture of experts. sizes: as in EXPERTS. block: as in FP8_EXPERTS."""

    def launch() -> None:
        num_experts, size, width, top_k = sizes
        empty = partial(torch.empty, device="cuda", dtype=dtype)
        matrices: Any = empty(num_experts, 2 * width, size), empty(num_experts, size, width)
        if block is not None:
            matrices = tuple(_in_fp8(each, block) for each in matrices)
        chosen = torch.empty(num_rows, top_k, dtype=torch.int64, device="cuda")
        for is_gelu in (False, True):
            experts_fused(empty(num_rows, size), matrices, chosen, empty(num_rows, top_k), is_gelu=is_gelu)

    return recorded(launch)


def _in_fp8(matrices: Tensor, block: tuple[int, int | None]) -> Fp8Matrices:
    num_experts, num_out, num_in = matrices.shape
    rows, columns = block[0], block[1] or num_in
    scales = matrices.new_empty(num_experts, num_out // rows, num_in // columns, dtype=torch.bfloat16)
    return Fp8Matrices(matrices.to(torch.float8_e4m3fn), scales, rows, columns)


def delta_launches(
    heads: tuple[int, int, int, int], dtype: torch.dtype = torch.bfloat16, *, is_warm_up: bool = False
) -> list[Launch]:
    """The launches of a gated delta layer in a pass of decodes, drafts, chunks; heads as in DELTA_HEADS."""

    def launch() -> None:
        sizes, empty = DeltaSizes(*heads), partial(torch.empty, device="cuda")
        matrices, gates = empty(5, 30, *heads[1:])[:, 3], empty(heads[1])
        tails = empty(5, 30, 3, sizes.num_channels, dtype=dtype)[:, 3]
        norm, filters = RmsNorm.of(empty(heads[3], dtype=dtype), 1e-6), empty(4, sizes.num_channels)
        layer = GatedDelta(sizes, lambda rows: rows, filters, gates, gates, norm)
        if is_warm_up:
            layer.warm_up(tails, matrices)
            return
        starts, slots = np.array([0, 1, 4, 304], np.int32), [(0, 1, 0), (2, 3, 1), (None, 4, 0)]
        plan = DeltaPlan.build(starts, slots, torch.device("cuda"))
        width = sizes.num_channels + sizes.value_channels + 2 * sizes.num_heads
        layer(empty(304, width, dtype=dtype), tails, matrices, plan)

    with ExitStack() as switches:
        for module in ("delta_layer", "delta_rule"):
            switches.enter_context(patch(f"epd.stages.decoder.{module}.uses_kernels", lambda _: True))
        return recorded(launch)


def fp8_row_launches(dtype: torch.dtype) -> list[Launch]:
    """The launches that quantise rows of a 7B model, whole and by blocks of 128 columns; not before 8.9."""

    def launch() -> None:
        for num_in, group in ((3584, 3584), (18_944, 18_944), (3584, 128)):
            for num_rows in (1, 2048):
                fp8_rows(torch.empty(num_rows, num_in, dtype=dtype, device="cuda"), group)

    return recorded(launch)


def patch_launches(
    frames: tuple[int, ...], unit: int, side: int, merge: int, dtype: torch.dtype
) -> list[Launch]:
    """The launch that makes patches of frames [N, H, W, 3]."""

    def launch() -> None:
        fake = torch.empty(frames, dtype=torch.uint8, device="cuda")
        three = (1.0, 1.0, 1.0)
        patchify_fused(fake, mean=three, std=three, frames_per_unit=unit, side=side, merge=merge, dtype=dtype)

    return recorded(launch)


def compiled(launch: Launch, arch: int) -> Report:
    source = ASTSource(launch.kernel, dict(launch.signature), dict(launch.constants), dict(launch.attributes))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of defaults that Triton is about to change
        kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=dict(launch.options))
    return _report(kernel.asm["cubin"], kernel.metadata.shared)


def _report(cubin: bytes, shared_bytes: int) -> Report:
    """Reads what ptxas wrote down about the kernel."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return Report(found["REG"], found["STACK"], found["LOCAL"], shared_bytes)


def warm_up_launches() -> list[Launch]:
    """What a worker launches before its first request, for heads as Qwen2.5-VL 7B has them."""

    def launch() -> None:
        storage = torch.empty(8, 28, 2, 16, 4, 128, dtype=torch.bfloat16, device="cuda")
        with ExitStack() as switches:
            for module in ("epd.stages.attention.attention", "epd.stages.attention.device"):
                switches.enter_context(patch(f"{module}.uses_kernels", lambda _: True))
            switches.enter_context(patch("epd.stages.attention.device._num_processors", lambda _: 132))
            switches.enter_context(patch("epd.stages.attention.device._chip", lambda _: 90))
            for window in (None, 1024):
                warm_up(storage[:, 3, 0], storage[:, 3, 1], 28, window, marks_some=window is None)

    return recorded(launch)


_Job = tuple[Launch, int]
_jobs: list[_Job] = []  # of this process and its children


def compiled_all(jobs: Sequence[_Job], num_processes: int) -> Iterator[Report]:
    """Compiles launches for GPUs, each variant once, in processes that are copies of this one."""
    keys = [(launch.variant, arch) for launch, arch in jobs]
    _jobs[:] = [jobs[keys.index(key)] for key in dict.fromkeys(keys)]
    with multiprocessing.get_context("fork").Pool(num_processes) as pool:
        reports = dict(zip(dict.fromkeys(keys), pool.imap(_compiled_job, range(len(_jobs))), strict=True))
    yield from (reports[key] for key in keys)


def _compiled_job(number: int) -> Report:
    return compiled(*_jobs[number])


def every_launch(arch: int) -> Iterator[tuple[str, Launch]]:
    """What a model may launch, without repetition: block sizes change little, so all with one group each."""
    seen: set[tuple[str, ...]] = set()
    of_fp8 = _fp8_rows() if arch >= FP8_SINCE else ()
    for what, launch in itertools.chain(_attention(arch), _others() if arch in ARCHS else (), of_fp8):
        if launch.variant not in seen:
            seen.add(launch.variant)
            yield what, launch


def _attention(arch: int) -> Iterator[tuple[str, Launch]]:
    shapes = [(group, dim, 16) for group in GROUPS for dim in HEAD_DIMS]
    shapes += [(7, 128, size) for size in BLOCK_SIZES] + [(2, WIDE_DIM, 16)]
    for (group, dim, size), dtype in itertools.product(shapes, DTYPES):
        for launch in attention_launches((4 * group, 4, dim), size, dtype, arch):
            yield f"group {group} dim {dim} block {size} {dtype}", launch
    for group, dim, dtype in itertools.product(GROUPS, HEAD_DIMS, DTYPES):
        for launch in attention_launches((4 * group, 4, dim), 16, dtype, arch, int8_values=True):
            yield f"group {group} dim {dim} {dtype} values int8", launch


def _others() -> Iterator[tuple[str, Launch]]:
    for group, dim, has_norms, dtype in itertools.product(GROUPS, HEAD_DIMS, (False, True), DTYPES):
        for launch in fusion_launches((4 * group, 4, dim), dtype, has_norms=has_norms):
            yield f"heads {4 * group} dim {dim} {dtype}", launch
    for dim, dtype in itertools.product(HEAD_DIMS, DTYPES):
        for launch in fusion_launches((28, 4, dim), dtype, has_norms=False, int8_values=True):
            yield f"heads 28 dim {dim} {dtype} values int8", launch
    for group, dtype in itertools.product((32, 64, 128), DTYPES):
        for launch in quantized_launches(dtype, group):
            yield f"quantised group {group} {dtype}", launch
    for sizes, dtype, num_rows, block in itertools.product(EXPERTS, DTYPES, (1, 32, 8192), FP8_EXPERTS):
        for launch in expert_launches(sizes, dtype, num_rows, block):
            yield f"{sizes[0]} experts {dtype} blocks {block}", launch
    for heads, dtype in itertools.product(DELTA_HEADS, DTYPES):
        for launch in delta_launches(heads, dtype):
            yield f"delta rule {heads} {dtype}", launch
    for (shape, unit, side, merge), dtype in itertools.product(PATCHES, DTYPES):
        yield f"patches {[unit, side, merge]} {dtype}", patch_launches(shape, unit, side, merge, dtype)[0]


def _fp8_rows() -> Iterator[tuple[str, Launch]]:
    for dtype in DTYPES:
        for launch in fp8_row_launches(dtype):
            yield f"rows to FP8 {dtype}", launch


def report_shapes(shapes: Sequence[Sequence[Any]], num_processes: int) -> dict[str, Any]:
    """Compiles what some shapes launch. Returns the reports of each by kernel, and the variants of a warm-up.

    shapes: GPU, type, query heads, KV heads, head size and block size of each; of 128 also with int8 values.
    """
    jobs: list[list[_Job]] = []
    for arch, dtype_name, query_heads, kv_heads, dim, block_size in shapes:
        dtype = getattr(torch, dtype_name)
        heads, launches = (query_heads, kv_heads, dim), []
        for int8_values in (False, True) if dim == 128 else (False,):
            launches += attention_launches(heads, block_size, dtype, arch, int8_values=int8_values)
            if arch in ARCHS:
                launches += fusion_launches(heads, dtype, has_norms=dim != 64, int8_values=int8_values)
        if arch >= FP8_SINCE:
            launches += fp8_row_launches(dtype)
        if arch in ARCHS:
            launches += patch_launches((8, 448, 448, 3), 2, 14, 2, dtype)
            launches += quantized_launches(dtype, 32 if dim == 80 else 128)
            for sizes, num_rows, block in itertools.product(EXPERTS, (1, 32, 8192), FP8_EXPERTS):
                launches += expert_launches(sizes, dtype, num_rows, block)
            launches += [each for of_heads in DELTA_HEADS for each in delta_launches(of_heads, dtype)]
        jobs.append([(launch, arch) for launch in launches])
    reports = compiled_all([job for of_shape in jobs for job in of_shape], num_processes)
    found = [
        [
            {"kernel": launch.name, **asdict(report), "fits": report.fits(arch)}
            for (launch, arch), report in zip(of_shape, itertools.islice(reports, len(of_shape)), strict=True)
        ]
        for of_shape in jobs
    ]
    warm = {launch.variant for launch in warm_up_launches()}
    missing = {launch.variant for launch in attention_launches((28, 4, 128), 16, torch.bfloat16, 90)} - warm
    delta, warm_delta = (
        {each.variant for each in delta_launches(DELTA_HEADS[0], is_warm_up=on)} for on in (False, True)
    )
    products = {launch.variant for launch in quantized_launches(torch.bfloat16, 128)}
    experts = [
        {each.variant for each in expert_launches(EXPERTS[0], DTYPES[0], rows)} for rows in (1, 32, 8192)
    ]
    in_fp8 = {
        each.variant
        for rows, block in itertools.product((1, 32, 8192), FP8_EXPERTS[1:])
        for each in expert_launches(EXPERTS[0], DTYPES[0], rows, block)
    }
    return {
        "shapes": found,
        "num_warm": len(warm),
        "missing": sorted(missing),
        "num_delta": len(delta),
        "missing_delta": sorted(delta - warm_delta),
        "num_products": len(products),
        "num_experts": [len(each) for each in (*experts, set.union(*experts), in_fp8)],
    }


def main(arguments: Sequence[str]) -> int:
    if arguments:
        asked = json.loads(arguments[0])
        print(json.dumps(report_shapes(asked["shapes"], asked["num_processes"])))
        return 0
    launches = [(what, launch, arch) for arch in SHARED_BYTES for what, launch in every_launch(arch)]
    jobs = [(launch, arch) for _, launch, arch in launches]
    names = [what for what, _, _ in launches]
    num_bad = 0
    for (launch, arch), what, report in zip(jobs, names, compiled_all(jobs, usable_cpus()), strict=True):
        is_bad = not report.fits(arch)
        num_bad += is_bad
        tile = [launch.constants.get(name) for name in ("TOKENS", "BLOCK_M", "BLOCK_N")]
        line = f"sm_{arch} {launch.name} {what} tile {tile} {dict(launch.options)}: {report}"
        print(line + " DOES NOT FIT" * is_bad, flush=True)
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
