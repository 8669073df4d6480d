"""`epd serve`: what it refuses, and as a process that it answers, and that it leaves nothing behind.

One server on Ray answers the README's examples as they are written, and then drains.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from typer.testing import CliRunner

from epd.serve_app.cli.program import app
from epd.shapes import make_scene
from epd.video.demo_video import write_demo_video
from tests import ROOT
from tests.hostile_packages import write_hostile_packages
from tests.ports import free_port
from tests.serve_app.server import wait_until

# A server on Ray takes a minute of CPU to start.
pytestmark = pytest.mark.timeout(1800)

# Inherited by every process that the command starts.
MARK = "EPD_TEST_MARK"
READY_S, END_S = 900.0, 300.0
START = "from epd.serve_app.cli.program import main; main()"
SCENE, README = make_scene(3, 30.0), ROOT / "README.md"
WITHOUT_RAY = f"import sys; sys.modules['ray'] = None; {START}"  # any import of it raises ImportError


def command(*options: str, start: str = START) -> list[str]:
    """As the installed program is run: what is imported does not depend on the folder it is started in."""
    return [sys.executable, "-P", "-c", start, "serve", *options]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--topology", "1e1p"], "no worker does decode"),
        (["--topology", "two"], "write one such as '2e1p1d'"),
        (["no/such/model"], "no model folder at"),
        (["--dtype", "int3"], "--dtype: received the dtype 'int3'; allowed: auto, bfloat16"),
        (["--device", "gpu"], "--device: received the device 'gpu'; allowed: auto, cpu, cuda"),
        (["--skip-static", "-0.1"], "--skip-static: received a skip_static of -0.1; allowed: 0 or more"),
    ],
)
def test_what_cannot_be_served_is_told_at_once(options: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["serve", *options])
    assert done.exit_code == 2
    assert said in done.stderr
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1


def test_a_port_that_is_taken_is_told_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            command("--port", port), capture_output=True, text=True, timeout=200, check=False
        )
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: cannot listen on 127.0.0.1:{port}: ")


def test_it_serves_from_one_process_without_ray(tmp_path: Path) -> None:
    """What a laptop user meets first: a question about a video, then Ctrl-C."""
    clip, spool = tmp_path / "clip.mp4", tmp_path / "tmp"
    write_demo_video(clip, SCENE, fps=8, height=180, width=320)
    spool.mkdir()
    mark, question = secrets.token_hex(8), "Which shape appears first?"
    options = ("--local", "--topology", "1e1p1d", "--allowed-media-path", str(tmp_path), "--verbose")
    with running(mark, tmp_path, *options, start=WITHOUT_RAY, TMPDIR=str(spool)) as (process, url):
        with httpx.Client(trust_env=False, timeout=200) as http:
            client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http)
            video: Any = {"type": "video_url", "video_url": {"url": clip.as_uri()}}
            message: Any = {"role": "user", "content": [video, {"type": "text", "text": question}]}
            reply = client.chat.completions.create(model="shapes-vl-2", messages=[message], logprobs=True)
            status = http.get(f"{url}/v1/epd/status").json()
        process.send_signal(signal.SIGINT)
        assert process.wait(END_S) == 0
    assert status["topology"] == "1e1p1d"
    output = (tmp_path / "output").read_text()
    told = f"starts: model shapes-vl-2 (qwen3_vl), dtype auto, device auto, topology 1e1p1d, at {url}"
    steps = [told, "loading the model", "limits of one request: ", "d0 has weights", "ready in", "draining"]
    places = [output.index(step) for step in (*steps, "drained in", "drained and stopped")]
    assert places == sorted(places)
    assert "\x1b" not in output
    assert "status=200 " in output
    assert list(spool.iterdir()) == []
    wait_until(lambda: processes_with(mark) == [])
    asked = CliRunner().invoke(app, ["ask", str(clip), question, "--json"])
    assert asked.exit_code == 0, asked.output
    answer = json.loads(asked.stdout)
    assert reply.usage is not None
    assert reply.choices[0].message.content == answer["answer"]
    assert reply.choices[0].message.content == min(SCENE.objects, key=lambda item: item.start_s).shape
    assert reply.usage.prompt_tokens == answer["usage"]["prompt_tokens"]
    assert reply.usage.completion_tokens == answer["usage"]["completion_tokens"]


def test_a_cluster_is_not_for_one_process() -> None:
    options = ("--local", "--address", "10.0.0.5:6379")
    done = subprocess.run(command(*options), capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 2
    assert "received --local and --address 10.0.0.5:6379; allowed: one of them" in done.stderr


@dataclass(frozen=True, slots=True)
class Serving:
    """`epd serve` on Ray. folder: of the README's video. output: a file of what the command printed."""

    process: subprocess.Popen[bytes]
    url: str
    folder: Path
    output: Path
    mark: str


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder, home, mark = (
        tmp_path_factory.mktemp("readme"),
        tmp_path_factory.mktemp("serve"),
        secrets.token_hex(8),
    )
    write_demo_video(folder / "clip.mp4", SCENE, fps=8, height=180, width=320)
    options = ("--topology", "1epd", "--limits", "max_media=7", "--allowed-media-path", str(folder))
    with running(mark, home, *options) as (process, url):
        yield Serving(process, url, folder, home / "output", mark)


