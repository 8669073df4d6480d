"""Checks the names of devices and types before torch is imported; `epd.stages.placement` resolves them."""

from __future__ import annotations

import re

from epd.errors import RequestError

DTYPE_NAMES = ("bfloat16", "float16", "float32")
_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?")


def check_device(name: str) -> None:
    """Raises RequestError for anything but auto, cpu, cuda and cuda:N."""
    if not _DEVICE.fullmatch(name):
        raise RequestError(
            f"received the device {name!r}; allowed: auto, cpu, cuda, or cuda:N for one of several GPUs"
        )


def check_dtype(name: str) -> None:
    """Raises RequestError for anything but auto and the names of types."""
    if name not in ("auto", *DTYPE_NAMES):
        raise RequestError(f"received the dtype {name!r}; allowed: auto, {', '.join(DTYPE_NAMES)}")
