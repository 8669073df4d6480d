"""The Triton kernel against its plain torch twin: interpreted anywhere, compiled where there is a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from encoders.patches import PatchSpec, patchify, patchify_plain

MEAN, STD = (122.77, 116.75, 104.09), (68.5, 66.63, 70.32)
# (frames, height, width, pixels of a patch's edge, patches of a token's edge, frames of a unit)
CASES = [
    (2, 16, 24, 4, 2, 2),  # temporal patches, not square
    (3, 16, 8, 4, 2, 2),  # the last frame fills its unit
    (1, 16, 16, 4, 2, 2),
    (2, 24, 24, 4, 3, 1),
    (3, 20, 20, 20, 1, 1),  # tiles; more values than one block
]
LARGE_CASES = [(8, 448, 448, 14, 2, 2), (4, 480, 640, 16, 2, 2), (3, 384, 384, 384, 1, 1)]
HAS_GPU = torch.cuda.is_available() or any(Path("/dev").glob("nvidia[0-9]*"))
SCRIPT = """
import sys
from tests.encoders.test_kernels import CASES, compare
for case in CASES:
    compare(case, "cpu")
print(f"compared {len(CASES)} cases")
"""


PLAIN = """
import torch, encoders, encoders.kernels
from encoders.patches import PatchSpec, patchify
frames = torch.zeros(2, 8, 16, 3, dtype=torch.uint8)
print(patchify(frames, PatchSpec(4, 2, 2, (1.0, 1.0, 1.0), (1.0, 1.0, 1.0), 3)).shape)
"""


def python(script: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def compare(case: tuple[int, ...], device: str, dtype: torch.dtype = torch.float32) -> None:
    """The kernel's patches are the twin's, bit by bit, rounded to `dtype`."""
    from encoders.kernels.patchify import patchify_fused

    num_frames, height, width, side, merge, unit = case
    generator = torch.Generator().manual_seed(sum(case))
    frames = torch.randint(0, 256, (num_frames, height, width, 3), dtype=torch.uint8, generator=generator)
    ours = patchify_fused(
        frames.to(device), mean=MEAN, std=STD, frames_per_unit=unit, side=side, merge=merge, dtype=dtype
    )
    theirs = patchify_plain(frames, PatchSpec(side, merge, unit, MEAN, STD, 3))
    assert torch.equal(ours.cpu(), theirs.to(dtype)), f"the kernel differs from its twin for {case}"


def test_the_interpreted_kernel_equals_its_twin() -> None:
    """In a process of its own: the kernel is interpreted only if told so before it is first imported."""
    run = python(SCRIPT, os.environ | {"TRITON_INTERPRET": "1"})
    assert run.returncode == 0, run.stderr
    assert run.stdout == f"compared {len(CASES)} cases\n"


def test_preprocessing_on_a_cpu_needs_no_triton() -> None:
    """With an import of Triton failing, as where it is not installed."""
    run = python(f"import sys; sys.modules['triton'] = None\n{PLAIN}", dict(os.environ))
    assert run.returncode == 0, run.stderr
    assert run.stdout == "torch.Size([8, 96])\n"


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="no GPU in this machine")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", [*CASES, *LARGE_CASES])
def test_the_compiled_kernel_equals_its_twin(case: tuple[int, ...], dtype: torch.dtype) -> None:
    compare(case, "cuda", dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="no GPU in this machine")
def test_frames_on_a_gpu_take_the_kernel() -> None:
    spec = PatchSpec(14, 2, 2, MEAN, STD, 3)
    frames = torch.randint(0, 256, (3, 56, 84, 3), dtype=torch.uint8)
    assert torch.equal(patchify(frames.cuda(), spec).cpu(), patchify_plain(frames, spec))
