"""When a cluster counts as lost, and that nothing of it is left then; without Ray."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path

from epd.serve_app.ray.process_tree import children
from epd.serve_app.ray.supervisor import ClusterWatch
from tests.serve_app.cli.test_serve_command import MARK, processes_with
from tests.serve_app.server import wait_until

# A process whose child has a child that ignores SIGTERM, each in a session of its own; it ends them all.
TREE = """
import os, subprocess, sys
from epd.serve_app.ray.process_tree import adopt_orphans, children, end_descendants

INNER = "trap '' TERM; echo there; sleep 1000"
adopt_orphans()
below = subprocess.Popen(
    ["setsid", "sh", "-c", 'setsid sh -c "$1" "$2" & sleep 1000', "sh", INNER, sys.argv[1]],
    stdout=subprocess.PIPE,
)
below.stdout.readline()
end_descendants(5.0)
print(children(os.getpid()), flush=True)
os._exit(3)
"""
# Ray alone, which loses a process: what `epd serve` does then.
LOSES = """
import os, signal, sys, time
from epd.serve_app.ray.process_tree import children
from epd.serve_app.ray.cluster import RaySettings, ray_cluster
from epd.serve_app.ray.supervisor import supervised

with ray_cluster(RaySettings()), supervised(owns_cluster=True):
    time.sleep(10.0)  # the supervisor has seen it by then
    lost = [pid for pid, name in children(os.getpid()).items() if name == sys.argv[1]]
    os.kill(lost[0], signal.SIGKILL)
    time.sleep(1000)
"""


def watch() -> ClusterWatch:
    return ClusterWatch({"raylet": 30.0, "controller": 60.0}, every_s=1.0)


def test_a_part_that_has_ended_is_the_end_of_the_cluster() -> None:
    cluster = watch()
    cluster.alive("raylet", 1.0)
    assert cluster.lost(1.1) == ""
    cluster.ended("raylet")
    assert cluster.lost(1.2) == "raylet has ended"


def test_a_part_that_was_never_there_has_not_started_yet() -> None:
    cluster = watch()
    cluster.ended("controller")
    assert cluster.lost(1e6) == ""


def test_a_part_may_be_silent_for_a_while_as_it_may_be_starting_again() -> None:
    cluster = watch()
    cluster.alive("controller", 0.0)
    cluster.alive("raylet", 50.0)
    assert cluster.lost(60.0) == ""
    assert cluster.lost(61.0) == "controller has sent no heartbeat for 61 s"
    cluster.alive("controller", 62.0)
    assert cluster.lost(63.0) == ""


def test_the_hour_in_which_a_server_was_stopped_is_nobodys_silence() -> None:
    """Such as by Ctrl-Z, or with its machine."""
    cluster = watch()
    cluster.alive("controller", 0.0)
    assert cluster.lost(1.0) == ""
    for now_s in range(3600, 3659):
        assert cluster.lost(now_s) == ""
    assert cluster.lost(3660.0) == "controller has sent no heartbeat for 61 s"


def test_a_part_that_is_heard_of_again_has_not_ended() -> None:
    cluster = watch()
    cluster.alive("raylet", 0.0)
    cluster.ended("raylet")
    cluster.alive("raylet", 1.0)
    assert cluster.lost(2.0) == ""


def test_all_that_was_started_ends_with_the_process(tmp_path: Path) -> None:
    mark = str(tmp_path / "of-this-test")
    done = subprocess.run(
        [sys.executable, "-c", TREE, mark], capture_output=True, text=True, timeout=200, check=False
    )
    assert (done.returncode, done.stdout) == (3, "{}\n"), done.stderr
    wait_until(lambda: processes_that_name(mark) == [])


def processes_that_name(mark: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark in (line := path.read_text()):
                found.append(line)
        except OSError:
            continue
    return found


def test_a_server_whose_raylet_is_gone_ends_and_leaves_nothing(tmp_path: Path) -> None:
    """With an application under load: `make soak`."""
    mark = secrets.token_hex(8)
    done = subprocess.run(
        [sys.executable, "-c", LOSES, "raylet"],
        env={**os.environ, MARK: mark},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    assert "error: Ray's raylet has ended: the server cannot go on; start it again\n" in done.stderr
    wait_until(lambda: processes_with(mark) == [])


def test_children_are_found_by_name() -> None:
    process = subprocess.Popen(["sleep", "1000"])
    try:
        wait_until(lambda: children(os.getpid()).get(process.pid) == "sleep")
    finally:
        process.kill()
        wait_until(lambda: process.pid not in children(os.getpid()))
        process.wait()
