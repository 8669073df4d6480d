"""Serves as a media child: does one job after another from its socket, each on a file that came with it."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import numpy as np

from epd.colour import Colour
from epd.errors import EPDError
from epd.types import UInt8Array
from epd.video.children.shared_pixels import mapped
from epd.video.children.wire import MAX_HEADER_BYTES, ChildGoneError, Header, receive, send
from epd.video.containers.audio import AudioSlice, load_audio
from epd.video.containers.images import load_image
from epd.video.containers.look import look
from epd.video.decoding.pixels import exact_resize
from epd.video.decoding.stream import GroupStream, stream
from epd.video.sources.source import Media

# The memory that frames are left in for the parent, from the process's first group on.
_pixels: list[UInt8Array] = []


def prepare(*, decodes_video: bool) -> None:
    """Imports what jobs need, before there are children."""
    if decodes_video:
        exact_resize(np.zeros((8, 8, 3), np.uint8), (4, 4))


def serve(job: socket.socket) -> None:
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
        media = Media(f"/proc/self/fd/{descriptor}", str(header["name"]))
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
    ) as groups:
        send(job, {"opened": True})
        while _is_asked_on(job):
            _send_group(job, groups)
        send(job, {"ended": True})


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
