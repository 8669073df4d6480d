"""Processes that are lost are ended, and no others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from serve_app.network.membership import end_process, start_ticks

SOON_S = 10.0


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_a_process_that_is_stopped_can_be_ended(process: subprocess.Popen[bytes]) -> None:
    os.kill(process.pid, signal.SIGSTOP)
    end_process(process.pid, start_ticks(process.pid))
    assert process.wait(SOON_S) == -signal.SIGKILL


def test_a_process_with_the_id_of_one_that_is_gone_is_left_alone(process: subprocess.Popen[bytes]) -> None:
    end_process(process.pid, start_ticks(process.pid) - 1)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.2)


def test_a_process_that_is_gone_is_none(process: subprocess.Popen[bytes]) -> None:
    ticks = start_ticks(process.pid)
    process.kill()
    process.wait()
    assert start_ticks(process.pid) == 0
    end_process(process.pid, ticks)