def example(name: str) -> str:
    """The block of code behind the comment `<!-- name -->` of the README."""
    match = re.search(rf"<!-- {name} -->\n```\w+\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert match, f"the README has no example {name}"
    return match[1]


def run_example(serving: Serving, program: list[str], name: str) -> str:
    """What an example prints in the folder of its reader, beside the video."""
    script = example(name).replace("http://127.0.0.1:8000", serving.url)
    done = subprocess.run(
        [*program, script], cwd=serving.folder, env={**os.environ, "NO_PROXY": "127.0.0.1"},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_readmes_curl(serving: Serving) -> None:
    answer = json.loads(run_example(serving, ["bash", "-c"], "curl"))
    content = answer["choices"][0]["message"]["content"]
    assert content == min(SCENE.objects, key=lambda item: item.start_s).shape


def test_the_readmes_client(serving: Serving) -> None:
    assert run_example(serving, [sys.executable, "-c"], "openai") == str(len(SCENE.objects))


def test_it_answers_and_drains(serving: Serving) -> None:
    """The last test of this server."""
    assert "bytes of text, 7 media, 65,536 frames" in serving.output.read_text()
    client = httpx.Client(base_url=serving.url, trust_env=False, timeout=200)
    body = {
        "messages": [{"role": "user", "content": "What is it?"}],
        "stream": True,
        "max_tokens": 400,
        "ignore_eos": True,
    }
    with client, client.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        serving.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line.startswith("data: ")]
    assert rest[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in rest[-2].replace(" ", "")
    assert serving.process.wait(END_S) == 0
    wait_until(lambda: processes_with(serving.mark) == [])


@contextmanager
def running(
    mark: str, folder: Path, *options: str, start: str = START, **environment: str
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The command when it is ready, and its URL. It is started among packages that it must not import."""
    write_hostile_packages(folder / "here")
    port = free_port()
    output = folder / "output"
    with output.open("wb") as stream:
        process = subprocess.Popen(
            command("--port", str(port), *options, start=start),
            cwd=folder / "here",
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment, MARK: mark},
        )
    try:
        wait_until(lambda: b"ready in" in output.read_bytes() or process.poll() is not None, READY_S)
        found = re.search(
            r"ready in \d+\.\d s: (http://\S+)/v1 serves shapes-vl-2 on \S+", output.read_text()
        )
        assert found, output.read_text()
        yield process, found[1]
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def processes_with(mark: str) -> list[str]:
    """Command lines of processes that have inherited the mark."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{MARK}={mark}".encode() in environment.read_bytes().split(b"\0"):
                found.append((environment.parent / "cmdline").read_text())
        except OSError:
            continue
    return found
