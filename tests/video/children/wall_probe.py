"""Does what code in a taken-over decoder would do, behind the walls; prints what became of each attempt.

A program: its process is the parent, with a secret in its environment, and forks a child as the server does.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import json
import mmap
import os
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from epd.video.children.walls import Walls

_PTRACE_SEIZE, _PR_SET_DUMPABLE = 0x4206, 4
_NOBODY = 65534
LIBC = ctypes.CDLL(None, use_errno=True)


class _NoNamespaces:
    """The C library where the kernel gives nobody a namespace, as in Docker's default."""

    def __getattr__(self, name: str) -> Any:
        return (lambda *_: -1) if name == "unshare" else getattr(LIBC, name)


def _checked(result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")


def _connect(family: int, address: Any) -> None:
    with socket.socket(family) as sock:
        sock.connect(address)


def _threads_and_memory() -> None:
    thread = threading.Thread(target=lambda: mmap.mmap(-1, 1 << 20).close())
    thread.start()
    thread.join()


def attempts(folder: Path, tcp: Any, file: int) -> dict[str, Callable[[], object]]:
    """What a child tries. file: its only descriptor."""
    victim, parent = folder / "victim", os.getppid()
    wave_file = Path(os.__file__).parent / "wave.py"
    return {
        "read the parent's environment": Path(f"/proc/{parent}/environ").read_bytes,
        "read the parent's memory": lambda: os.close(os.open(f"/proc/{parent}/mem", os.O_RDONLY)),
        "trace the parent": lambda: _checked(LIBC.ptrace(_PTRACE_SEIZE, parent, None, None)),
        "signal the parent": lambda: os.kill(parent, signal.SIGCONT),
        "limit the parent": lambda: resource.prlimit(parent, resource.RLIMIT_CORE, (0, 0)),
        "connect to a socket": lambda: _connect(socket.AF_UNIX, str(folder / "socket")),
        "connect by TCP": lambda: _connect(socket.AF_INET, tcp),
        "read a file": victim.read_bytes,
        "read the file it has, by a path": lambda: Path(f"/proc/self/fd/{file}").read_bytes(),
        "list a folder": lambda: os.listdir(folder),
        "write a file": lambda: victim.write_bytes(b"x"),
        "make a file": lambda: (folder / "new").touch(),
        "remove a file": victim.unlink,
        "rename a file": lambda: victim.rename(folder / "other"),
        "start a program": lambda: os.execv("/bin/true", ["true"]),
        "start a process": os.fork,
        "may: read its own file": lambda: os.pread(file, 6, 0),
        "may: threads and memory": _threads_and_memory,
        "may: read the library": lambda: os.access(wave_file, os.R_OK) and importlib.import_module("wave"),
        "may: sleep": lambda: time.sleep(0.001),
    }


def _outcome(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "done"


def _tried(walls: Walls, folder: Path, tcp: Any) -> dict[str, object]:
    file = os.open(folder / "victim", os.O_RDONLY)
    read, write = os.pipe()
    if os.fork() == 0:
        stand = walls.enter()
        outcomes = {name: _outcome(attempt) for name, attempt in attempts(folder, tcp, file).items()}
        os.write(write, json.dumps({"walls": stand, "outcomes": outcomes}).encode())
        os._exit(0)
    os.close(write)
    os.wait()
    with open(read, "rb") as report:
        said: dict[str, object] = json.load(report)
    return said


def _become_nobody() -> None:
    os.setgroups([])
    os.setgid(_NOBODY)
    os.setuid(_NOBODY)
    LIBC.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)  # as a process that this user has started


def main(mode: str) -> None:
    if mode.startswith("user"):
        _become_nobody()
    walls = Walls()
    if "namespaces" in mode:
        walls._libc = _NoNamespaces()  # type: ignore[assignment]
    with (
        tempfile.TemporaryDirectory() as name,
        socket.socket(socket.AF_UNIX) as unix,
        socket.create_server(("127.0.0.1", 0)) as tcp,
    ):
        folder = Path(name)
        (folder / "victim").write_bytes(b"secret")
        unix.bind(str(folder / "socket"))
        unix.listen()
        said = _tried(walls, folder, tcp.getsockname())
        said["left"] = sorted(each.name for each in folder.iterdir())
    print(json.dumps(said))


if __name__ == "__main__":
    main(sys.argv[1])
