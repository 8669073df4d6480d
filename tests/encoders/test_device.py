"""What moves to a device arrives as it was, and on a CPU nothing moves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from epd.encoders import device as moves

CPU = torch.device("cpu")
ARRAYS = [
    np.arange(7, dtype=np.int32),
    np.array([[True, False, True]]),
    np.empty((0, 3), dtype=np.int64),
    np.array([[0.25, -3.0], [1e300, 2.0]]),
    np.arange(12, dtype=np.int64)[::2],
]


def test_on_a_cpu_nothing_is_copied() -> None:
    tensor = torch.arange(3)
    assert moves.to_device(tensor, CPU) is tensor
    array = np.arange(3)
    (shared,) = moves.arrays_to_device([array], CPU)
    array[0] = 9
    assert shared.tolist() == [9, 1, 2]
    assert moves.device_of(nn.Linear(1, 1)) == CPU


def test_packed_arrays_come_out_as_they_went_in() -> None:
    tensors = [torch.from_numpy(array) for array in ARRAYS]
    packed = moves._packed(tensors, pin_memory=False)
    out = moves._unpacked(packed, tensors)
    for before, after in zip(tensors, out, strict=True):
        assert before.dtype == after.dtype
        assert torch.equal(before, after)
    offsets = [each.data_ptr() - packed.data_ptr() for each in out if each.numel()]
    assert all(offset % 16 == 0 for offset in offsets)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_read_back_is_equal(dtype: torch.dtype) -> None:
    values = torch.arange(5, dtype=dtype)
    assert torch.equal(moves.to_host(values), values)
