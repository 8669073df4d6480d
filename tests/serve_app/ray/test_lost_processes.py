"""What a client of `epd serve` sees when a process that is no worker is killed: docs/deployment.md's table.

`make soak` runs this; each row is printed. Workers are harmed in `test_faults.py`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import pytest

from epd.serve_app.network.memory import orphans
from tests.media import write_image
from tests.serve_app.cli.test_serve_command import MARK, processes_with, running
from tests.serve_app.conftest import JSON, data_url, image_part
from tests.serve_app.server import wait_until

pytestmark = pytest.mark.skipif("EPD_SOAK" not in os.environ, reason="takes minutes of both cores: make soak")

END_S, AGAIN_S = 10.0, 120.0
# Command lines of the processes that are killed. What Ray calls an actor begins with its class.
CONTROLLER, FRONT = "ray::ServeController", "ray::ServeReplica:epd:Front"
MEDIA, STAGE = "ray::ServeReplica:epd:Media", "ray::ServeReplica:epd:Stage"
BOARD = "ray::BoardActor"
GCS, RAYLET = "gcs_server", "/raylet"


@dataclass(frozen=True, slots=True)
class Row:
    """What is killed or stopped, and what comes of it.

    is_whole: whether the stream goes on
    limit_s: until a question is answered again
    is_about_image: whether that question is about an image
    """

    name: str
    how: signal.Signals
    is_whole: bool
    limit_s: float
    is_about_image: bool = False


STARTED_AGAIN = (
    Row(CONTROLLER, signal.SIGKILL, is_whole=True, limit_s=1.0),
    Row(BOARD, signal.SIGKILL, is_whole=True, limit_s=1.0),
    Row(MEDIA, signal.SIGKILL, is_whole=True, limit_s=AGAIN_S, is_about_image=True),
    Row(FRONT, signal.SIGKILL, is_whole=False, limit_s=AGAIN_S),
    Row(STAGE, signal.SIGKILL, is_whole=True, limit_s=AGAIN_S),
    Row(STAGE, signal.SIGSTOP, is_whole=True, limit_s=AGAIN_S),
)


@dataclass(slots=True)
class Stream:
    """A long answer that is being read.

    gap_s: its longest pause, and when that began; on the monotonic clock
    outcome: how it ended
    """

    num_lines: int = 0
    gap_s: tuple[float, float] = (0.0, 0.0)
    outcome: str = ""

    def read(self, url: str) -> None:
        body = chat("What is it?", stream=True, max_tokens=4000, min_tokens=4000)
        try:
            with (
                httpx.Client(trust_env=False, timeout=AGAIN_S) as client,
                client.stream("POST", f"{url}/v1/chat/completions", json=body) as response,
            ):
                line_s = time.monotonic()
                for line in response.iter_lines():
                    self.gap_s = max(self.gap_s, (time.monotonic() - line_s, line_s))
                    line_s = time.monotonic()
                    self.num_lines += line.startswith("data: ")
                    if line == "data: [DONE]" or line.startswith('data: {"error"'):
                        self.outcome = "whole" if line.endswith("[DONE]") else "an error event"
                        return
            self.outcome = "cut"
        except httpx.HTTPError as error:
            self.outcome = f"cut: {type(error).__name__}"


@dataclass(slots=True)
class Server:
    process: subprocess.Popen[bytes]
    url: str
    mark: str
    output: Path
    orphans: list[Path]

    def pid_of(self, name: str) -> int:
        found = self.pids_of(name)
        assert len(found) == 1, (name, found)
        return found[0]

    def pids_of(self, name: str) -> list[int]:
        return [
            int(path.parent.name)
            for path in Path("/proc").glob("[0-9]*/cmdline")
            if name in command_line(path).partition("\0")[0] and self.is_ours(path.parent)
        ]

    def is_back(self, name: str, lost: int) -> bool:
        """Whether another process has taken the place of a lost one."""
        pids = self.pids_of(name)
        return len(pids) == 1 and lost not in pids

    def is_ours(self, process: Path) -> bool:
        with contextlib.suppress(OSError):
            return f"{MARK}={self.mark}".encode() in (process / "environ").read_bytes().split(b"\0")
        return False

    def is_served(self, image: str | None = None) -> bool:
        """Whether a question is answered now. image: a new one that it is about, as a data URL."""
        content = [image_part(image)] if image else []
        with contextlib.suppress(httpx.HTTPError):
            reply = httpx.post(
                f"{self.url}/v1/chat/completions",
                json=chat([*content, {"type": "text", "text": "Well?"}], max_tokens=1),
                timeout=2,
                trust_env=False,
            )
            return reply.status_code == httpx.codes.OK
        return False


def command_line(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def chat(text: str | list[JSON], **options: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text}], **options}


@contextmanager
def killed(server: Server, name: str, how: signal.Signals = signal.SIGKILL) -> Iterator[Stream]:
    """A process killed or stopped while a stream is under way, which has ended when the block is left."""
    stream = Stream()
    reading = threading.Thread(target=stream.read, args=(server.url,), daemon=True)
    pid = server.pid_of(name)
    reading.start()
    wait_until(lambda: stream.num_lines > 3)
    os.kill(pid, how)
    assert not stream.outcome
    yield stream
    reading.join(AGAIN_S)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    mark, before = secrets.token_hex(8), orphans()
    with running(mark, tmp_path, "--topology", "1epd") as (process, url):
        yield Server(process, url, mark, tmp_path / "output", before)
    wait_until(lambda: processes_with(mark) == [])


def say(capsys: pytest.CaptureFixture[str], row: str) -> None:
    with capsys.disabled():
        print(f"\n{row}", end="")


def test_what_is_started_again(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One after the other in one server; at the end SIGTERM ends it as ever."""
    image = data_url(write_image(tmp_path / "image.png"), "image/png")
    wrong = []
    for row in STARTED_AGAIN:
        pid = server.pid_of(row.name)
        with killed(server, row.name, row.how) as stream:
            start_s = time.monotonic()
            time.sleep(0.2)  # until the system has let go of it
            wait_until(partial(server.is_served, image if row.is_about_image else None), AGAIN_S)
            again_s = time.monotonic() - start_s
            wait_until(partial(server.is_back, row.name, pid), AGAIN_S)
            back_s = time.monotonic() - start_s
        gap_s, began_s = stream.gap_s
        line = (
            f"{row.name} {row.how.name}: stream {stream.outcome}, its longest pause {gap_s:.1f} s from "
            f"{began_s - start_s:+.1f} s on, served again after {again_s:.1f} s, the process replaced after "
            f"{back_s:.1f} s"
        )
        say(capsys, line)
        if (stream.outcome == "whole") is not row.is_whole or again_s > row.limit_s:
            wrong.append(line)
        time.sleep(10.0)  # so that each is killed in a server that is well
        assert server.process.poll() is None
    assert not wrong
    assert set(orphans()) <= set(server.orphans)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0


