"""Reads media in child processes with limits: a file that kills its reader harms only itself.

    look, an image, sound, a stream  ->  an idle child  |  a new one  |  that of the stream read longest ago
    no answer in time: the child is killed, MediaError; it died: one retry in another child, then MediaError

Children have no secret in their environment, open no socket and know no path: files come as descriptors.
What they send is checked here; see `epd.video.children.wire`.
"""

from __future__ import annotations

import atexit
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np

from epd.colour import WHITE, Colour
from epd.errors import (
    CancelledError,
    CorruptMediaError,
    EPDError,
    MediaError,
    MediaForbiddenError,
    MediaLimitError,
    MediaNotFoundError,
    RequestError,
    UnavailableError,
    UnsupportedMediaError,
)
from epd.types import Float32Array, MediaFacts, MediaKind, UInt8Array
from epd.video.children.process import Child, ChildServer
from epd.video.children.wire import MAX_REPLY_HEADER_BYTES, ChildGoneError, Header, receive, send
from epd.video.containers.audio import AudioSlice
from epd.video.containers.images import MAX_IMAGE_PIXELS
from epd.video.decoding.device import MAX_FAILURES, DeviceFailedError
from epd.video.sources.local_files import OpenFile

_T = TypeVar("_T")
logger = logging.getLogger(__name__)
_KINDS: Mapping[str, MediaKind] = {"image": "image", "video": "video", "audio": "audio"}
_END_S = 5.0  # how long a child may take to end a stream
_ERRORS: Mapping[str, type[EPDError]] = {
    error.__name__: error
    for error in (
        CorruptMediaError,
        DeviceFailedError,
        MediaForbiddenError,
        MediaLimitError,
        MediaNotFoundError,
        RequestError,
        UnsupportedMediaError,
    )
}


class ChildDiedError(CorruptMediaError):
    """A child ended while it read a file, which need not be the file's fault."""


def attempted_twice(read: Callable[[], _T]) -> _T:
    """Reads again if a child died, as the system may have ended it. Raises CorruptMediaError after two."""
    try:
        return read()
    except ChildDiedError:
        logger.info("reading again, in another media process")
    try:
        return read()
    except ChildDiedError as error:
        raise CorruptMediaError(str(error)) from error


@dataclass(frozen=True, slots=True)
class ChildLimits:
    """Limits what children may take.

    memory_bytes: address space beyond what a child begins with.
    max_children: children at once.
    max_jobs: jobs of one child before it is replaced.
    look_s, image_s, audio_s, group_s: wall time of one answer, for `group_s` that of a group of frames.
    stream_cpu_s: CPU time of a stream.
    patience_s: how long a caller waits for a free child.
    """

    memory_bytes: int = 1280 << 20
    max_children: int = 8
    max_jobs: int = 256
    look_s: float = 20.0
    image_s: float = 30.0
    audio_s: float = 60.0
    group_s: float = 90.0
    stream_cpu_s: float = 3600.0
    patience_s: float = 30.0


class DeviceFailures:
    """Counts what children with a device could not read, and others must."""

    def __init__(self, device: str | None) -> None:
        self._device = device
        self._num_in_a_row = 0
        self._has_said = False

    @property
    def are_too_many(self) -> bool:
        """Whether the device has failed so often that others should decode."""
        return self._num_in_a_row >= MAX_FAILURES

    def note(self, failure: EPDError | None) -> None:
        """Notes that others must read on, which is said once; None: that a group was read."""
        if failure is not None and not self._has_said:
            self._has_said = True
            is_clear = isinstance(failure, DeviceFailedError | UnsupportedMediaError)  # and names no file
            why = str(failure) if is_clear else type(failure).__name__
            logger.warning("the CPU decodes a video in place of %s: %s", self._device, why)
        is_of_file = isinstance(failure, MediaError) and not isinstance(failure, ChildDiedError)
        self._num_in_a_row = 0 if failure is None else self._num_in_a_row + (not is_of_file)


