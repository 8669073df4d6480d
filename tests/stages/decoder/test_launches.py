"""What a layer of our decoder launches on a GPU, counted without one."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests import ROOT

MOST = 11
# In FP8 the rows before each product are quantised by a kernel, and nothing else is added.
NUM_ROUNDED = 4
# With experts there are a router of transformers and the sum over a row's, and no products of one MLP.
EXPERTS = ("_arrange_kernel", "_gate_up_kernel", "_down_kernel")
NUM_ROUTED = 8
# A layer with a state has a kernel for the rule, one before it and one behind: no operation of torch.
RECURRENT = ("_delta_inputs_kernel", "_delta_steps_kernel", "_gate_norm_kernel")


def test_a_layer_launches_few_kernels_and_all_are_warm() -> None:
    """In a process of its own: what is launched is recorded where Triton would compile it."""
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-m", "tests.stages.decoder.device_launches"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    found = re.findall(r"^(.+): (\d+) launches of (.+); not warm: (.+)$", run.stdout, re.MULTILINE)
    assert len(found) == 9
    for name, count, kernels, missing in found:
        is_fp8, has_experts = name.endswith("FP8"), name.endswith("moe")
        is_recurrent = name == "qwen3.5"
        added = NUM_ROUNDED * is_fp8 + NUM_ROUTED * has_experts
        assert ("_fp8_rows_kernel" in kernels) == ("_scaled_mm_v2" in kernels) == is_fp8
        assert all((each in kernels) == has_experts for each in EXPERTS)
        assert 9 <= int(count) - added <= MOST, f"{name}: {count}, {kernels}"
        assert ("_norm_rotate_write_kernel" in kernels) != is_recurrent
        assert all((each in kernels) == is_recurrent for each in RECURRENT)
        assert ("_silu_mul_kernel" in kernels) != has_experts
        assert missing == "[]", f"{name} compiles in its first pass: {missing}"
