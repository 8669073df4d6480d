"""SIGINT and SIGTERM at any moment of a start: in processes of their own, around servers that do little."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.serve_app.server import wait_until

END_S = 900.0
# argv: where it stops to go on, and whether it is alone. It says what it does on a line each.
SERVER = """
import _thread, os, signal, sys, threading, time
from contextlib import contextmanager
from epd.serve_app.cli.serve import Signals, serve_until_signal
from epd.errors import CancelledError

def say(words):
    print(words, flush=True)

@contextmanager
def served(stopping):
    say("starts")
    if sys.argv[1] == "start":
        while not stopping.is_set():
            time.sleep(0.01)
        say("takes back")
        raise CancelledError("stopped")
    if sys.argv[1] == "error":
        raise ValueError("no")
    yield
    if sys.argv[1] == "drain":
        say("drains")
        time.sleep(3600)
    say("ends")

def ready():
    say("ready")
    if sys.argv[1] == "missed":
        threading.Timer(0.2, _thread.interrupt_main, [signal.SIGTERM]).start()

def end(code):
    say(f"cut off with {code}")
    os._exit(code)

with Signals() as signals:
    serve_until_signal(served, signals, ready, end, is_alone=sys.argv[2] == "alone")
say("returned")
"""
# A server that starts slowly, in a call that no signal comes out of, as some of Ray's are.
STUCK = SERVER.replace('say("starts")', 'say("starts"); time.sleep(3600)')


@contextmanager
def serve(script: str, *argv: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", script, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def lines_after(process: subprocess.Popen[str], until: str, *signals: signal.Signals) -> list[str]:
    """What it prints after a line, at which it is sent signals; it has ended then."""
    assert process.stdout is not None
    while process.stdout.readline().strip() != until:
        assert process.poll() is None
    for number, each in enumerate(signals):
        if number:
            assert process.stdout.readline().strip() == "drains"
        process.send_signal(each)
    said, _ = process.communicate(timeout=END_S)
    return said.split("\n")[:-1]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_server_that_is_ready(how: signal.Signals) -> None:
    with serve(SERVER, "ready", "shared") as process:
        assert lines_after(process, "ready", how) == ["ends", "returned"]
        assert process.returncode == 0


def test_a_signal_that_comes_just_before_the_wait_is_not_missed() -> None:
    """`interrupt_main` wakes no call, as a signal between the last step and the wait."""
    with serve(SERVER, "missed", "shared") as process:
        said, _ = process.communicate(timeout=END_S)
        assert said.split() == ["starts", "ready", "ends", "returned"]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_start_among_others_takes_back_what_it_began(how: signal.Signals) -> None:
    with serve(SERVER, "start", "shared") as process:
        assert lines_after(process, "starts", how) == ["takes back", "returned"]
        assert process.returncode == 0


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_start_that_is_alone_is_cut_off_even_where_it_is_stuck(how: signal.Signals) -> None:
    with serve(STUCK, "start", "alone") as process:
        assert lines_after(process, "starts", how) == ["cut off with 0"]
        assert process.returncode == 0


def test_a_second_signal_ends_it_while_it_drains() -> None:
    with serve(SERVER, "drain", "shared") as process:
        assert lines_after(process, "ready", signal.SIGTERM, signal.SIGINT) == ["cut off with 130"]
        assert process.returncode == 130


def test_an_error_of_the_start_is_the_callers() -> None:
    with serve(SERVER, "error", "alone") as process:
        said, raised = process.communicate(timeout=END_S)
        assert said.split() == ["starts"]
        assert raised.strip().endswith("ValueError: no")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_parts_are_imported_ends_it_cleanly(how: signal.Signals, tmp_path: Path) -> None:
    """The first moments, when nothing was begun. Imports may catch what is raised in their middle."""
    there = tmp_path / "there"
    start = (
        "import sys, time, pathlib\n"
        "class Slow:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'epd.serve_app.cli.serve':\n"
        f"            pathlib.Path({str(there)!r}).touch()\n"
        "            try:\n"
        "                time.sleep(3600)\n"
        "            except BaseException:\n"
        "                time.sleep(3600)\n"
        "sys.meta_path.insert(0, Slow())\n"
        "sys.argv = ['epd', 'serve']\n"
        "from epd.serve_app.cli.program import main; main()\n"
    )
    with serve(start) as process:
        wait_until(there.exists, END_S)
        process.send_signal(how)
        assert process.communicate(timeout=END_S) == ("", "")
        assert process.returncode == 0
