"""What a media worker says of the walls around its processes, and a server that may not start without."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from epd.errors import InfeasibleError
from epd.serve_app.fleet import worker_statuses
from epd.serve_app.media.media_processes import MediaProcesses
from epd.serve_app.media.media_worker import MediaWorker
from epd.serve_app.worker_info import WorkerInfo
from tests.serve_app.conftest import media_settings


def children_with(*walls: str) -> Any:
    """Stands for media children on a kernel that has these walls."""
    server = SimpleNamespace(start=lambda: None, walls=frozenset(walls))
    return SimpleNamespace(server=server, close=lambda: None)


def test_the_status_names_the_walls_that_all_processes_have() -> None:
    processes = MediaProcesses(children_with("seccomp", "landlock"), children_with("landlock", "network"))
    processes.start()
    assert processes.walls == ("landlock",)
    worker = MediaWorker(media_settings(), processes)
    try:
        load = worker.load()
    finally:
        worker.close()
    (status,) = worker_statuses([WorkerInfo("v0", frozenset({"video"}))], {"v0": load}, ())
    assert status.walls == ("landlock",)


def test_a_server_may_be_told_not_to_start_without() -> None:
    missing = children_with("seccomp", "network"), children_with("seccomp", "network")
    MediaProcesses(*missing).start()
    with pytest.raises(InfeasibleError, match="get no landlock from this kernel") as refused:
        MediaProcesses(*missing, requires_walls=True).start()
    assert "\n" not in str(refused.value)
    both = children_with("seccomp", "landlock")
    MediaProcesses(both, both, requires_walls=True).start()
