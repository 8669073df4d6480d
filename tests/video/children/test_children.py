"""Media children: the same results as in this process, within limits, and a lost one costs its file alone.

Modules: `video/children/process.py`, `video/children/server.py`,
`video/children/stream.py`, `video/children/wire.py`.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from epd import video
from epd.errors import (
    CancelledError,
    CorruptMediaError,
    MediaError,
    MediaLimitError,
    UnavailableError,
    UnsupportedMediaError,
)
from epd.video import ChildLimits, ChildStream, MediaChildren, OpenFile, open_file
from epd.video.children import wire as child_wire
from epd.video.children.process import Child
from epd.video.children.wire import Header
from tests.video.conftest import Clip
from tests.video.corpus import corpus
from tests.video.pictures import CLEAR, Part, gif
from tests.video.recipes import GOP15, Recipe, make

SIZES = (4, 4, 4)
# Of what is to succeed: a busy machine lets children wait.
AMPLE = ChildLimits(look_s=600.0, image_s=600.0, audio_s=600.0, group_s=600.0, patience_s=600.0)


@pytest.fixture(scope="module")
def children() -> Iterator[MediaChildren]:
    with_secrets = {"EPD_API_KEY": "secret", "RAY_AUTH_TOKEN": "secret"}
    os.environ.update(with_secrets)
    children = MediaChildren(replace(AMPLE, max_children=2))
    children.server.start()
    for name in with_secrets:
        del os.environ[name]
    yield children
    children.close()


def opened(path: Path) -> OpenFile:
    return open_file(path, "it")


def stream_of(children: MediaChildren, path: Path) -> ChildStream:
    """Twelve frames in their own size, which needs no torch."""
    info = video.probe(path)
    times = [(number + 0.5) * info.duration_s / 12 for number in range(12)]
    return ChildStream(children, opened(path), "it", times, (info.height, info.width), SIZES)


def pids(children: MediaChildren) -> set[int]:
    return {child.pid for child in children._idle}


def test_looks_and_images_are_the_same(children: MediaChildren, clip: Clip, tmp_path: Path) -> None:
    path = clip("rotated_90.mp4")
    with opened(path) as file:
        assert children.look(file, "it") == video.look(path)
    pixels = np.random.default_rng(1).integers(0, 256, (40, 60, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "x.png")
    with opened(tmp_path / "x.png") as file:
        assert children.look(file, "it") == video.look(tmp_path / "x.png")
        assert np.array_equal(children.load_image(file, "it"), pixels)


def test_animated_pictures_on_the_background_of_the_children(tmp_path: Path) -> None:
    clear, red = (np.full((12, 16, 4), colour, np.uint8) for colour in ((9, 9, 9, 0), (255, 0, 0, 255)))
    path = tmp_path / "x.gif"
    path.write_bytes(gif((16, 12), [Part(clear), Part(red, disposal=CLEAR), Part(clear)]))
    children = MediaChildren(AMPLE, decodes_video=True, background=(1, 2, 3))
    try:
        with opened(path) as file:
            assert children.look(file, "it") == video.look(path)
            assert (children.load_image(file, "it") == [1, 2, 3]).all()
        frames = ChildStream(children, opened(path), "it", [0.05, 0.15, 0.25], (12, 16), [3]).read()
        assert [tuple(frame[0, 0]) for frame in frames.data] == [(1, 2, 3), (255, 0, 0), (1, 2, 3)]
    finally:
        children.close()


def test_streams_are_the_same_and_change_children(children: MediaChildren, clip: Clip) -> None:
    """Three streams are read in turn with two children, each the frames that this process decodes."""
    paths = [clip(name) for name in ("h264_b.mp4", "vp9.webm", "h264.ts")]
    streams = [stream_of(children, path) for path in paths]
    groups = [[stream.read() for stream in streams] for _ in SIZES]
    assert children.num_children <= 2
    for place, path in enumerate(paths):
        info = video.probe(path)
        times = [(number + 0.5) * info.duration_s / 12 for number in range(12)]
        expected = video.decode(path, times)
        assert np.array_equal(np.concatenate([row[place].data for row in groups]), expected.data)
        assert np.array_equal(np.concatenate([row[place].pts_s for row in groups]), expected.pts_s)
        streams[place].close()
    assert children.num_children <= 2


def test_the_damaged_corpus_costs_no_child(children: MediaChildren, clip: Clip, tmp_path: Path) -> None:
    lost = children.num_lost
    for variant in corpus({"video.mp4": clip("h264_b.mp4")}, per_damage=2):
        (tmp_path / "x").write_bytes(variant.data)
        with opened(tmp_path / "x") as file:
            message = error_of(children, file)
        assert str(tmp_path) not in message, variant.name
        assert "/proc" not in message, variant.name
    assert children.num_lost == lost


def held_by(pid: int) -> list[str]:
    """What the descriptors of a process stand for."""
    found: list[str] = []
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            found.append(os.readlink(each))
    return found


def has_closed_its_job(pid: int) -> bool:
    """A child that answered closes the file of its job: then it holds what all children hold."""
    return {name.partition(":")[0] for name in held_by(pid)} <= {"socket", "/dev/null", "/memfd"}


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.02)


def error_of(children: MediaChildren, file: OpenFile) -> str:
    try:
        children.look(file, "it")
    except MediaError as error:
        return str(error)
    return ""


def test_a_child_knows_no_secret_and_holds_nothing_of_ours(children: MediaChildren, clip: Clip) -> None:
    with opened(clip("h264_b.mp4")) as file:
        children.look(file, "it")
    for pid in pids(children):
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        assert not [word for word in (b"secret", b"EPD", b"RAY") if word in environment]
        wait_until(partial(has_closed_its_job, pid))
        sockets = [name for name in held_by(pid) if name.startswith("socket:")]
        assert len(sockets) == 1  # the one of its jobs
        limits = Path(f"/proc/{pid}/limits").read_text()
        assert "unlimited" not in next(line for line in limits.splitlines() if "address space" in line)


def may_leave_network() -> bool:
    code = "import ctypes, sys; c = ctypes.CDLL(None); sys.exit(all(map(c.unshare, (1 << 30, 5 << 28))))"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_child_reaches_no_network(children: MediaChildren, clip: Clip) -> None:
    if not may_leave_network():
        pytest.skip("this kernel gives no network namespaces to this user")
    with opened(clip("h264_b.mp4")) as file:
        children.look(file, "it")
    ours = os.readlink("/proc/self/ns/net")
    assert pids(children)
    assert all(os.readlink(f"/proc/{pid}/ns/net") != ours for pid in pids(children))


def test_a_killed_child_costs_nothing(children: MediaChildren, clip: Clip) -> None:
    """Two streams are at work; what the one had read goes on in another child."""
    stream, other = stream_of(children, clip("h264_b.mp4")), stream_of(children, clip("vp9.webm"))
    stream.read()
    other.read()
    os.kill(children._parked[stream].pid, signal.SIGKILL)
    assert [len(each.read()) for each in (stream, other, stream, other)] == [4, 4, 4, 4]
    stream.close()
    other.close()


def test_a_file_that_kills_its_readers_costs_itself_alone(
    children: MediaChildren, clip: Clip, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is sent the poisoned file is killed."""
    send, deaths = child_wire.send, []

    def deadly(
        sock: socket.socket, header: Header, payload: bytes = b"", descriptor: int | None = None
    ) -> None:
        if header.get("name") == "poison":
            (child,) = [each for each in taken if each.socket is sock]
            deaths.append(child.pid)
            os.kill(child.pid, signal.SIGKILL)
            wait_until(lambda: not is_alive(child.pid))
        send(sock, header, descriptor=descriptor)

    taken: list[Child] = []
    take = children.take
    monkeypatch.setattr(children, "take", lambda: taken.append(take()) or taken[-1])
    monkeypatch.setattr("epd.video.children.children.send", deadly)
    with opened(clip("h264_b.mp4")) as file:
        with pytest.raises(CorruptMediaError, match="poison crashed the process that read it"):
            children.look(file, "poison")
        assert len(deaths) == 2
        assert children.look(file, "it").kind == "video"


