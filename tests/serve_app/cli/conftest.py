"""The server of `tests/serve_app`, for the commands that ask one."""

from tests.bench.conftest import server
from tests.serve_app.conftest import front, run_front, shared_front

__all__ = ["front", "run_front", "server", "shared_front"]