class MediaChildren:
    """Children of one server process, each doing one job at a time. For any thread; callers wait."""

    def __init__(
        self,
        limits: ChildLimits | None = None,
        *,
        decodes_video: bool = False,
        background: Colour = WHITE,
        device: str | None = None,
    ) -> None:
        """Starts nothing yet.

        decodes_video: whether streams will be opened.
        background: what shows through the transparency of pictures.
        device: that decodes videos, as torch names it: see `ChildStream`.
        """
        self.background, self.device = background, device
        self.failures = DeviceFailures(device)
        self.limits = limits or ChildLimits()
        self.server = ChildServer(
            self.limits.memory_bytes, decodes_video=decodes_video, opens_gpu=device is not None
        )
        self.num_lost = 0
        self._changed = threading.Condition()
        self._idle: list[Child] = []
        self._parked: OrderedDict[Hashable, Child] = OrderedDict()  # of streams that nobody reads now
        self.num_children = 0
        atexit.register(self.close)

    # Jobs

    def look(self, file: OpenFile, name: str, *, as_audio: bool = False) -> MediaFacts:
        """Works like `video.look`. name: what messages call the file. Raises MediaError, UnavailableError."""
        return _facts(self._ask("look", file, name, self.limits.look_s, as_audio=as_audio)[0])

    def load_image(self, file: OpenFile, name: str) -> UInt8Array:
        """Does what `video.load_image` does. Raises as `look`."""
        most = 3 * MAX_IMAGE_PIXELS
        header, payload = self._ask(
            "image", file, name, self.limits.image_s, most, background=self.background
        )
        return _pixels(header, payload)

    def load_audio(self, file: OpenFile, name: str, part: AudioSlice) -> Float32Array:
        """Does what `video.load_audio` does. Raises as `look`, and RequestError."""
        most = 4 * part.max_samples
        header, payload = self._ask("audio", file, name, self.limits.audio_s, most, part=asdict(part))
        return _samples(header, payload)

    def _ask(
        self, job: str, file: OpenFile, name: str, seconds: float, max_bytes: int = 0, **more: Any
    ) -> tuple[Header, bytearray]:
        def attempt() -> tuple[Header, bytearray]:
            child = self.take()
            try:
                header = {"job": job, "name": name, "cpu_s": seconds, **more}
                return self._exchange(child, header, name, seconds, max_bytes, file.descriptor)
            finally:
                self.give_back(child)

        return attempted_twice(attempt)

    def call(self, child: Child, header: Header, name: str, seconds: float, descriptor: int | None) -> Header:
        """Returns a child's answer to a job, or to a question within one, within `seconds`.

        Raises MediaError, RequestError; CancelledError when the child was killed meanwhile.
        """
        return self._exchange(child, header, name, seconds, 0, descriptor)[0]

    def _exchange(
        self, child: Child, header: Header, name: str, seconds: float, max_bytes: int, descriptor: int | None
    ) -> tuple[Header, bytearray]:
        """Sends a job and returns the answer with its pixels, of which `max_bytes` are accepted."""
        end_s = time.monotonic() + seconds
        try:
            send(child.socket, header, descriptor=descriptor)
            reply, payload, _ = receive(child.socket, MAX_REPLY_HEADER_BYTES, max_bytes, end_s)
        except ChildGoneError as error:
            raise self._gone(child, name, seconds, is_late=time.monotonic() >= end_s) from error
        if "error" in reply:
            raise _error(child, reply, name, self.limits.memory_bytes)
        return reply, payload

    def _gone(self, child: Child, name: str, seconds: float, *, is_late: bool) -> EPDError:
        child.is_sound = False
        if child.is_killed:
            return CancelledError(f"reading {name} was stopped; ask again")
        self.num_lost += 1
        logger.warning("media process %d %s", child.pid, "gave no answer" if is_late else "ended")
        if is_late:
            return MediaLimitError(
                f"{name} took more than {seconds:g} s to read; allowed: up to that; encode it again, smaller"
            )
        return ChildDiedError(
            f"{name} crashed the process that read it; allowed: files within its limits of memory and "
            "time; encode it again, smaller"
        )

    # Children

    def take(self) -> Child:
        """Returns a child with no job. Raises UnavailableError when none is free in time."""
        while True:
            child = self._next()
            if not child.owes_end:
                return child
            child.owes_end = False
            try:
                receive(child.socket, MAX_REPLY_HEADER_BYTES, 0, time.monotonic() + _END_S)
            except ChildGoneError:
                child.is_sound = False
                self.give_back(child)
            else:
                return child

    def _next(self) -> Child:
        with self._changed:
            end_s = time.monotonic() + self.limits.patience_s
            while not self._idle and self.num_children >= self.limits.max_children:
                if self._parked:
                    _, child = self._parked.popitem(last=False)
                    return ended(child)
                if not self._changed.wait(end_s - time.monotonic()):
                    raise UnavailableError(
                        f"all {self.limits.max_children} media processes have been busy for "
                        f"{self.limits.patience_s:g} s; retry later"
                    )
            if self._idle:
                return self._idle.pop()
            self.num_children += 1
        try:
            return self.server.fork()
        except BaseException:
            self._forget()
            raise

    def give_back(self, child: Child) -> None:
        """Takes back a child whose job is done, for another job or to be replaced."""
        child.num_jobs += 1
        if not child.is_sound:
            child.kill()
        if not child.is_sound or child.num_jobs >= self.limits.max_jobs:
            child.close()
            self._forget()
            return
        with self._changed:
            self._idle.append(child)
            self._changed.notify()

    def _forget(self) -> None:
        with self._changed:
            self.num_children -= 1
            self._changed.notify()

    def park(self, stream: Hashable, child: Child) -> None:
        """Keeps the child of a stream that nobody reads now; it decodes ahead until others need it."""
        with self._changed:
            self._parked[stream] = child
            self._changed.notify()

    def unpark(self, stream: Hashable) -> Child | None:
        """Returns the child of a stream; None if it was given to others."""
        with self._changed:
            return self._parked.pop(stream, None)

    def close(self) -> None:
        """Ends all children, including those that callers wait for."""
        self.server.close()
        atexit.unregister(self.close)
        with self._changed:
            left = [*self._idle, *self._parked.values()]
            self.num_children -= len(left)
            self._idle.clear()
            self._parked.clear()
        for child in left:
            child.close()


