"""Forks media servers for tests from one process that has imported what they need: that takes 3 CPU seconds.

tests  --code and a control socket-->  this process  --fork-->  a media server, which runs the code
       --the pid of one to wait for-->
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

_BOOT = "import sys; sys.path[:] = {path!r}; from tests.media_servers import main; main()"
_PID = struct.Struct("<i")
_MAX_CODE_BYTES = 1 << 16
_lock = threading.Lock()
_started: list[subprocess.Popen[bytes]] = []


def install(process: ModuleType) -> None:
    """Lets `epd.video.children.process` fork its servers, which have the environment that it gives them."""
    known = {"Popen": ForkedServer, "DEVNULL": subprocess.DEVNULL}
    process.subprocess = SimpleNamespace(**known)  # type: ignore[attr-defined]


class ForkedServer:
    """Stands for the `Popen` of a media server."""

    def __init__(self, command: list[str], *, stdin: int, **options: Any) -> None:
        *python, code = command
        with _lock:
            self._control = _forking(tuple(python), tuple(options.pop("env").items()), tuple(options.items()))
            socket.send_fds(self._control, [code.encode()], [stdin])
            self.pid: int = _PID.unpack(self._control.recv(_PID.size))[0]

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        with _lock:
            self._control.send(_PID.pack(self.pid))
            self._control.recv(_PID.size)


@cache
def _forking(
    python: tuple[str, ...], environment: tuple[tuple[str, str], ...], options: tuple[tuple[str, Any], ...]
) -> socket.socket:
    """Starts the process that forks, and returns the socket to tell it by; it ends with this process."""
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    boot = _BOOT.format(path=[os.path.abspath(each) for each in sys.path if each])
    with theirs:
        own = {"stdin": theirs.fileno(), "env": dict(environment)}
        _started.append(subprocess.Popen([*python, boot], **dict(options), **own))
    return control


def main() -> None:
    """Forks and waits as it is told, until stdin is closed."""
    from epd.video.children.server import prepare

    prepare(decodes_video=True)
    control = socket.socket(fileno=0)
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, _MAX_CODE_BYTES, 1)
        if descriptors:
            control.send(_PID.pack(_forked(message.decode(), descriptors[0])))
        elif message:
            os.waitpid(_PID.unpack(message)[0], 0)
            control.send(message)
        else:
            return


def _forked(code: str, stdin: int) -> int:
    """Returns the pid of a process in a session of its own that runs code with this stdin."""
    pid = os.fork()
    if pid:
        os.close(stdin)
        return pid
    try:
        os.dup2(stdin, 0)
        os.close(stdin)
        os.setsid()
        exec(code, {})
    finally:
        os._exit(0)
