"""Measures a server of the measured checkpoint under files and load as users have them.

Pixel limits are those that the checkpoint's authors publish; every row says frames and visual tokens. Needs
PyAV and what `epd-vlm[local]` installs; what is missing is said and no failure.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np

from benchmarks.gpu.sections import OK
from benchmarks.gpu.setup import Setup
from benchmarks.gpu.whole_path import answering
from benchmarks.reporting import Row
from epd.machine import usable_cpus

# Qwen2.5-VL's preprocessor_config.json: min_pixels and max_pixels of an image.
PUBLISHED_SIZE = {"shortest_edge": 56 * 56, "longest_edge": 12_845_056}
_ADMIN_KEY = "of-a-benchmark"
_START_S, _ANSWER_S = 240.0, 300.0
_STAGES = ("decode_video", "encode", "prefill")
_PSNR_DB = 60.0  # a level in one of 15 samples
_T = TypeVar("_T")


def nvdec(setup: Setup) -> Iterator[Row]:
    """Frames of a file by the CPU, by the GPU with as many decoders as stated, and by both, a video each."""
    if find_spec("av") is None:
        yield {"what": "not run: av is not installed"}
        return
    from epd import video

    path, size, num_frames = _video(setup, 10), setup.sizes.frame_size, setup.sizes.num_frames
    info = video.probe(path)
    times_s = [(index + 0.5) * info.duration_s / num_frames for index in range(num_frames)]

    def read(device: video.VideoDevice | None) -> video.Frames:
        return video.decode(path, times_s, size, device=device)

    def timed(reader: str, work: Callable[[], _T], num_videos: int = 1) -> tuple[_T, Row]:
        start_s = time.perf_counter()
        found = work()
        seconds = time.perf_counter() - start_s
        each = {"frames": num_frames, "size": f"{size[0]} x {size[1]}", "s": round(seconds, 2)}
        rate = round(num_videos * info.num_frames / seconds)
        return found, {"reader": reader, **each, "frames of the file/s": rate}

    truth, row = timed(f"CPU, {usable_cpus()} threads", partial(read, None))
    yield row
    for num_sessions in (1, 4, 8):
        device = video.VideoDevice(str(setup.placement.device), num_sessions)
        frames, row = timed(f"GPU, {num_sessions} decoders", partial(read, device))
        error = np.subtract(frames.data, truth.data, dtype=np.float32)
        psnr_db = 10 * math.log10(255**2 / max(1e-9, float(np.square(error).mean())))
        is_equal = frames.pts_s.tolist() == truth.pts_s.tolist() and psnr_db >= _PSNR_DB
        is_its = device.num_frames >= num_frames or not setup.placement.is_cuda
        yield {**row, "of the GPU": device.num_frames, "PSNR dB": round(psnr_db, 1), OK: is_equal and is_its}
    with ThreadPoolExecutor(2) as threads:
        both = partial(lambda: [*threads.map(read, (None, device))])
        yield timed("CPU and GPU, a video each", both, 2)[1]


def _missing() -> list[str]:
    return [name for name in ("av", "fastapi", "uvicorn") if find_spec(name) is None]


def published_files(setup: Setup) -> Iterator[Row]:
    """A file of H.264 to its first token, then a second question about it, and the time to start."""
    if missing := _missing():
        yield {"what": f"not run: {', '.join(missing)} are not installed"}
        return
    for topology in setup.sizes.served_topologies:
        for minutes, options in setup.sizes.served_videos:
            with _server(setup, ("--topology", topology, *options)) as (url, start_s):
                video = _video(setup, minutes)
                first, second = (_ask(url, video, question) for question in ("What happens?", "Where is it?"))
            yield {
                "topology": topology,
                "minutes of video": minutes,
                "options": " ".join(options) or "-",
                "start s": round(start_s, 1),
                **first,
                "second question s": second["first token s"],
            }


def closed_loop(setup: Setup) -> Iterator[Row]:
    """Requests a second with as many under way as stated, by `epd bench`."""
    if missing := _missing():
        yield {"what": f"not run: {', '.join(missing)} are not installed"}
        return
    with _server(setup, ("--topology", "1epd", "--max-num-seqs", "256")) as (url, _):
        for what, in_flight, number, options in setup.sizes.served_loads:
            yield {"what": what, "under way": in_flight, **_load(setup, url, in_flight, number, options)}


def _load(setup: Setup, url: str, in_flight: int, number: int, options: Sequence[str]) -> Row:
    out = setup.folder / "bench.json"
    command = ["bench", "--url", url, "--arrival", "closed", "--concurrency", str(in_flight), "--ignore-eos"]
    counts = ["--num-requests", str(number), "--json", str(out), "--media-dir", str(setup.folder / "media")]
    _run(*command, *counts, *options)
    (endpoint,) = json.loads(out.read_text(encoding="utf-8"))["endpoints"].values()
    report = endpoint["pooled"]
    return {
        "requests": report["num_requests"],
        "failed": report["num_requests"] - report["num_ok"],
        "requests/s": round(report["requests_per_s"], 3),
        "tokens/s": round(report["tokens_per_s"], 1),
        "first token s, p50": round(report["ttft"]["p50_s"], 3),
        "p99": round(report["ttft"]["p99_s"], 3),
    }


def role_switch(setup: Setup) -> Iterator[Row]:
    """From the request to change roles to the worker's first answer in the new one."""
    if missing := _missing():
        yield {"what": f"not run: {', '.join(missing)} are not installed"}
        return
    options = ("--topology", "2e1p1d", "--elastic", "--admin-api-key", _ADMIN_KEY)
    headers = {"Authorization": f"Bearer {_ADMIN_KEY}"}
    with (
        _server(setup, options) as (url, _),
        httpx.Client(base_url=url, headers=headers, timeout=120) as http,
    ):
        for roles in (["decode"], ["encode"], ["prefill"], ["encode"]):
            start_s = time.perf_counter()
            reply = http.post("/v1/epd/roles", json={"worker": "e1", "roles": roles})
            seconds = time.perf_counter() - start_s
            yield {"worker": "e1", "to": roles[0], "status": reply.status_code, "s": round(seconds, 3)}


