"""Checks the whole path from H.264 on the device against the CPU, by the commands that users have.

Needs PyAV, and for the server what `epd-vlm[local]` installs; what is missing is said and no failure.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx

from benchmarks.gpu.sections import OK
from benchmarks.gpu.setup import Setup
from benchmarks.reporting import Row
from tests.ports import kept_port

_EPD = (sys.executable, "-m", "epd")
_START_S, _ANSWER_S = 60.0, 30.0
_QUESTIONS = ("Describe the video.", "How many shapes appear in the video?", "Describe the video as JSON.")
_SCHEMA = {
    "type": "object",
    "properties": {"count": {"type": "integer", "maximum": 9}},
    "required": ["count"],
}
_ASKED: Sequence[Mapping[str, Any]] = (
    *({"question": question} for question in _QUESTIONS),
    {"question": _QUESTIONS[0], "temperature": 0.8, "seed": 3},
    {
        "question": _QUESTIONS[2],
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}},
    },
)
_SERVERS = (
    ("1epd",),
    ("1e1p1d",),
    ("2ep1d",),
    ("1epd", "--draft", "auto"),
    ("1epd", "--reduction", "mustdrop", "--retention", "0.5"),
    ("1e1pd", "--reduction", "fastkv", "--retention", "0.5"),
)


def whole_path(setup: Setup) -> Iterator[Row]:
    """In float32: answers to questions by every way of reduction, then those of servers of threads."""
    missing = [name for name in ("av", "fastapi", "uvicorn") if find_spec(name) is None]
    if "av" in missing:
        yield {"what": f"not run: {', '.join(missing)} are not installed"}
        return
    device, sizes = str(setup.placement.device), setup.sizes
    cpu, ours = (_answers(setup, where, sizes.num_questions) for where in ("cpu", device))
    for method in dict.fromkeys(method for method, _ in cpu):
        equal = [ours.get(key) == answer for key, answer in cpu.items() if key[0] == method]
        yield {"what": method, "equal answers": f"{sum(equal)} of {len(equal)}", OK: all(equal)}
    if missing:
        yield {"what": f"no server: {', '.join(missing)} are not installed"}
        return
    video = setup.folder / "video.mp4"
    _run("demo-video", str(video), "--seconds", "20", "--size", "320x240")
    for options in _SERVERS[: sizes.num_servers]:
        texts = []
        for where in ("cpu", device):
            with _server(setup.folder, where, options) as url:
                texts.append([_ask(url, video, **asked) for asked in _ASKED])
        equal = [one == other for one, other in zip(*texts, strict=True)]
        what = f"epd serve --local --topology {' '.join(options)}"
        yield {"what": what, "equal answers": f"{sum(equal)} of {len(equal)}", OK: all(equal)}


def _answers(setup: Setup, device: str, num_questions: int) -> dict[tuple[str, str], str]:
    """Asks about drawn videos with all tokens and with a quarter. Returns answers by method and question."""
    out = setup.folder / f"answers-{device.partition(':')[0]}.jsonl"
    sampling = ("--demo", str(num_questions), "--frames", "32", "--seconds", "32", "--ttft-videos", "0")
    placed = ("--method", "all", "--retention", "0.25", "--device", device, "--dtype", "float32")
    _run("eval", *sampling, *placed, "--out", str(out))
    records = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    return {
        (record["method"], record["item_id"]): record["answer"]
        for record in records
        if record["record"] == "verdict"
    }


def _run(*arguments: str) -> None:
    """Raises RuntimeError with the end of what a command printed if it fails."""
    done = subprocess.run([*_EPD, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"epd {arguments[0]} failed: {done.stderr[-600:]}")


@contextmanager
def _server(folder: Path, device: str, options: Sequence[str]) -> Iterator[str]:
    """Runs a server of threads of the embedded model, and gives its address."""
    command = ["shapes-vl-2", "--topology", *options, "--device", device, "--dtype", "float32"]
    with answering(
        [*command, "--num-kv-tokens", "32768", "--allowed-media-path", str(folder)], folder
    ) as url:
        yield url


@contextmanager
def answering(options: Sequence[str], folder: Path, start_s: float = _START_S) -> Iterator[str]:
    """Runs `epd serve --local` with options; yields its URL when it answers. folder: for its log."""
    command = [*_EPD, "serve", *options, "--local"]
    with kept_port() as port, (folder / "server.log").open("w") as log:
        server = subprocess.Popen([*command, "--port", str(port)], stdout=log, stderr=subprocess.STDOUT)
        url = f"http://127.0.0.1:{port}"
        try:
            _wait(url, server, folder / "server.log", start_s)
            yield url
        finally:
            server.terminate()
            try:
                server.wait(_ANSWER_S)
            except subprocess.TimeoutExpired:
                server.kill()


def _wait(url: str, server: subprocess.Popen[bytes], log: Path, start_s: float) -> None:
    end_s = time.monotonic() + start_s
    while time.monotonic() < end_s and server.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=2).status_code == httpx.codes.OK:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"no server after {start_s:.0f} s: {log.read_text(encoding='utf-8')[-600:]}")


def _ask(url: str, video: Path, question: str, **more: Any) -> str:
    content = [
        {"type": "video_url", "video_url": {"url": video.as_uri()}},
        {"type": "text", "text": question},
    ]
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 200, **more}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=_ANSWER_S)
    text: str = answer.raise_for_status().json()["choices"][0]["message"]["content"]
    return text
