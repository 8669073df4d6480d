"""Measures the most bytes of tensors that an action holds at once, beside those that were there before.

Counts the storages of all results while they live, on every device; what an operator takes and gives back
inside of itself is not seen. The same on every run, unlike the memory of the process.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def peak_bytes(action: Callable[[], object]) -> int:
    """Runs an action and returns the most bytes of new tensors that lived at once."""
    watch = _Watch()
    with watch:
        action()
    return watch.peak


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Follows storages from the operator that makes them to their end."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak: int = 0
        self._held = 0
        self._known: dict[int, int] = {}  # bytes by address of the memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        old = {_address(each) for each in _tensors((args, kwargs))}
        results = func(*args, **(kwargs or {}))
        for tensor in _tensors(results):
            if _address(tensor) not in old:
                self._add(tensor)
        self.peak = max(self.peak, self._held)
        return results

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address in self._known or not storage.nbytes():
            return
        self._known[address] = storage.nbytes()
        self._held += storage.nbytes()
        weakref.finalize(storage, self._drop, address)

    def _drop(self, address: int) -> None:
        self._held -= self._known.pop(address, 0)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(values: Any) -> list[torch.Tensor]:
    """Lists tensors; a matrix that oneDNN has laid out has no storage to count."""
    leaves = torch.utils._pytree.tree_leaves(values)
    return [each for each in leaves if isinstance(each, torch.Tensor) and not each.is_mkldnn]
