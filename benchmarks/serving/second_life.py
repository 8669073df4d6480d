"""What a second question about a video costs in another life of a server, the first one killed.

    python -m benchmarks.serving.second_life --minutes 10 --rounds 3 --write

Two models are asked: the embedded one, and a random one of 76 million parameters, whose prefill is dearer.
The video is filmed by hand, so no frame is equal to another, and keeping saves nothing at the first question.
Each round starts five servers in turn, asks each a short text first, and kills each at its end:

    without a cache_dir            first question
    with an empty one              first question | another one
    with what that one has left                     another one
    with an empty one, and S3      first question   uploaded to a server behind a proxy of 1 GB/s
    with an empty one, and S3                       another one

The results go to benchmarks/results/second_life.{json,md} with --write.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from benchmarks.reporting import RESULTS, Row, markdown, setting
from epd.shapes import make_scene
from epd.store.piece_files import stored
from tests.store.object_servers import S3, Objects, proxied
from tests.tiny_models import build_qwen2_5_vl
from training.footage import Filming, write_filmed

_FIRST, _OTHER = "Describe the video.", "How many shapes are there?"
_READY_S, _ANSWER_S = 120.0, 1800.0
# 12 layers of 768 channels.
RANDOM: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 48,
    "num_key_value_heads": 16,
    "max_position_embeddings": 32768,
}
_COUNTERS = ("encoded_patches", "computed_tokens", "store_read_tokens", "store_read_objects_bytes")
_BYTES_PER_S = 1e9  # of the object store
_WRITTEN_S = 2.0  # after an answer, until what it has is on disk
_MOST_OF = 0.95  # lists and headers differ a little


class Life:
    """One process of a server."""

    def __init__(self, port: int, pid: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._pid = pid
        self._http = httpx.Client(base_url=self.url, timeout=_ANSWER_S)

    def is_ready(self) -> bool:
        try:
            return self._http.get("/health").status_code == 200
        except httpx.HTTPError:
            return False

    def ask(self, text: str, video: Path | None = None) -> float:
        """Returns the seconds of an answer of one word."""
        media = [] if video is None else [{"type": "video_url", "video_url": {"url": video.as_uri()}}]
        content = [*media, {"type": "text", "text": text}]
        body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 1}
        start_s = time.monotonic()
        self._http.post("/v1/chat/completions", json=body).raise_for_status()
        return time.monotonic() - start_s

    def first(self, video: Path) -> tuple[float, float]:
        """Returns the seconds of a first answer, and the CPU seconds of all that it causes."""
        before_s = self._cpu_s()
        seconds = self.ask(_FIRST, video)
        time.sleep(_WRITTEN_S)
        return seconds, self._cpu_s() - before_s

    def _cpu_s(self) -> float:
        """Returns the CPU seconds so far of the process, its children, and those that they waited for."""
        ticks = 0
        for path in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                fields = path.read_text().rpartition(")")[2].split()
                if self._pid in (int(path.parent.name), int(fields[1])):
                    ticks += sum(map(int, fields[11:15]))
        return ticks / os.sysconf("SC_CLK_TCK")

    def counters(self) -> dict[str, int]:
        time.sleep(1.5)  # workers report their load each second
        text = self._http.get("/metrics").text
        found = {name: re.search(rf"^epd_{name}_total (\S+)$", text, re.M) for name in _COUNTERS}
        return {name: int(float(value[1])) if value else 0 for name, value in found.items()}


@contextmanager
def life(folder: Path, options: Sequence[str]) -> Iterator[Life]:
    """Yields a server that reads media in `folder`, and has answered a text. It is killed at the end."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "epd", "serve", "--local", "--port", str(port)]
    command += ["--allowed-media-path", str(folder), *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            started, end_s = Life(port, server.pid), time.monotonic() + _READY_S
            while not started.is_ready():
                if server.poll() is not None or time.monotonic() > end_s:
                    raise SystemExit("epd serve did not start; run it yourself to see why")
                time.sleep(0.1)
            started.ask("What is shown?")
            yield started
        finally:
            server.send_signal(signal.SIGKILL)


def uploaded(objects: Objects, num_bytes: int) -> None:
    """Waits until an object store has what was kept."""
    end_s = time.monotonic() + _ANSWER_S
    while sum(len(objects.get(path)) for path in objects.paths()) < _MOST_OF * num_bytes:
        if time.monotonic() > end_s:
            raise SystemExit("the object store did not get what was kept; see the server's log")
        time.sleep(0.5)


def one_round(video: Path, options: Sequence[str], s3: S3) -> Row:
    prefix = uuid.uuid4().hex
    objects = Objects(s3.url(prefix), s3, prefix)
    with TemporaryDirectory() as folder, proxied(s3, _BYTES_PER_S) as proxy:
        kept, writing, reading = (["--cache-dir", str(Path(folder, name))] for name in "abc")
        below = ["--cache-objects", s3.url(prefix, proxy.port)]
        with life(video.parent, options) as plain:
            without_s, without_cpu_s = plain.first(video)
            encoded = plain.counters()["encoded_patches"]
        with life(video.parent, [*options, *kept]) as first:
            first_s, first_cpu_s = first.first(video)
            if encoded != (found := first.counters()["encoded_patches"]):
                raise SystemExit(
                    f"{encoded} patches were encoded without a cache_dir, {found} with an empty one"
                )
            same_s = first.ask(_OTHER, video)
            stored_bytes = sum(each.num_bytes for each in stored(Path(kept[1])))
        with life(video.parent, [*options, *kept]) as second:
            other_s = second.ask(_OTHER, video)
            counted = second.counters()
        with life(video.parent, [*options, *writing, *below]) as writer:
            writer.ask(_FIRST, video)
            uploaded(objects, stored_bytes)
        with life(video.parent, [*options, *reading, *below]) as third:
            objects_s = third.ask(_OTHER, video)
            counted_there = third.counters()
    if counted_there["encoded_patches"] or not counted_there["store_read_objects_bytes"]:
        raise SystemExit(f"another machine found too little: {counted_there}")
    return {
        "first, without": round(without_s, 2),
        "first, with": round(first_s, 2),
        "second, same life": round(same_s, 3),
        "second, after SIGKILL": round(other_s, 3),
        "share of the first": round(other_s / first_s, 4),
        "second, another machine": round(objects_s, 3),
        "its share of the first": round(objects_s / first_s, 4),
        "cost of keeping": round(first_s / without_s, 3),
        "in CPU": round(first_cpu_s / without_cpu_s, 3),
        "stored_mb": round(stored_bytes / 1e6, 1),
        **counted,
        "store_read_objects_bytes": counted_there["store_read_objects_bytes"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--options", default="--topology 1e1p1d", help="of epd serve")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/second_life.*")
    asked = parser.parse_args()
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    s3 = S3()
    with TemporaryDirectory() as folder:
        video, filmed = Path(folder, "media", "video.mp4"), Filming.of("handheld", None)
        video.parent.mkdir()
        write_filmed(video, make_scene(1, asked.minutes * 60), filmed, fps=4, height=224, width=224)
        models = {"embedded": [], "random": [str(build_qwen2_5_vl(Path(folder, "model"), **RANDOM))]}
        results: dict[str, list[Row]] = {}
        for name, model in models.items():
            rows = [one_round(video, [*model, *asked.options.split()], s3) for _ in range(asked.rounds)]
            medians = {column: statistics.median(row[column] for row in rows) for column in rows[0]}
            results |= {name: [medians], f"{name}_rounds": rows}
            print(json.dumps({name: medians}), flush=True)
    found = {"setting": setting(["torch"], options=asked.options), **results}
    command = f"python -m benchmarks.serving.second_life --minutes {asked.minutes:g} --rounds {asked.rounds}"
    titles = {
        "embedded": f"A video of {asked.minutes:g} minutes, the embedded model; seconds, medians",
        "random": "The same, a random model of 76 million parameters",
        "embedded_rounds": "Each round of the embedded model",
        "random_rounds": "Each round of the random one",
    }
    text = markdown("A second life", command, found, titles)
    print(text)
    s3.stop()
    if asked.write:
        (RESULTS / "second_life.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        (RESULTS / "second_life.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
