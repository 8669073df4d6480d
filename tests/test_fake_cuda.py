"""The fake device finds each kind of wait, and lets pass what only queues work."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from epd.encoders.device import all_to_host, arrays_to_device, to_device, to_host
from tests import fake_cuda as fakes
from tests.fake_cuda import CUDA, FakeCuda, UnlistedWaitError, fake_cuda

HOST = torch.arange(3)


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with fake_cuda() as mode:
        yield mode


WAITS: dict[str, Callable[[Tensor], object]] = {
    "cpu": lambda there: there.cpu(),
    "item": lambda there: there[0].item(),
    "tolist": lambda there: there.tolist(),
    "bool": lambda there: bool((there > 1).any()),
    "nonzero": lambda there: there.nonzero(),
    "mask": lambda there: there[there > 1],
    "masked write": lambda there: there.index_put_((there > 1,), there[:1]),
    "unique": torch.unique,
    "counted": torch.bincount,
    "repeats": lambda there: there.repeat_interleave(there),
    "index of the host": lambda there: there[HOST],
    "list as an index": lambda there: there[[0, 2]],
    "pageable": lambda there: HOST.to(there.device),
    "pageable, not blocking": lambda there: HOST.to(there.device, non_blocking=True),
    "pinned, blocking": lambda there: HOST.pin_memory().to(there.device),
    "tensor of a list": lambda there: torch.tensor([1, 2], device=there.device),
    "written from the host": lambda there: there.copy_(HOST),
    "read into the host": lambda there: torch.empty_like(there, device="cpu").copy_(there),
}


@pytest.mark.parametrize("kind", list(WAITS))
def test_a_wait_is_found_with_its_place(cuda: FakeCuda, kind: str) -> None:
    there = torch.zeros(3, dtype=torch.int64, device=CUDA)
    with pytest.raises(UnlistedWaitError, match=r"tests/test_fake_cuda\.py:\d+ in <lambda>|test_a_wait"):
        WAITS[kind](there)
    with cuda.unchecked():
        to_host(there)
    assert not cuda.waits


def test_waits_for_tensors_of_inference_mode_are_found_outside_of_it(cuda: FakeCuda) -> None:
    with torch.inference_mode():
        there = torch.zeros(3, device=CUDA)
    with pytest.raises(UnlistedWaitError):
        there.cpu()
    assert not cuda.waits


def test_a_listed_wait_is_counted(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    place = ("tests/test_fake_cuda.py", "test_a_listed_wait_is_counted")
    monkeypatch.setitem(fakes.WAITS, place, "this test reads")
    there = torch.zeros(3, dtype=torch.int64, device=CUDA)
    assert to_host(there).tolist() == [0, 0, 0]
    numbers, flags = all_to_host([there, there > 1])
    assert numbers.dtype == torch.int64
    assert flags.tolist() == [False] * 3
    assert cuda.waits == [place, place]


def test_what_is_only_queued_passes(cuda: FakeCuda) -> None:
    there = to_device(HOST, CUDA)
    (again,) = arrays_to_device([np.arange(3)], CUDA)
    assert (there + again).device.type == "cuda"
    assert there.index_select(0, again).shape == (3,)
    torch.empty(3, dtype=torch.int64, pin_memory=True).copy_(there, non_blocking=True)
    assert not cuda.waits


def test_tensors_of_two_devices_do_not_mix(cuda: FakeCuda) -> None:
    with pytest.raises(RuntimeError, match=r"two (different )?devices"):
        _ = torch.zeros(3, device=CUDA) + torch.zeros(3)
    assert (HOST + 1).tolist() == [1, 2, 3], "the host computes"
    assert not cuda.waits