def _error(child: Child, reply: Header, name: str, memory_bytes: int) -> EPDError:
    kind, message = str(reply["error"]), str(reply.get("message"))
    if kind in _ERRORS:
        # FFmpeg may have spoiled its memory, or have too little of it, which it calls a broken file.
        child.is_sound &= kind not in (CorruptMediaError.__name__, DeviceFailedError.__name__)
        return _ERRORS[kind](message)
    child.is_sound = False
    if kind == MemoryError.__name__:
        return MediaLimitError(
            f"{name} needs more memory to read than the {memory_bytes} bytes that are "
            "allowed; encode it again, smaller"
        )
    logger.warning("media process %d failed on a file: %s", child.pid, message)
    return CorruptMediaError(f"{name} cannot be read; allowed: intact files; encode it again")


def ended(child: Child) -> Child:
    """Asks a child to end its stream; the next to take the child reads its answer."""
    with suppress(ChildGoneError):
        send(child.socket, {})
    child.owes_end = True
    return child


def _pixels(header: Header, payload: bytearray) -> UInt8Array:
    """Returns uint8 [H, W, 3]. Raises CorruptMediaError for anything else."""
    shape = header.get("shape")
    if not isinstance(shape, list) or not all(type(each) is int and each >= 0 for each in shape):
        raise nonsense()
    if len(shape) != 3 or shape[-1] != 3 or math.prod(shape) != len(payload):
        raise nonsense()
    return np.frombuffer(payload, np.uint8).reshape(shape)


def _samples(header: Header, payload: bytearray) -> Float32Array:
    """Returns float32 [N]. Raises CorruptMediaError for anything else."""
    if not payload or len(payload) % 4 or header.get("num_samples") != len(payload) // 4:
        raise nonsense()
    samples = np.frombuffer(payload, np.float32)
    if not np.isfinite(samples).all():
        raise nonsense()
    return samples


def nonsense() -> CorruptMediaError:
    """Returns the error for an answer that no reader gives unless a file has taken it over."""
    return CorruptMediaError("the medium corrupted the process that read it; encode it again")


def _facts(header: Mapping[str, Any]) -> MediaFacts:
    try:
        kind: MediaKind = _KINDS[header["kind"]]
        height, width, num_frames = (int(header[name]) for name in ("height", "width", "num_frames"))
        is_list, num_pictures = bool(header["is_frame_list"]), int(header["num_pictures"])
        return MediaFacts(kind, height, width, num_frames, float(header["fps"]), is_list, num_pictures)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise nonsense() from error
