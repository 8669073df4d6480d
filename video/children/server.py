"""Forks media children, which do one job after another, each on a file that came with it.

    parent  --control socket (stdin): F + job socket, K + pid-->  server  --fork-->  children
            <--R + names of walls, then pids--                    job sockets: parent <--> child, job by job

Forking takes milliseconds where starting Python takes seconds. The server imports what children need, and
never reads media itself. It ends, with all its children, when the parent closes the control socket.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from epd.colour import Colour
from epd.errors import EPDError
from epd.types import UInt8Array
from epd.video.children.walls import Walls, libc
from epd.video.children.wire import (
    FORK,
    MAX_HEADER_BYTES,
    PID,
    READY,
    ChildGoneError,
    Header,
    mapped,
    receive,
    send,
)
from epd.video.containers.audio import AudioSlice, load_audio
from epd.video.containers.images import load_image
from epd.video.containers.look import look
from epd.video.decoding.device import VideoDevice
from epd.video.decoding.pixels import exact_resize
from epd.video.decoding.pool import num_decode_threads
from epd.video.decoding.stream import GroupStream, stream
from epd.video.sources.source import FileDescriptor, Media

_PR_SET_PDEATHSIG = 1
_MAX_OPEN_FILES = 64
# Long enough for any command, which is a byte and a pid.
_MAX_COMMAND_BYTES = 16


def main(memory_bytes: int, *, decodes_video: bool, opens_gpu: bool) -> None:
    """Forks children until stdin, a SOCK_SEQPACKET socket, is closed.

    memory_bytes: that a child may add. opens_gpu: whether it may reach one, and is less walled for that.
    """
    prepare(decodes_video=decodes_video)
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=0)
    children: set[int] = set()
    walls = Walls(opens_gpu=opens_gpu)
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
        _limit(None if walls.opens_gpu else memory_bytes)
        walls.enter()
        libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # now: the walls take back what was asked
        do_jobs(job)
        code = 0
    finally:
        os._exit(code)  # nothing of the server's may run here


def _limit(memory_bytes: int | None) -> None:
    """Limits memory and files; None: neither, as CUDA takes far more addresses and files than it uses."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.close(null)
    limits = {resource.RLIMIT_CORE: 0}
    if memory_bytes is not None:
        limits[resource.RLIMIT_AS] = _address_space_bytes() + memory_bytes
        limits |= {resource.RLIMIT_FSIZE: 0, resource.RLIMIT_NOFILE: _MAX_OPEN_FILES}
    for kind, limit in limits.items():
        resource.setrlimit(kind, (limit, limit))


def _address_space_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


# The memory that frames are left in for the parent, from the process's first group on.
_pixels: list[UInt8Array] = []


def prepare(*, decodes_video: bool) -> None:
    """Imports what jobs need, and looks up what they may not, before there are children."""
    num_decode_threads()
    Image.init()
    if decodes_video:
        exact_resize(np.zeros((8, 8, 3), np.uint8), (4, 4))


def do_jobs(job: socket.socket) -> None:
    """Does jobs until the parent closes the socket."""
    with suppress(ChildGoneError):
        while True:
            header, _, descriptor = receive(job, MAX_HEADER_BYTES, 0)
            if descriptor is not None:  # an answer to a stream that has ended in an error has none
                try:
                    _do(job, header, descriptor)
                finally:
                    os.close(descriptor)


def _do(job: socket.socket, header: Header, descriptor: int) -> None:
    _allow_cpu(float(header["cpu_s"]))
    try:
        media = Media(FileDescriptor(descriptor), str(header["name"]))
        _JOBS[header["job"]](job, media, header)
    except ChildGoneError:
        raise
    except EPDError as error:
        send(job, {"error": type(error).__name__, "message": str(error)})
    except MemoryError:
        send(job, {"error": "MemoryError", "message": ""})
    except Exception as error:  # noqa: BLE001 - the process boundary: whatever a file makes a reader raise
        send(job, {"error": "bug", "message": f"{type(error).__name__}: {error}"[:500]})


def _allow_cpu(seconds: float) -> None:
    """Allows `seconds` more of CPU time, then a signal ends the process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(usage.ru_utime + usage.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))


def _look(job: socket.socket, media: Media, header: Header) -> None:
    send(job, asdict(look(media, as_audio=bool(header.get("as_audio")))))


def _image(job: socket.socket, media: Media, header: Header) -> None:
    pixels = load_image(media, background=_background(header))
    send(job, {"shape": pixels.shape}, memoryview(np.ascontiguousarray(pixels).tobytes()))


def _background(header: Header) -> Colour:
    red, green, blue = header["background"]
    return red, green, blue


def _audio(job: socket.socket, media: Media, header: Header) -> None:
    samples = load_audio(media, AudioSlice(**header["part"]))
    send(job, {"num_samples": len(samples)}, memoryview(samples.tobytes()))


def _stream(job: socket.socket, media: Media, header: Header) -> None:
    height, width = header["size"]
    with stream(
        media,
        header["times_s"],
        (height, width),
        group_sizes=header["group_sizes"],
        background=_background(header),
        device=_device(header["device"]),
    ) as groups:
        send(job, {"opened": True})
        while _is_asked_on(job):
            _send_group(job, groups)
        send(job, {"ended": True})


@cache
def _device(name: str | None) -> VideoDevice | None:
    """Returns the GPU of this process, which leaves nothing to the CPU: other children have more walls."""
    return None if name is None else VideoDevice(name, is_alone=True)


def _is_asked_on(job: socket.socket) -> bool:
    """Returns whether another group is wanted; a larger block for its pixels may come along."""
    header, _, descriptor = receive(job, MAX_HEADER_BYTES, 0)
    if descriptor is not None:
        _pixels[:] = [mapped(descriptor)]
        os.close(descriptor)
    return bool(header.get("next"))


def _send_group(job: socket.socket, groups: GroupStream) -> None:
    frames = next(groups).frames
    _pixels[0][: frames.data.nbytes].reshape(frames.data.shape)[...] = frames.data
    substituted = frames.substituted_times_s
    send(job, {"pts_s": frames.pts_s.tolist(), "substituted_times_s": substituted})


_JOBS: dict[Any, Callable[[socket.socket, Media, Header], None]] = {
    "look": _look,
    "image": _image,
    "audio": _audio,
    "stream": _stream,
}
