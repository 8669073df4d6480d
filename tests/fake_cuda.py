"""A CUDA device that computes nothing: shapes and devices are checked, and every wait for it is found.

Tensors of the host are real and compute; tensors on "cuda" are fake (FakeTensorMode). An operation that mixes
the two raises. What makes the host wait for the device raises too, unless it is listed in `WAITS`:

    cuda -> cpu, .item(), bool(tensor), shapes that depend on values (nonzero, masks as indices)
    cpu -> cuda from memory that is not pinned, or that is not `non_blocking`

What the host reads back are zeros, or what `values` makes of the fake tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from transformers import AutoModelForImageTextToText

from epd.encoders.device import HostCopy, constants
from epd.encoders.families import qwen_tower
from tests import ROOT

aten = torch.ops.aten
CUDA = torch.device("cuda")
CPU = torch.device("cpu")

# Where the host may wait for the device, by file and function, and why.
WAITS: dict[tuple[str, str], str] = {
    ("stages/sampling/sampler.py", "_argmax"): "the sampled tokens: text, ends and the next pass need them",
    ("stages/sampling/sampler.py", "_on_host"): "the same, with logprobs and whether the draw was exact",
    ("stages/sampling/candidates.py", "_top_k"): "rows with more equals of the last than are looked at",
    ("encoders/reduction/selection.py", "choose"): "kept tokens are placed in the prompt, by their positions",
    ("encoders/reduction/selection.py", "_in_turns"): "the same, of the default method",
    ("encoders/reduction/merging.py", "choose"): "the same, of MustDrop's first stage",
    ("stages/loading/host_weights.py", "copy_seconds"): "what is timed",
    ("stages/loading/host_weights.py", "tensors"): "all weights of a role together: what follows needs them",
    (
        "stages/loading/weights.py",
        "_move_buffers",
    ): "what modules compute when they are made",
    ("encoders/groups.py", "static_units"): "how many units the tower is called with",
}

_READS = (
    aten._local_scalar_dense,
    aten.nonzero,
    aten.masked_select,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
    aten.bincount,
    aten.equal,
    aten.is_nonzero,
)
# One mode for all tests: fake tensors of another are refused, and models are kept from test to test.
_FAKES = FakeTensorMode(allow_non_fake_inputs=False)
_new_tensor = torch.empty
# What is kept of one device must not reach the tests of another.
_KEPT = (
    qwen_tower.framed_inputs,
    qwen_tower.windowed_inputs,
    qwen_tower.tabled_inputs,
    qwen_tower.runs_by_length,
    constants,
)
_INDEXED = (aten.index, aten.index_put, aten.index_put_, aten._unsafe_index, aten._index_put_impl_)


class UnlistedWaitError(AssertionError):
    """Says where the host waits for the device, and how."""


class FakeCuda(TorchDispatchMode):
    """Runs operations of the host, and only checks those of the device.

    waits: the places of listed waits. launches: what was queued on the device, views and new memory aside.
    """

    def __init__(self, values: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.fake = _FAKES
        self.waits: list[tuple[str, str]] = []
        self.launches: list[str] = []
        self._values = values or (lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype))
        self.cudart = FakeCudart()
        self._pinned: list[torch.UntypedStorage] = []
        self._is_checked = True

    def __enter__(self) -> FakeCuda:
        self.fake.__enter__()  # outside, so that this mode sees every operation first
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.fake.__exit__(*error)

    @contextmanager
    def unchecked(self) -> Iterator[None]:
        """Lets anything wait meanwhile: for what happens once, as loading does."""
        self._is_checked = False
        try:
            yield
        finally:
            self._is_checked = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        packet = func.overloadpacket
        if func.namespace == "prim":  # questions about the tensor itself
            return func(*args, **kwargs)
        if _is_compound(func):
            with _entered(super()):  # tensors of inference mode come with compound operations undivided
                return func.decompose(*args, **kwargs)
        if not _has_fake((*args, *kwargs.values())) and _device_of(kwargs) != "cuda":
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        return self._on_device(func, packet, args, kwargs)

    def _on_device(self, func: Any, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _is_view(func):
            return self._view(func, args, kwargs)
        if "empty" not in packet.__name__:
            self.launches.append(packet.__name__)
        if packet is aten._local_scalar_dense:
            self.wait("a value is read")
            value = self._read(args[0])
            with unset_fake_temporarily():
                return value.item()
        if packet is aten._to_copy and _device_of(kwargs) == "cpu":
            self.wait("a tensor is copied to the host")
            return self._read(args[0], kwargs.get("dtype"))
        if packet is aten.copy_ and args[0].device.type == "cpu":
            if not (self._is_pinned(args[0]) and _does_not_block(args, kwargs)):
                self.wait("a tensor is copied to the host")
            values = self._read(args[1])
            with unset_fake_temporarily():
                return args[0].copy_(values)
        self._check(packet, args, kwargs)
        args, kwargs = tree_map(self._faked, (args, kwargs))
        return func(*args, **kwargs)

    def _view(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Asks torch's own kernel, in a quarter of FakeTensorMode's time: half of all calls are views."""
        with in_kernel_invocation_manager(self.fake):
            views = func(*args, **kwargs)
        return tree_map(lambda view: FakeTensor(self.fake, view, CUDA), views)

    def _read(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        with unset_fake_temporarily():
            return self._values(tensor).to(dtype or tensor.dtype)

    def _check(self, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if packet in _READS:
            self.wait(f"{packet} depends on values")
        if packet is aten.repeat_interleave and kwargs.get("output_size") is None:
            self.wait("repeat_interleave without output_size")
        if packet in _INDEXED and any(each.dtype in (torch.bool, torch.uint8) for each in _indices(args)):
            self.wait("a mask is an index")
        if packet in _INDEXED and any(each.device.type == "cpu" for each in _indices(args)):
            self.wait("an index lies on the host")
        if packet is aten._to_copy and args[0].device.type == "cpu":
            self._check_upload(args[0], kwargs.get("non_blocking", False))
        if packet is aten.copy_ and args[1].device.type == "cpu" and args[1].ndim:
            self._check_upload(args[1], _does_not_block(args, kwargs))

    def _check_upload(self, source: Tensor, non_blocking: bool) -> None:
        if not self._is_pinned(source):
            self.wait("a copy from memory that is not pinned")
        elif not non_blocking:
            self.wait("a copy that is not non_blocking")

    def pinned(self, tensor: Tensor) -> Tensor:
        """Stands in for `Tensor.pin_memory`, which needs a GPU."""
        with unset_fake_temporarily():
            return self._pin(tensor.clone())

    def empty(self, *shape: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        """Stands in for `torch.empty`, which needs a GPU to pin."""
        tensor = _new_tensor(*shape, **options)
        return self._pin(tensor) if pin_memory else tensor

    def _is_pinned(self, tensor: Tensor) -> bool:
        if isinstance(tensor, FakeTensor):
            return False
        address = tensor.untyped_storage().data_ptr()
        return address in self.cudart.registered or any(address == each.data_ptr() for each in self._pinned)

    def _pin(self, tensor: Tensor) -> Tensor:
        self._pinned.append(tensor.untyped_storage())  # kept, so that no other memory gets its address
        return tensor

    def _faked(self, value: Any) -> Any:
        if isinstance(value, Tensor) and not isinstance(value, FakeTensor):
            return self.fake.from_tensor(value)
        return value

    def wait(self, how: str) -> None:
        """Notes a wait of the host for the device; raises for one that is not listed."""
        if not self._is_checked:
            return
        frame = _our_frame()
        place = str(Path(frame.f_code.co_filename).resolve()).removeprefix(f"{ROOT}/"), frame.f_code.co_name
        if place not in WAITS:
            raise UnlistedWaitError(f"{place[0]}:{frame.f_lineno} in {place[1]}: {how}")
        self.waits.append(place)


@cache
def _is_view(func: Any) -> bool:
    """Whether what the operation returns lies in the memory of its argument, which it does not write."""
    return any(each.alias_info and not each.alias_info.is_write for each in func._schema.returns)


@cache
def _is_compound(func: Any) -> bool:
    """Whether the operation is made of others."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return key in func.py_kernels or torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


def _has_fake(values: Any) -> bool:
    """Whether any of the arguments, or of those in lists, is of the device."""
    return any(
        isinstance(each, FakeTensor) or (isinstance(each, list | tuple) and _has_fake(each))
        for each in values
    )


@contextmanager
def _entered(mode: Any) -> Iterator[None]:
    mode.__enter__()
    try:
        yield
    finally:
        mode.__exit__(None, None, None)


def _device_of(kwargs: dict[str, Any]) -> str:
    device = kwargs.get("device")
    return "" if device is None else torch.device(device).type


def _does_not_block(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a `copy_` is only queued."""
    return bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))


def _indices(args: tuple[Any, ...]) -> list[Tensor]:
    return [each for each in args[1] if each is not None]


def _our_frame() -> FrameType:
    """The innermost call of our code, that of who moves a tensor rather than `encoders/device.py`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        is_ours = path.is_relative_to(ROOT) and ".venv" not in path.parts
        if is_ours and path != Path(__file__) and path.parts[-2:] != ("encoders", "device.py"):
            return frame
        frame = frame.f_back
    raise AssertionError("a wait without a frame of ours")


class FakeCudart:
    """Stands in for the driver's memory calls. error: that registering returns, 0 for none.

    registered: bytes by address; num_calls: of registering.
    """

    def __init__(self) -> None:
        self.error = 0
        self.registered: dict[int, int] = {}
        self.num_calls = 0

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: ARG002
        self.num_calls += 1
        assert address not in self.registered, "the driver refuses what is registered"
        if not self.error:
            self.registered[address] = num_bytes
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0

    def cudaGetErrorString(self, error: int) -> str:
        return f"error {error}"


class FakeEvent(NamedTuple):
    """An event of the device that is always passed: nothing runs there."""

    mode: FakeCuda

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.mode.wait("an event is waited for")


class FakeStream(NamedTuple):
    """The stream that everything is queued in."""

    mode: FakeCuda

    def record_event(self) -> FakeEvent:
        return FakeEvent(self.mode)


@contextmanager
def fake_cuda() -> Iterator[FakeCuda]:
    """Runs on the fake device, with torch's operations in the place of kernels."""
    with pytest.MonkeyPatch.context() as patch, FakeCuda() as mode:
        patch.setattr(torch.cuda, "current_stream", lambda device=None: FakeStream(mode))  # noqa: ARG005
        patch.setattr(torch.cuda, "cudart", lambda: mode.cudart)
        patch.setattr(Tensor, "pin_memory", lambda tensor: mode.pinned(tensor))
        patch.setattr(torch, "empty", mode.empty)
        for kept in _KEPT:
            kept.cache_clear()
        try:
            yield mode
        finally:
            for kept in _KEPT:
                kept.cache_clear()


def model_like(config: Any) -> Any:
    """A model of the configuration on the device, without values."""
    with torch.device(CUDA):
        return AutoModelForImageTextToText.from_config(deepcopy(config), attn_implementation="sdpa").eval()


def draw_exactly(patch: pytest.MonkeyPatch) -> None:
    """Lets the host read that the likeliest tokens were enough for every draw; zeros say the opposite."""
    read = HostCopy.wait

    def reading(copy: HostCopy) -> list[Tensor]:
        return [torch.ones_like(each) if each.dtype == torch.bool else each for each in read(copy)]

    patch.setattr(HostCopy, "wait", reading)
