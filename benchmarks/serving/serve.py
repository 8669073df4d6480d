"""The app as its users meet it: `epd serve` in processes of its own, real HTTP, the embedded model.

    python -m benchmarks.serving.serve [--quick] [--section start|overlap|flood]

start: seconds until the first answer, and memory of each process, for several topologies.
overlap: a cold question about a 10-minute 720p video: time to the first token against the slowest stage and
against the sum of the stages; then a second question about it. Each repeat has other bytes and equal frames.
flood: questions about images with answers of 96 tokens, from a closed loop, give the capacity; then ten times
as many arrive, and what is answered, refused and held in memory is counted. The generator shares the cores.
Results go to benchmarks/results/serve.{json,md}.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.reporting import Row, Section, run_sections, setting
from epd.encoders import FrameSampling, load_adapter
from epd.models import embedded_model_path
from epd.types import StageTimings
from tests.colocated import decode_groups, plan_media

EPD = Path(sys.executable).with_name("epd")
PORT = 8731
STAGES = ("decode_video", "preprocess", "encode", "prefill", "decode")
CACHE = Path(tempfile.gettempdir()) / "epd-bench-serve"


@dataclass(frozen=True, slots=True)
class Server:
    """A running app. ready_s: from the start of the command to the first answer."""

    url: str
    process: subprocess.Popen[str]
    ready_s: float

    def ask(self, content: list[dict[str, Any]], **options: Any) -> Row:
        """One question; the answer's `epd` report."""
        body = {"model": "shapes-vl", "messages": [{"role": "user", "content": content}], **options}
        answer = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=600)
        answer.raise_for_status()
        report: Row = answer.json()["epd"]
        return report

    def memory_mb(self) -> dict[str, float]:
        """Proportional set size of each process, by what it is."""
        found: dict[str, float] = {}
        for pid in _descendants(self.process.pid):
            name, size = _memory(pid)
            found[name] = round(found.get(name, 0.0) + size, 1)
        return found


@contextmanager
def serving(topology: str, *options: str) -> Iterator[Server]:
    """`epd serve`, asked once; ended like a user would end it."""
    start = time.perf_counter()
    command = [str(EPD), "serve", "--topology", topology, "--port", str(PORT), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            server = Server(f"http://127.0.0.1:{PORT}", process, 0.0)
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("ready"):
                    break
            server.ask([{"type": "text", "text": "How many?"}])
            yield Server(server.url, process, time.perf_counter() - start)
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def _descendants(pid: int) -> list[int]:
    children = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False).stdout
    return [pid, *(each for child in children.split() for each in _descendants(int(child)))]


def _memory(pid: int) -> tuple[str, float]:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return "gone", 0.0
    pss = next(line for line in rollup.splitlines() if line.startswith("Pss:"))
    name = command.split(" ")[0].rsplit("/", 1)[-1][:40]
    return (name if name.startswith("ray::") else "Ray and the command"), int(pss.split()[1]) / 1024


def start_rows(topologies: Sequence[str]) -> list[Row]:
    rows = []
    for topology in topologies:
        with serving(topology) as server:
            memory = server.memory_mb()
        rows.append(
            {
                "topology": topology,
                "first_answer_s": round(server.ready_s, 1),
                "memory_mb": round(sum(memory.values())),
                "by_process_mb": ", ".join(f"{name} {mb:.0f}" for name, mb in sorted(memory.items())),
            }
        )
        print(rows[-1], file=sys.stderr)
    return rows


def video(seconds: int) -> Path:
    path = CACHE / f"{seconds}s.mp4"
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        options = ["--seconds", str(seconds), "--size", "1280x720", "--seed", "11"]
        subprocess.run([str(EPD), "demo-video", str(path), *options], check=True, capture_output=True)
    return path


def other_bytes(source: Path, tag: str) -> Path:
    """The same video under another content hash: an MP4 box that readers skip follows it."""
    copy = source.with_name(f"{source.stem}-{tag}.mp4")
    shutil.copy(source, copy)
    payload = tag.encode()
    with copy.open("ab") as file:
        file.write((8 + len(payload)).to_bytes(4, "big") + b"free" + payload)
    return copy


def overlap_rows(topologies: Sequence[str], seconds: int, repeats: int) -> list[Row]:
    source = video(seconds)
    rows = []
    for topology in topologies:
        with serving(topology, "--allowed-media-path", str(CACHE)) as server:
            server.ask(about(video(10), "Which shape appears first?"))
            pairs, alone = [], []
            for repeat in range(repeats):
                pairs.append(_cold_and_second(server, other_bytes(source, f"{topology}-{repeat}")))
                alone.append(decode_alone_s(source))
        rows.append(_overlap(topology, seconds, pairs, alone))
        print(rows[-1], file=sys.stderr)
    return rows


def about(path: Path, question: str) -> list[dict[str, Any]]:
    return [
        {"type": "video_url", "video_url": {"url": path.as_uri()}},
        {"type": "text", "text": question},
    ]