@pytest.mark.parametrize(("name", "said"), [(RAYLET, "Ray's raylet has ended"), (GCS, "Ray's GCS has ended")])
def test_what_is_gone_for_good(
    server: Server, name: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with killed(server, name) as stream:
        check_ended(server, name, said, capsys)
    say(capsys, f"{name}: stream {stream.outcome}")


def test_a_controller_that_is_not_started_again(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """Ray starts a killed one again; this one is given up by a program that may."""
    raylet = Path("/proc", str(server.pid_of(RAYLET)))
    options = dict(part.partition("=")[::2] for part in (raylet / "cmdline").read_text().split("\0"))
    address = options["--gcs-address"]
    entries = (raylet / "environ").read_text().split("\0")
    code = (
        f"import ray; ray.init(address={address!r}, log_to_driver=False);"
        "ray.kill(ray.get_actor('SERVE_CONTROLLER_ACTOR', namespace='serve'), no_restart=True)"
    )
    environment = dict(entry.partition("=")[::2] for entry in entries if entry)
    environment.pop(MARK)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=False, timeout=60, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    check_ended(server, CONTROLLER, "the controller of Ray Serve has ended", capsys)


def check_ended(server: Server, name: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    start_s = time.monotonic()
    assert server.process.wait(END_S) == 3
    seconds = time.monotonic() - start_s
    wait_until(lambda: processes_with(server.mark) == [])
    assert f"error: {said}: the server cannot go on; start it again" in server.output.read_text()
    assert set(orphans()) <= set(server.orphans)
    say(capsys, f"{name} for good: epd serve ended after {seconds:.1f} s with code 3")
