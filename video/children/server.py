"""Forks media children: it imports what they need, and never reads media itself.

    parent  --control socket (stdin): F + job socket, K + pid-->  server  --fork-->  children
            <--R + names of walls, then pids--                    job sockets: parent <--> child, job by job

Forking takes milliseconds where starting Python takes seconds. The server ends, with all its children, when
the parent closes the control socket.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import struct
from pathlib import Path

from epd.video.children import jobs as child_jobs
from epd.video.children.walls import Walls, libc

FORK, KILL, READY = b"F", b"K", b"R"
PID = struct.Struct("<i")
_PR_SET_PDEATHSIG = 1
_MAX_OPEN_FILES = 64
# Long enough for any command, which is a byte and a pid.
_MAX_COMMAND_BYTES = 16


def main(memory_bytes: int, *, decodes_video: bool) -> None:
    """Forks children until stdin, a SOCK_SEQPACKET socket, is closed. memory_bytes: that a child may add."""
    child_jobs.prepare(decodes_video=decodes_video)
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=0)
    children: set[int] = set()
    walls = Walls()
    control.send(READY + _tried(walls))
    try:
        _serve(control, children, walls, memory_bytes)
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)


def _tried(walls: Walls) -> bytes:
    """Returns the names of the walls that a child gets here, separated by commas."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write, ",".join(walls.enter()).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(write)
    with open(read, "rb") as names:
        return names.read()


def _serve(control: socket.socket, children: set[int], walls: Walls, memory_bytes: int) -> None:
    while True:
        command, descriptors, _, _ = socket.recv_fds(control, _MAX_COMMAND_BYTES, 1)
        if not command:
            return
        _reap(children)
        if command[:1] == FORK:
            with socket.socket(fileno=descriptors[0]) as job:
                pid = os.fork()
                if pid == 0:
                    _become_child(job, walls, memory_bytes)
            children.add(pid)
            control.send(PID.pack(pid))
        elif (pid := PID.unpack(command[1:])[0]) in children:  # not reaped, so nobody else has its number
            os.kill(pid, signal.SIGKILL)


def _reap(children: set[int]) -> None:
    """Forgets children that have ended."""
    for pid in list(children):
        if os.waitpid(pid, os.WNOHANG)[0]:
            children.discard(pid)


def _become_child(job: socket.socket, walls: Walls, memory_bytes: int) -> None:
    """Does jobs within limits, then ends the process. Never returns."""
    code = 1
    try:
        _limit(memory_bytes)
        walls.enter()
        libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # now: the walls take back what was asked
        child_jobs.serve(job)
        code = 0
    finally:
        os._exit(code)  # nothing of the server's may run here


def _limit(memory_bytes: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.close(null)
    most = _address_space_bytes() + memory_bytes
    for kind, limit in (
        (resource.RLIMIT_AS, most),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, _MAX_OPEN_FILES),
    ):
        resource.setrlimit(kind, (limit, limit))


def _address_space_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()