@contextmanager
def _server(setup: Setup, options: Sequence[str]) -> Iterator[tuple[str, float]]:
    """Runs a server of threads of the measured checkpoint. Yields its URL, and the seconds of its start."""
    start_s = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=setup.folder) as folder:
        placed = ("--device", str(setup.placement.device), "--dtype", setup.placement.dtype_name)
        command = (
            str(with_published_sizes(setup)),
            *options,
            *placed,
            "--allowed-media-path",
            str(setup.folder),
        )
        with answering(command, Path(folder), _START_S) as url:
            yield url, time.perf_counter() - start_s


def with_published_sizes(setup: Setup) -> Path:
    """The measured checkpoint with the sizes of pictures of its published processor: links to its weights."""
    folder = setup.folder / "served"
    folder.mkdir(exist_ok=True)
    for file in setup.path.iterdir():
        target = folder / file.name
        if target.exists():
            continue
        if setup.sizes.is_full and "processor" in file.name:
            target.write_text(json.dumps(_sized(json.loads(file.read_text()))), encoding="utf-8")
        else:
            target.symlink_to(file.resolve())
    return folder


def _sized(settings: Any) -> Any:
    """Settings of a processor, each size in them as published."""
    if not isinstance(settings, dict):
        return settings
    sized = {name: _sized(value) for name, value in settings.items()}
    return sized | {"size": PUBLISHED_SIZE} if "longest_edge" in settings.get("size", {}) else sized


def _video(setup: Setup, minutes: int) -> Path:
    """1080p H.264 of 25 frames a second; tiny where sizes are."""
    if setup.sizes.is_full:
        from benchmarks.video.video_decode import clip  # it imports PyAV

        return clip("h264", "1080p", minutes, setup.folder)
    path = setup.folder / f"{minutes}.mp4"
    if not path.exists():
        _run("demo-video", str(path), "--seconds", str(4 * minutes), "--size", "160x120")
    return path


def _ask(url: str, video: Path, question: str) -> Row:
    """Streams an answer. Its first token is timed here, the rest is what the server says of it."""
    content = [
        {"type": "video_url", "video_url": {"url": video.as_uri()}},
        {"type": "text", "text": question},
    ]
    body = {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 8,
        "ignore_eos": True,
        "stream": True,
    }
    first_s, report, start_s = 0.0, {}, time.perf_counter()
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=_ANSWER_S) as reply:
        if reply.is_error:
            raise RuntimeError(f"the server answers {reply.status_code}: {reply.read().decode()[:300]}")
        for chunk in _chunks(reply):
            if chunk["choices"] and not first_s and chunk["choices"][0]["delta"].get("content") is not None:
                first_s = time.perf_counter() - start_s
            report = chunk.get("epd") or report
    return {
        "frames": report["frames"],
        "visual tokens": report["visual_tokens"],
        "first token s": round(first_s, 3),
        **{f"{stage} s": round(report["stages_s"].get(stage, 0.0), 3) for stage in _STAGES},
    }


def _chunks(reply: httpx.Response) -> Iterator[Any]:
    for line in reply.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def _run(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "epd", *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"epd {arguments[0]} failed: {done.stderr[-600:]}")
