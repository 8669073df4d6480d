"""Files of weights are read and written tensor by tensor: what has been read is no memory any more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import epd.stages.loading.weight_files
from epd.errors import ModelError
from epd.stages.loading.weight_files import num_weight_bytes, read_tensors, stored_tensors, write_weights
from epd.stages.profiling import peak_bytes

NUM, SIDE = 12, 1024
SIZE = SIDE * SIDE * 2  # bytes of a tensor


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder with tensors of 2 MB in bfloat16, and a few of other types and shapes."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    tensors = {f"layer.{index:02}": torch.randn(SIDE, SIDE).bfloat16() for index in range(NUM)}
    others = {
        "scale": torch.tensor(0.5, dtype=torch.float64),
        "ids": torch.arange(5, dtype=torch.int32),
        "mask": torch.tensor([True, False, True]),
    }
    save_file(tensors | others, folder / "model.safetensors")
    return folder


def resident_bytes(file: Path) -> int:
    """The memory of this process that pages of the file take."""
    found, is_of_file = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0] and not line.split()[0].endswith(":"):
            is_of_file = line.endswith(str(file))
        elif is_of_file and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found


def test_what_has_been_read_is_given_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epd.stages.loading.weight_files, "_MAPPED_BYTES", 2 * SIZE)
    seen = []
    for _, tensor in read_tensors(stored_tensors(folder)):
        tensor.float().sum()
        seen.append(resident_bytes(folder / "model.safetensors"))
    assert SIZE < max(seen) < 3.5 * SIZE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_copy_has_the_same_tensors_in_one_type(folder: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    """It is read by others than us, and every tensor in it is aligned."""
    write_weights(folder, dtype, tmp_path / "copy")
    theirs, copy = load_file(folder / "model.safetensors"), load_file(tmp_path / "copy")
    assert copy.keys() == theirs.keys()
    for name, tensor in theirs.items():
        wanted = tensor.to(dtype) if tensor.is_floating_point() else tensor
        assert copy[name].dtype == wanted.dtype
        assert torch.equal(copy[name], wanted)
        assert not copy[name].numel() or copy[name].data_ptr() % copy[name].element_size() == 0
    assert num_weight_bytes(folder, dtype) == sum(tensor.nbytes for tensor in copy.values())


def test_a_copy_is_made_without_holding_it(folder: Path, tmp_path: Path) -> None:
    peak = peak_bytes(lambda: write_weights(folder, torch.float32, tmp_path / "copy"))
    assert peak < 6 * SIZE  # of 24: one tensor as it is stored, two as they are written


def test_a_type_that_is_not_known_is_a_model_error(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(epd.stages.loading.weight_files._DTYPES, "BF16")
    with pytest.raises(ModelError, match="has tensors of the type BF16; allowed: F64"):
        write_weights(folder, torch.float32, tmp_path / "copy")


@pytest.fixture(autouse=True)
def _remove_copies(tmp_path: Path) -> Iterator[None]:
    yield
    (tmp_path / "copy").unlink(missing_ok=True)
