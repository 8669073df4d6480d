"""Every kernel compiles for GPUs that are not here: nothing spills, and shared memory is within the chip's.

A part of the table that `make kernels` prints; Triton keeps what it has compiled, so a second run is short.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from epd.machine import usable_cpus
from tests import ROOT
from tests.stages import kernels_ahead

# (GPU, type, query heads, KV heads, head dim, block size): each head size on each GPU, each type, and each
# block size.
SHAPES = [
    (80, "bfloat16", 28, 4, 128, 16),
    (90, "bfloat16", 28, 4, 80, 256),
    (90, "float16", 8, 8, 64, 1),
    (80, "float32", 16, 2, 80, 16),
    (90, "bfloat16", 28, 4, 128, 32),
    (80, "bfloat16", 32, 8, 64, 4),
    (90, "bfloat16", 32, 8, 128, 64),
    (80, "float16", 16, 2, 80, 128),
    (86, "bfloat16", 28, 4, 128, 16),  # attention alone: tiles for all other chips
]
ATTENTION = {"_attend_kernel", "_merge_kernel", "_write_kernel"}
KERNELS = ATTENTION | {
    "_add_rms_norm_kernel", "_arrange_kernel", "_copy_kernel", "_delta_inputs_kernel", "_delta_solve_kernel",
    "_delta_steps_kernel", "_delta_walk_kernel", "_down_kernel", "_fp8_product_kernel", "_gate_norm_kernel",
    "_gate_up_kernel", "_int4_product_kernel",
    "_norm_rotate_write_kernel", "_patchify_kernel", "_rotate_pairs_kernel", "_silu_mul_kernel",
}  # fmt: skip


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """In a process of its own, once for all: launches need Triton's compiler, which others interpret."""
    num_processes = 1 if "PYTEST_XDIST_WORKER" in os.environ else usable_cpus()
    asked = json.dumps({"shapes": SHAPES, "num_processes": num_processes})
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.stages.kernels_ahead", asked],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    reports: dict[str, Any] = json.loads(run.stdout)
    return reports


def test_every_head_size_and_block_size_is_compiled() -> None:
    assert {shape[5] for shape in SHAPES} == set(kernels_ahead.BLOCK_SIZES)
    assert {(shape[0], shape[4]) for shape in SHAPES if shape[0] != 86} == {
        (arch, dim) for arch in kernels_ahead.ARCHS for dim in kernels_ahead.HEAD_DIMS
    }


@pytest.mark.parametrize("number", range(len(SHAPES)), ids=lambda number: str(SHAPES[number]))
def test_kernels_compile_without_spills(found: dict[str, Any], number: int) -> None:
    reports = found["shapes"][number]
    wanted = {80: KERNELS, 86: ATTENTION, 90: KERNELS | {"_fp8_rows_kernel"}}[SHAPES[number][0]]
    assert {report["kernel"] for report in reports} == wanted
    assert [report for report in reports if not report["fits"]] == []


def test_products_are_compiled_for_decodes_and_for_chunks_alone(found: dict[str, Any]) -> None:
    """Whatever the number of rows, the matrix and its scales: of FP8 and of 4 bits, one of each."""
    assert found["num_products"] == 4


def test_experts_are_compiled_for_decodes_and_for_chunks_alone(found: dict[str, Any]) -> None:
    """A sort, gate and up of two activations, and down: one row, 32, and a chunk, which is another kind.

    In FP8 as many, whether blocks or rows share a scale.
    """
    assert found["num_experts"] == [4, 4, 4, 8, 8]


def test_a_warm_up_launches_what_passes_launch(found: dict[str, Any]) -> None:
    """Two kinds of tiles, also with a window or marks, the merge of those that are cut, and the write."""
    assert (found["num_warm"], found["missing"]) == (8, [])


def test_the_delta_rule_is_compiled_before_the_first_pass(found: dict[str, Any]) -> None:
    """One variant of each kernel, whether a run begins, goes on or has drafts."""
    assert (found["num_delta"], found["missing_delta"]) == (5, [])
