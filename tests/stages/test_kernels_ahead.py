"""Every kernel compiles for GPUs that are not here: nothing spills, and shared memory is within the chip's.

A part of the table that `make kernels` prints; Triton keeps what it has compiled, so a second run is short.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests import ROOT

# (GPU, type, query heads, KV heads, head dim, block size): each type and head size, the extreme block sizes.
SHAPES = [
    (80, "bfloat16", 28, 4, 128, 16),
    (90, "bfloat16", 28, 4, 80, 256),
    (90, "float16", 8, 8, 64, 1),
    (80, "float32", 16, 2, 80, 16),
]
SCRIPT = """
import sys, torch
from tests.stages.kernels_ahead import attention_launches, check, patch_launches
arch, dtype, query_heads, kv_heads, dim, block_size = {shape!r}
dtype = getattr(torch, dtype)
launches = attention_launches((query_heads, kv_heads, dim), block_size, dtype)
launches += patch_launches((8, 448, 448, 3), 2, 14, 2, dtype)
for one in launches:
    check(one, arch)
print(sorted({{one.name for one in launches}}))
"""


@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_compile_without_spills(shape: tuple[int | str, ...]) -> None:
    """In a process of its own: the recorded launches need Triton's compiler, which others interpret."""
    command = [sys.executable, "-c", SCRIPT.format(shape=shape)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == "['_attend_kernel', '_merge_kernel', '_patchify_kernel', '_write_kernel']\n"
