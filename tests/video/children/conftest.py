"""Media servers as programs of their own."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from epd.video.children import process


@pytest.fixture(autouse=True, scope="package")
def real_servers() -> Iterator[None]:
    """Here they are started as users start them, and not forked: see `tests/media_servers.py`."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(process, "subprocess", subprocess)
        patched.setattr(process, "_FORK_S", 600.0)  # a busy machine lets a server wait
        yield
