"""Triton kernels against their plain torch twins, interpreted; what a CPU computes where Triton is missing.

A process for each of the two: kernels are interpreted only if told so before they are first imported.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests import ROOT
from tests.encoders.test_kernels import CASES
from tests.stages.attention.test_kernels import PASSES
from tests.stages.decoder.test_delta_rule import CASES as DELTA
from tests.stages.decoder.test_experts import CASES as EXPERTS
from tests.stages.decoder.test_experts import FP8_CASES as FP8_EXPERTS
from tests.stages.decoder.test_fusions import SHAPES
from tests.stages.decoder.test_quantized_products import CASES as PRODUCTS
from tests.stages.decoder.test_quantized_products import ROWS

# Each part prints one line, whatever became of the others.
EACH = """
import traceback
for name, part in PARTS.items():
    try:
        print(name, part())
    except Exception:
        print(name, repr(traceback.format_exc()))
"""
INTERPRETED = """
import torch
from tests.encoders import test_kernels as patches
from tests.encoders import test_qwen_tower as towers
from tests.stages.attention import test_kernels as attention
from tests.stages.decoder import test_delta_rule as delta
from tests.stages.decoder import test_experts as experts
from tests.stages.decoder import test_fusions as fusions
from tests.stages.decoder import test_quantized_products as products

def compare_patches():
    return len([patches.compare(case, "cpu") for case in patches.CASES])

def compare_attention():
    return len([attention.compare_attention(one, "cpu") for one in attention.PASSES])

PARTS = {
    "patches": compare_patches,
    "attention": compare_attention,
    "refilled": lambda: attention.compare_refilled("cpu"),
    "padded": lambda: attention.compare_padded("cpu"),
    "moves": lambda: attention.compare_moves("cpu"),
    "tower": lambda: towers.compare_fused("cpu", torch.float32),
    "fusions": lambda: fusions.compare_all("cpu"),
    "delta": lambda: delta.compare_all("cpu"),
    "layers": lambda: delta.compare_layers("cpu"),
    "answer": delta.compare_answer,
    "experts": lambda: experts.compare_all("cpu"),
    "arranged": lambda: experts.compare_arranged("cpu"),
    "turned": lambda: experts.compare_turned("cpu"),
    "products": lambda: products.compare_all("cpu"),
    "rows": lambda: products.compare_rows("cpu"),
    "bytes": lambda: products.compare_every_byte("cpu"),
}
"""
WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # any import of it raises ImportError, as where it is not installed

def patches():
    import torch
    from epd import encoders
    import epd.encoders.kernels
    from epd.encoders.patches import PatchSpec, patchify
    frames = torch.zeros(2, 8, 16, 3, dtype=torch.uint8)
    return tuple(patchify(frames, PatchSpec(4, 2, 2, (1.0, 1.0, 1.0), (1.0, 1.0, 1.0), 3)).shape)

def attention():
    from tests.stages.attention.test_attention import check, make_case
    return check(make_case([(1, 40), (3, 3)]))

PARTS = {"patches": patches, "attention": attention}
"""


def results(script: str, **environment: str) -> dict[str, str]:
    """What came of each part, by its name."""
    run = subprocess.run(
        [sys.executable, "-c", script + EACH], cwd=ROOT, env=os.environ | environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return {name: result for name, _, result in (line.partition(" ") for line in run.stdout.splitlines())}


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str]:
    return results(INTERPRETED, TRITON_INTERPRET="1")


@pytest.fixture(scope="module")
def without_triton() -> dict[str, str]:
    return results(WITHOUT_TRITON)


@pytest.mark.parametrize(
    ("name", "result"),
    [
        ("patches", len(CASES)),
        ("attention", len(PASSES)),
        ("refilled", None),
        ("padded", None),
        ("moves", None),
        ("tower", None),
        ("fusions", 15 * len(SHAPES)),
        ("delta", sum(len(case.passes) for case in DELTA)),
        ("layers", 2 * 2),  # of two types
        (
            "answer",
            3 * 3 * 4,
        ),  # of three layers, before the rule, in it and behind, a prompt and three decodes
        ("experts", len(EXPERTS + FP8_EXPERTS)),
        ("arranged", 2),
        ("turned", "refused"),
        ("products", len(PRODUCTS)),
        ("rows", len(ROWS)),
        ("bytes", True),
    ],
)
def test_interpreted_kernels_equal_their_twins(
    interpreted: dict[str, str], name: str, result: int | str | None
) -> None:
    assert interpreted[name] == str(result)


@pytest.mark.parametrize(("name", "result"), [("patches", "(8, 96)"), ("attention", "None")])
def test_a_cpu_needs_no_triton(without_triton: dict[str, str], name: str, result: str) -> None:
    assert without_triton[name] == result
