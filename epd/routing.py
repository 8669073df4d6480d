"""Which worker takes what: roles, loads and the choice among workers. No I/O; time is passed in."""

from __future__ import annotations

from typing import Literal

# What a worker can do. A worker with both `prefill` and `decode` answers a request to its end by itself.
Stage = Literal["video", "encode", "prefill", "decode"]