def test_more_memory_than_allowed() -> None:
    """A picture of 60 megapixels in children that may take 100 MB."""
    children = MediaChildren(replace(AMPLE, memory_bytes=100 << 20))
    try:
        with memory_file(60) as file, pytest.raises(MediaLimitError, match="needs more memory"):
            children.load_image(file, "it")
        with memory_file(1) as file:
            assert children.load_image(file, "it").shape == (1000, 1000, 3)
    finally:
        children.close()


def test_a_video_that_needs_more_memory(tmp_path: Path, clip: Clip) -> None:
    """FFmpeg runs out of memory: an error of the file, and the next one is read."""
    large = make(
        Recipe("large.mp4", options=GOP15, num_frames=20, width=1280, height=720), tmp_path / "x.mp4"
    )
    children = MediaChildren(replace(AMPLE, memory_bytes=30 << 20, group_s=20))
    try:
        with closing(stream_of(children, large)) as stream, pytest.raises(MediaError):
            all_groups(stream)
        with opened(clip("h264_b.mp4")) as file:
            assert children.look(file, "it").kind == "video"
    finally:
        children.close()


def test_a_child_that_read_a_broken_file_reads_no_other(
    children: MediaChildren, clip: Clip, tmp_path: Path
) -> None:
    with opened(clip("h264_b.mp4")) as file:
        children.look(file, "it")
    (pid,) = before = pids(children)
    (tmp_path / "x.txt").write_text("not a video")
    with opened(tmp_path / "x.txt") as file, pytest.raises(UnsupportedMediaError):
        children.look(file, "it")
    assert pids(children) == before
    (tmp_path / "x.mp4").write_bytes(clip("h264_b.mp4").read_bytes()[:2000])
    with opened(tmp_path / "x.mp4") as file, pytest.raises(CorruptMediaError):
        children.look(file, "it")
    assert pid not in pids(children)


