"""Decides whether a Triton kernel or its plain torch twin computes, and checks what it is given.

Triton is not needed to ask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def uses_kernels(tensor: Tensor) -> bool:
    """Reports whether kernels compute on this tensor: it is on a GPU, and has values.

    A fake tensor has a shape and a device alone; the twins run on it, which checks both.
    """
    return tensor.is_cuda and not isinstance(tensor, FakeTensor)


def at_first_use(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a package of kernels, which imports each with its first use.

    modules: of the package, by the names of the kernels in them.
    """

    def kernel(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    return kernel


def check_contiguous(*tensors: Tensor) -> None:
    """Raises ValueError for tensors that a kernel would read as if their rows followed each other."""
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise ValueError(
                f"received {tuple(tensor.shape)} with strides {tensor.stride()}; give it in one piece"
            )
