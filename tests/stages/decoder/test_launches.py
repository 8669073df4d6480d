"""What a layer of our decoder launches on a GPU, counted without one."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests import ROOT

MOST = 11


def test_a_layer_launches_few_kernels_and_all_are_warm() -> None:
    """In a process of its own: what is launched is recorded where Triton would compile it."""
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-m", "tests.stages.decoder.device_launches"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    found = re.findall(r"^(.+): (\d+) launches of (.+); not warm: (.+)$", run.stdout, re.MULTILINE)
    assert len(found) == 5
    for name, count, kernels, missing in found:
        assert 9 <= int(count) <= MOST, f"{name}: {count}, {kernels}"
        assert "_norm_rotate_write_kernel" in kernels
        assert "_silu_mul_kernel" in kernels
        assert missing == "[]", f"{name} compiles in its first pass: {missing}"
