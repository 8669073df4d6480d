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


WARM_UP = """
import torch
from unittest.mock import patch
from stages.attention.warm_up import warm_up
from tests.stages.kernels_ahead import attention_launches, recorded

def launch():
    storage = torch.empty(8, 28, 2, 16, 4, 128, dtype=torch.bfloat16, device="cuda")
    modules = ("stages.attention.attention", "stages.attention.device")
    switches = [patch(f"{module}.uses_kernels", lambda tensor: True) for module in modules]
    with switches[0], switches[1], patch("stages.attention.device._num_processors", lambda device: 132):
        warm_up(storage[:, 3, 0], storage[:, 3, 1], 28)

def variants(launches):
    return {(one.name, str(one.signature), str(one.constants), str(one.attributes)) for one in launches}

warm = variants(recorded(launch))
missing = variants(attention_launches((28, 4, 128), 16, torch.bfloat16)) - warm
print(len(warm), "variants,", missing or "nothing", "missing")
"""


def test_a_warm_up_launches_what_passes_launch() -> None:
    """Two kinds of tiles, split or not, their merge, and the write."""
    run = subprocess.run(
        [sys.executable, "-c", WARM_UP], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == "6 variants, nothing missing\n"
