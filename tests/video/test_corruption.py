"""Hundreds of damaged files: no hang, no death of the process, no error without a type."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.video.conftest import Clip
from tests.video.corpus import corpus

SOURCES = [
    "h264_b.mp4",
    "hevc_open.mp4",
    "h264_fragmented.mp4",
    "h264.mkv",
    "h264.ts",
    "mpeg4.avi",
    "mpeg4_packed.avi",
    "h264.avi",
    "vp9.webm",
    "av1.mp4",
]
PER_DAMAGE = 5
# Of CPU time: a busy machine lets a process wait. One that hangs says nothing for so long. Before its first
# file, a process imports.
SLOW_S = 5.0
HANG_S, START_S = 60.0, 600.0


def run(folder: Path) -> dict[str, str]:
    """What came of each file; a process that dies or hangs is replaced and its file noted."""
    results: dict[str, str] = {}
    first = ""
    while True:
        current, first = _run_from(folder, first, results)
        if current is None:
            return results
        if current in ("start", "end"):
            return results
        first = current + "!"  # the next name in order


def _run_from(folder: Path, first: str, results: dict[str, str]) -> tuple[str | None, str]:
    """Runs until all is done or a file is fatal; (the fatal file or None, where it began)."""
    command = [sys.executable, "-m", "tests.video.corrupt_runner", str(folder), first]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        fatal = _watch(process, results)
    if fatal is None and process.returncode != 0:
        fatal = "end"
        results[fatal] = f"death {process.returncode}"
    return fatal, first


def _watch(process: subprocess.Popen[str], results: dict[str, str]) -> str | None:
    """Collects results; the file that killed the process or made it hang, if one did."""
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_forward, args=(process, lines), daemon=True).start()
    current: str | None = None
    wait_s = START_S
    while True:
        try:
            line = lines.get(timeout=wait_s)
        except queue.Empty:
            process.kill()
            results[current or "start"] = "hang"
            return current
        if line is None:
            if current is not None:
                results[current] = f"death {process.wait()}"
            return current
        entry = json.loads(line)
        current = entry.get("begin")
        wait_s = HANG_S
        if "name" in entry:
            results[entry["name"]] = entry["result"] if entry["cpu_s"] < SLOW_S else "hang"


def _forward(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


@pytest.fixture(scope="module")
def outcomes(clip: Clip, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folders = [tmp_path_factory.mktemp("corrupt") for _ in range(2)]
    for i, variant in enumerate(corpus({name: clip(name) for name in SOURCES}, PER_DAMAGE)):
        (folders[i % 2] / variant.name).write_bytes(variant.data)
    with ThreadPoolExecutor(2) as both:
        return {name: result for results in both.map(run, folders) for name, result in results.items()}


def test_nothing_hangs_dies_or_fails_without_a_type(outcomes: dict[str, str]) -> None:
    bad = {
        name: result for name, result in outcomes.items() if result.startswith(("hang", "death", "untyped"))
    }
    assert not bad
    assert len(outcomes) >= 400


def test_the_corpus_bites_and_leaves_something(outcomes: dict[str, str]) -> None:
    refused = [name for name, result in outcomes.items() if result.endswith("Error")]
    mended = [
        name
        for name, result in outcomes.items()
        if "frames" in result and not result.endswith(" 0 substituted")
    ]
    whole = [name for name, result in outcomes.items() if result.endswith(" 0 substituted")]
    assert len(refused) >= 80
    assert len(mended) >= 8
    assert len(whole) >= 80


def test_impostors_are_refused(outcomes: dict[str, str]) -> None:
    for name in ("empty.mp4", "text.mp4", "playlist.mp4", "concat.mp4", "page.webm", "noise.ts", "boxes.mp4"):
        assert outcomes[name] in ("UnsupportedMediaError", "CorruptMediaError"), (name, outcomes[name])
