"""Every way to multiply rows by a matrix gives the same product; which is chosen depends on the matrix."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

import epd.stages.decoder.linear
from epd.stages.decoder.linear import LinearKind, kind_for, linear, linear_kind


@pytest.mark.parametrize("kind", get_args(LinearKind))
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 8, 33, 300])
def test_all_ways_give_the_same_product(kind: LinearKind, has_bias: bool, num_rows: int) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(40, 24), torch.randn(40) if has_bias else None
    rows = torch.randn(num_rows, 48)[:, ::2]  # not in one piece
    with torch.inference_mode():
        product = linear(weight, bias, kind)(rows)
    torch.testing.assert_close(product, functional.linear(rows, weight, bias), rtol=1e-5, atol=1e-5)


def test_a_matrix_is_packed_where_the_copy_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.zeros(10, 100)
    monkeypatch.setattr(epd.stages.decoder.linear, "memory_limit_bytes", lambda: 20 * weight.nbytes)
    assert linear_kind(weight, weight.nbytes) == "packed"
    assert linear_kind(weight, weight.nbytes + 1) == "onednn"
    assert linear_kind(weight.bfloat16(), 0) == "plain"
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert linear_kind(torch.zeros(10, 100), 0) == "plain"
        assert linear_kind(torch.zeros(10, 100, device="cuda"), 0) == "plain"


def test_a_small_matrix_is_multiplied_by_torch_in_any_model() -> None:
    small, large = torch.zeros(256, 128), torch.zeros(257, 128)
    assert {kind_for(small, kind) for kind in get_args(LinearKind)} == {"plain"}
    assert {kind_for(large, kind) for kind in get_args(LinearKind)} == set(get_args(LinearKind))


def test_what_is_not_packed_is_no_copy() -> None:
    weight = torch.ones(4, 3)
    products = {kind: linear(weight, None, kind) for kind in get_args(LinearKind)}
    weight.fill_(2)
    sums = {kind: float(multiply(torch.ones(1, 3)).sum()) for kind, multiply in products.items()}
    assert sums == {"plain": 24, "onednn": 24, "packed": 12}