def all_groups(stream: ChildStream) -> int:
    return sum(len(stream.read()) for _ in SIZES)


def test_nothing_is_left_of_a_parent_that_is_killed(tmp_path: Path) -> None:
    script = (
        "import sys, time; from epd.video import MediaChildren; children = MediaChildren(); "
        "child = children.take(); print(child.pid, children.server._process.pid, flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        left = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(left) == 2
        parent.kill()
    wait_until(lambda: not any(is_alive(pid) for pid in left))


def memory_file(num_megapixels: int) -> OpenFile:
    descriptor = os.memfd_create("image")
    with os.fdopen(os.dup(descriptor), "wb") as file:
        Image.new("RGB", (1000 * num_megapixels, 1000)).save(file, "PNG", compress_level=1)
    return OpenFile(descriptor)


def test_no_answer_in_time(clip: Clip) -> None:
    """A child that is stopped answers nothing: it is killed, and the next file is read.

    Only the stopped child has little time: a busy machine may need more for what is to succeed.
    """
    children = MediaChildren(AMPLE)
    try:
        with opened(clip("h264_b.mp4")) as file:
            facts = children.look(file, "it")
            (pid,) = pids(children)
            os.kill(pid, signal.SIGSTOP)
            children.limits = replace(AMPLE, look_s=0.5)
            began = time.monotonic()
            with pytest.raises(MediaLimitError, match=r"more than 0\.5 s"):
                children.look(file, "it")
            assert 0.5 <= time.monotonic() - began < AMPLE.look_s / 2
            children.limits = AMPLE
            assert children.look(file, "it") == facts
            assert pid not in pids(children)
    finally:
        children.close()


def test_closing_ends_a_read_that_waits(children: MediaChildren, clip: Clip) -> None:
    stream = stream_of(children, clip("h264_b.mp4"))
    stream.read()
    os.kill(children._parked[stream].pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(stream.read)
        time.sleep(0.2)
        stream.close()
        # Not for the child, which is stopped, until it has had its time for a group: that is another error.
        assert isinstance(reading.exception(), CancelledError)


def test_nobody_waits_for_ever_for_a_child(clip: Clip) -> None:
    children = MediaChildren(replace(AMPLE, max_children=1))
    ample = children.limits
    try:
        child = children.take()
        with opened(clip("h264_b.mp4")) as file:
            children.limits = replace(ample, patience_s=0.3)
            with pytest.raises(UnavailableError, match="busy"):
                children.look(file, "it")
            children.limits = ample
            threading.Timer(0.1, children.give_back, [child]).start()
            assert children.look(file, "it").kind == "video"
    finally:
        children.close()


def test_a_lost_server_is_started_again_and_takes_its_children_along(clip: Clip) -> None:
    children = MediaChildren(replace(AMPLE, max_jobs=2))
    try:
        with opened(clip("h264_b.mp4")) as file:
            children.look(file, "it")
            (pid,) = pids(children)
            assert children.server._process is not None
            children.server._process.kill()
            wait_until(lambda: not is_alive(pid))
            assert children.look(file, "it").kind == "video"
            first = pids(children)
            children.look(file, "it")  # its second job is its last
            children.look(file, "it")
            assert pids(children) != first
    finally:
        left = pids(children)
        children.close()
    wait_until(lambda: not any(is_alive(pid) for pid in left))


def is_alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
