"""Holds the parent's side of media children: the server that forks them, and each child."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
from dataclasses import dataclass

from epd.errors import UnavailableError
from epd.video.children.wire import FORK, KILL, PID, READY, SharedPixels

START_S = 60.0
_FORK_S = 10.0
_MAX_READY_BYTES = 256
_BOOT = (
    "import sys; sys.path[:] = {path!r}; "
    "from epd.video.children.server import main; main({memory}, decodes_video={video}, opens_gpu={gpu})"
)
# All that children find in their environment: no key, no token.
_ENVIRONMENT = {
    "PATH": os.defpath,
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",
}
# What those that open a GPU find besides, if it says anything: Ray empties the first for workers without one.
_OF_GPUS = ("CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY", "LD_LIBRARY_PATH")


@dataclass(slots=True, eq=False)
class Child:
    """One child.

    socket: carries its jobs.
    owes_end: whether a stream was ended and its last answer is still to be read.
    is_sound: whether it can be given another job.
    """

    server: ChildServer
    pid: int
    socket: socket.socket
    num_jobs: int = 0
    owes_end: bool = False
    is_sound: bool = True
    is_killed: bool = False
    _pixels: SharedPixels | None = None

    def kill(self) -> None:
        """Ends it whatever it does, and so any call that waits for it. From any thread."""
        self.is_killed, self.is_sound = True, False
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.server.kill(self.pid)

    def pixels_for(self, num_bytes: int) -> tuple[SharedPixels, int | None]:
        """Returns memory for `num_bytes`, and its descriptor where the child does not know it yet."""
        if self._pixels is not None and self._pixels.num_bytes >= num_bytes:
            return self._pixels, None
        if self._pixels is not None:
            self._pixels.close()
        self._pixels = SharedPixels(num_bytes)
        return self._pixels, self._pixels.descriptor

    def close(self) -> None:
        """Lets it end by itself; nobody may be waiting for it."""
        self.socket.close()
        if self._pixels is not None:
            self._pixels.close()
            self._pixels = None


class ChildServer:
    """Starts `epd.video.children.server` when first needed, and again if it is gone. For any thread.

    walls: around each child, see `epd.video.children.walls`; none before it has started
    """

    def __init__(self, memory_bytes: int, *, decodes_video: bool, opens_gpu: bool = False) -> None:
        self._memory_bytes = memory_bytes
        self._decodes_video, self._opens_gpu = decodes_video, opens_gpu
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self.walls: frozenset[str] = frozenset()

    def fork(self) -> Child:
        """Returns a new child. Raises UnavailableError."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            try:
                return Child(self, self._fork(theirs), ours)
            except (OSError, struct.error):
                self._stop()  # it is gone: a new one is tried once
            try:
                return Child(self, self._fork(theirs), ours)
            except (OSError, struct.error) as error:
                ours.close()
                self._stop()
                raise UnavailableError(f"no media process can be started ({error}); retry later") from error

    def _fork(self, job: socket.socket) -> int:
        control = self._control or self._start()
        control.settimeout(_FORK_S)
        socket.send_fds(control, [FORK], [job.fileno()])
        pid: int = PID.unpack(control.recv(PID.size))[0]
        return pid

    def _start(self) -> socket.socket:
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = [os.path.abspath(each) for each in sys.path if each]
        boot = _BOOT.format(
            path=path, memory=self._memory_bytes, video=self._decodes_video, gpu=self._opens_gpu
        )
        of_gpus = {name: os.environ[name] for name in _OF_GPUS if self._opens_gpu and os.environ.get(name)}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", boot],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env=_ENVIRONMENT | of_gpus,
                start_new_session=True,
            )
        self._control = control
        control.settimeout(START_S)
        ready = control.recv(_MAX_READY_BYTES)
        if not ready.startswith(READY):
            raise OSError("the media server has ended at its start")
        self.walls = frozenset(filter(None, ready[len(READY) :].decode().split(",")))
        return control

    def kill(self, pid: int) -> None:
        with self._lock, contextlib.suppress(OSError):
            if self._control is not None:
                self._control.send(KILL + PID.pack(pid))

    def start(self) -> None:
        """Starts the server now, so that the first child need not wait for it. Raises UnavailableError."""
        self.fork().close()

    def close(self) -> None:
        """Ends the server and all its children."""
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._control = self._process = None
