"""The Triton kernel against its plain torch twin where there is a GPU.

`tests/stages/test_interpreted.py` interprets it anywhere.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from epd.encoders.patches import PatchSpec, patchify, patchify_plain

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


def compare(case: tuple[int, ...], device: str, dtype: torch.dtype = torch.float32) -> None:
    """The kernel's patches are the twin's, bit by bit, rounded to `dtype`."""
    from epd.encoders.kernels.layer_fusions import patchify_fused

    num_frames, height, width, side, merge, unit = case
    generator = torch.Generator().manual_seed(sum(case))
    frames = torch.randint(0, 256, (num_frames, height, width, 3), dtype=torch.uint8, generator=generator)
    ours = patchify_fused(
        frames.to(device), mean=MEAN, std=STD, frames_per_unit=unit, side=side, merge=merge, dtype=dtype
    )
    theirs = patchify_plain(frames, PatchSpec(side, merge, unit, MEAN, STD, 3))
    assert torch.equal(ours.cpu(), theirs.to(dtype)), f"the kernel differs from its twin for {case}"


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
