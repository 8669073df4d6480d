"""Code that takes over a media child reaches nothing, whoever runs the server and wherever."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from epd.video.children.process import ChildServer
from epd.video.children.walls import LANDLOCK, NETWORK, REQUIRED_WALLS, SECCOMP, filter_program

MODES = ["as it is", "without namespaces", "user", "user without namespaces"]


def has_walls() -> bool:
    libc = ctypes.CDLL(None)
    has_landlock = libc.syscall(444, None, 0, 1) >= 1
    return has_landlock and platform.machine() in ("x86_64", "aarch64")


needs_walls = pytest.mark.skipif(not has_walls(), reason="this kernel has no Landlock or no known filter")


def probed(mode: str) -> dict[str, Any]:
    if mode.startswith("user") and os.geteuid() != 0:
        pytest.skip("only root can become another user")
    done = subprocess.run(
        [sys.executable, "-m", "tests.video.children.wall_probe", mode],
        env={**os.environ, "EPD_API_KEY": "secret"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


@needs_walls
@pytest.mark.parametrize("mode", MODES)
def test_a_taken_over_child_reaches_nothing(mode: str) -> None:
    said = probed(mode)
    assert set(REQUIRED_WALLS) <= set(said["walls"])
    assert "namespaces" not in mode or NETWORK not in said["walls"]
    for name, outcome in said["outcomes"].items():
        assert outcome in ({"done"} if name.startswith("may: ") else {"EPERM", "EACCES"}), name
    assert said["left"] == ["socket", "victim"]


@needs_walls
def test_a_server_says_which_walls_its_children_have() -> None:
    server = ChildServer(1 << 30, decodes_video=False)
    try:
        assert server.walls == frozenset()
        server.start()
        assert {LANDLOCK, SECCOMP} <= server.walls
    finally:
        server.close()


@pytest.mark.parametrize(("machine", "socket_call", "read_call"), [("x86_64", 41, 0), ("aarch64", 198, 63)])
def test_the_filter_of_both_machines(machine: str, socket_call: int, read_call: int) -> None:
    """The program, run here: denied, allowed, of another architecture, newer than known."""
    arch = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[machine]
    results = [
        returned(filter_program(machine, pid=7), call, arch) for call in (socket_call, read_call, 435, 500)
    ]
    assert results == [0x50001, 0x7FFF0000, 0x50026, 0x50026]
    assert returned(filter_program(machine, pid=7), read_call, arch ^ 1) == 0x80000000


@pytest.mark.parametrize(
    ("arguments", "result"), [((7, 9), 0x7FFF0000), ((8, 9), 0x50001), ((0, 9), 0x50001)]
)
def test_a_child_may_signal_itself_alone(arguments: tuple[int, int], result: int) -> None:
    for machine, call, arch in (("x86_64", 62, 0xC000003E), ("aarch64", 129, 0xC00000B7)):
        assert returned(filter_program(machine, pid=7), call, arch, arguments) == result


def returned(program: list[tuple[int, int, int, int]], call: int, arch: int, arguments: Any = ()) -> int:
    """What the filter returns for a call, by running its instructions."""
    seen = {0: call, 4: arch} | {16 + 8 * place: value for place, value in enumerate(arguments)}
    at = value = 0
    while True:
        code, if_true, if_not, operand = program[at]
        at += 1
        if code == 0x06:
            return operand
        if code == 0x20:
            value = seen.get(operand, 0)
        else:
            holds = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[code]
            at += if_true if holds else if_not


HIDDEN = """
import ctypes, os, sys
from epd.video.children.walls import hide_process
os.setgroups([]), os.setgid(65534), os.setuid(65534)
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
if sys.argv[1] == "hidden":
    hide_process()
parent = os.getpid()
if os.fork() == 0:
    try:
        print(len(open(f"/proc/{parent}/environ", "rb").read()) > 0, flush=True)
    except PermissionError:
        print("refused", flush=True)
    os._exit(0)
os.wait()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(("mode", "outcome"), [("hidden", "refused"), ("as it is", "True")])
def test_a_hidden_process_keeps_its_environment_from_its_user(mode: str, outcome: str) -> None:
    done = subprocess.run([sys.executable, "-c", HIDDEN, mode], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == outcome


_IMPORTING = """
import os, sys
sys.path.append(sys.argv[1])
from epd.video.children.walls import Walls
walls = Walls()
if os.fork() == 0:
    walls.enter()
    try:
        import a_package
    except PermissionError as error:
        print(error)
    else:
        print(a_package.FOUND)
    sys.stdout.flush()
    os._exit(0)
os.wait()
"""


@needs_walls
@pytest.mark.parametrize(("folder", "said"), [("site-packages", "found"), ("where-i-started", "Permission")])
def test_a_child_may_import_what_lies_with_packages(folder: str, said: str, tmp_path: Path) -> None:
    """Packages lie beside an environment too, where it sees those of another."""
    package = tmp_path / folder / "a_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("FOUND = 'found'\n")
    command = [sys.executable, "-c", _IMPORTING, str(package.parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert said in done.stdout
