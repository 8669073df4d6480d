"""What is printed where a test waited in vain names the thread that waits and the process that is stopped."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time

from tests.what_waits import what_waits


def test_a_thread_that_waits_is_shown_with_its_calls() -> None:
    begun, event = threading.Event(), threading.Event()

    def waits_for_an_event() -> None:
        begun.set()
        event.wait()

    thread = threading.Thread(target=waits_for_an_event, name="somebody")
    thread.start()
    begun.wait()
    try:
        (row,) = [each for each in what_waits().splitlines() if each.startswith("thread somebody:")]
    finally:
        event.set()
        thread.join()
    assert re.search(r"test_what_waits.py:\d+ waits_for_an_event", row)


def test_a_process_is_shown_with_its_state() -> None:
    """A child that is stopped, as one without a core would be, and how long it has run."""
    child = subprocess.Popen([sys.executable, "-c", "print(1, flush=True); input()"], stdin=-1, stdout=-1)
    try:
        assert child.stdout is not None
        child.stdout.read(1)
        child.send_signal(signal.SIGSTOP)
        while "T" not in (found := states().get(child.pid, "")):
            time.sleep(0.01)
    finally:
        child.kill()
        child.communicate()
    assert re.fullmatch("[tT]", found)
    assert child.pid not in states()


def states() -> dict[int, str]:
    """The state of each process below this one, as it is shown."""
    form = rf"^process (\d+) .*, child of {os.getpid()}: (\w), [\d.]+ s of CPU in [\d.]+ s, \d+ MB"
    return {int(pid): state for pid, state in re.findall(form, what_waits(), re.MULTILINE)}