def decode_alone_s(path: Path) -> float:
    """Seconds to decode the same frames in this process, while nothing else runs."""
    adapter = load_adapter(embedded_model_path())
    planned = plan_media(adapter, path, FrameSampling())
    start = time.perf_counter()
    for _ in decode_groups([planned], 256, StageTimings()):
        pass
    return time.perf_counter() - start


def _cold_and_second(server: Server, path: Path) -> tuple[Row, Row]:
    cold = server.ask(about(path, "Which shape appears first?"))
    second = server.ask(about(path, "How many shapes appear?"))
    path.unlink()
    return cold, second


def _overlap(topology: str, seconds: int, pairs: Sequence[tuple[Row, Row]], alone: Sequence[float]) -> Row:
    def median(values: Iterator[float]) -> float:
        return round(statistics.median(values), 3)

    slowest = [max(cold["stages_s"][stage] for stage in STAGES) for cold, _ in pairs]
    return {
        "topology": topology,
        "video": f"{seconds} s of 1280x720",
        "frames": pairs[0][0]["frames"],
        "visual_tokens": pairs[0][0]["visual_tokens"],
        "cold_ttft_s": median(cold["ttft_s"] for cold, _ in pairs),
        **{f"{stage}_s": median(cold["stages_s"][stage] for cold, _ in pairs) for stage in STAGES},
        "sum_of_stages_s": median(sum(cold["stages_s"][stage] for stage in STAGES) for cold, _ in pairs),
        "ttft_over_slowest": median(c["ttft_s"] / s for (c, _), s in zip(pairs, slowest, strict=True)),
        "decode_video_alone_s": median(iter(alone)),
        "ttft_over_decode_alone": median(c["ttft_s"] / s for (c, _), s in zip(pairs, alone, strict=True)),
        "second_ttft_s": median(second["ttft_s"] for _, second in pairs),
        "second_over_first": round(statistics.median(b["ttft_s"] / a["ttft_s"] for a, b in pairs), 4),
        "repeats": len(pairs),
    }


def flood_rows(topology: str, num_requests: int) -> list[Row]:
    """Goodput at capacity and at ten times that."""
    slo = ["--slo-ttft-s", "10"]
    with serving(topology, *slo) as server:
        common = ["--workload", "images", "--max-tokens", "96", "--ignore-eos", *slo]
        calm = bench(server, *common, "--concurrency", "8", "--num-requests", str(num_requests))
        before = sum(server.memory_mb().values())
        rate = 10 * calm["goodput"]
        flood = bench(server, *common, "--rate", f"{rate:.2f}", "--num-requests", str(10 * num_requests))
        after = sum(server.memory_mb().values())
        server.ask([{"type": "text", "text": "How many?"}])
    rows = [{"load": "8 at once", **calm}, {"load": f"{rate:.1f} per second", **flood}]
    for row, memory in zip(rows, (before, after), strict=True):
        row["memory_mb"] = round(memory)
        row["goodput_over_capacity"] = round(row["goodput"] / calm["goodput"], 3)
        print(row, file=sys.stderr)
    return rows


def bench(server: Server, *options: str) -> Row:
    out = CACHE / "bench.json"
    CACHE.mkdir(parents=True, exist_ok=True)
    command = [str(EPD), "bench", "--url", server.url, "--warmup", "2", "--json", str(out), *options]
    subprocess.run(command, check=True, capture_output=True)
    (endpoint,) = json.loads(out.read_text())["endpoints"].values()
    (report,) = endpoint["rounds"]
    return {
        "requests": report["num_requests"],
        "answered": report["num_ok"],
        "errors": report["errors"],
        "goodput": round(report["goodput_per_s"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one topology, a short video; writes nothing")
    parser.add_argument("--section", action="append", help="start, overlap or flood; may be repeated")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    quick = options.quick
    sections = {
        "start": Section(
            "Start: seconds to the first answer, memory (proportional set size)",
            lambda: start_rows(["1e1p1d"] if quick else ["1epd", "1e1pd", "1e1p1d", "2e1p1d"]),
        ),
        "overlap": Section(
            "A cold video (aim: TTFT at most 1.25 of the slowest stage; a second question at most 0.05)",
            lambda: overlap_rows(
                ["1e1p1d"] if quick else ["1epd", "1e1p1d", "2e1p1d"], 60 if quick else 600, 3
            ),
        ),
        "flood": Section(
            "Ten times as many requests as can be answered (aim: 0.9 of the goodput, the rest 429)",
            lambda: flood_rows("1e1p1d", 40 if quick else 100),
        ),
    }
    run_sections(
        "serve",
        "The app on Ray Serve",
        sections,
        options.section or list(sections),
        lambda: setting(("ray", "torch", "transformers"), checkpoint="shapes-vl, float32"),
        save=not quick,
    )


if __name__ == "__main__":
    main()
