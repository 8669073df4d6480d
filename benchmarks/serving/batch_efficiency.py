"""Output tokens a second of `epd batch`, beside those of its engine alone on the same requests.

    python -m benchmarks.serving.batch_efficiency [--images 64] [--rounds 3] [--write]

A random model of 76 million parameters answers questions about drawn images with 32 tokens each, so its
engine is the bottleneck. Each round runs three lanes in turn, each on one thread of torch:

    engine        all requests at once in one process, the images decoded before
    one process   epd batch
    server        epd batch --url, at epd serve --local on the same machine

Shares are medians of those within a round. Results go to benchmarks/results/batch_efficiency.{json,md}.
"""

from __future__ import annotations

import argparse
import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and for processes below
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.engine.engine import Ours, Request
from benchmarks.reporting import RESULTS, Row, markdown, setting
from benchmarks.serving.second_life import RANDOM, life
from epd.batch.lines import CHAT_URL
from epd.shapes import SceneRenderer, make_scene
from tests.tiny_models import build_qwen2_5_vl

NUM_TOKENS, SIZE = 32, 224
# Heads of 32 channels, which other engines have kernels for too.
MODEL = RANDOM | {
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4]},
}
SHAPES = {"1 question": 1, "4 questions": 4}  # of each image
LANES = ("one process", "server")


def drawn(folder: Path, count: int, first: int) -> list[tuple[Path, Any]]:
    """Files of images that no other call has drawn, and their pixels, uint8 [H, W, 3]."""
    made = []
    for number in range(first, first + count):
        pixels = SceneRenderer(make_scene(number, 10.0), SIZE, SIZE).frame(5.0)
        path = folder / f"{number}.png"
        Image.fromarray(pixels).save(path)
        made.append((path, np.asarray(pixels)))
    return made


def asked(num_questions: int) -> list[str]:
    return [f"What is shown, and where is it? ({number})" for number in range(num_questions)]


def engine_rate(engine: Ours, images: Sequence[tuple[Path, Any]], questions: Sequence[str]) -> float:
    """Output tokens a second."""
    requests = [Request(pixels, text, NUM_TOKENS) for _, pixels in images for text in questions]
    outcome = engine.answer(requests)
    return sum(map(len, outcome.tokens)) / outcome.seconds


def line_of(name: str, path: Path, text: str) -> Row:
    """A line whose answer is as long as the engine's, whatever tokens end one."""
    image = {"type": "image_url", "image_url": {"url": path.as_uri()}}
    messages = [{"role": "user", "content": [image, {"type": "text", "text": text}]}]
    body = {"messages": messages, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    return {"custom_id": name, "method": "POST", "url": CHAT_URL, "body": body}


def batch_summary(
    folder: Path, images: Sequence[tuple[Path, Any]], questions: Sequence[str], *options: str
) -> Row:
    """What `epd batch --json` says about a run over the images."""
    lines = [
        line_of(f"{path.stem} {number}", path, text)
        for path, _ in images
        for number, text in enumerate(questions)
    ]
    source, out = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", "epd", "batch", str(source), str(out), "--json"]
    done = subprocess.run([*command, *options], check=True, capture_output=True, text=True)
    found: Row = json.loads(done.stdout)
    assert found["answer_tokens"] == NUM_TOKENS * len(lines), "an answer ended early"
    return found


def one_round(folder: Path, model: str, url: str, engine: Ours, count: int, first: int) -> list[Row]:
    rows = []
    for shape, num_questions in SHAPES.items():
        images, questions = drawn(folder, count // num_questions, first), asked(num_questions)
        rate = engine_rate(engine, images, questions)
        row: Row = {"shape": shape, "engine": round(rate, 1)}
        options = {"one process": ["--model", model], "server": ["--url", url]}
        for lane in LANES:
            told = ["--engine-tokens-per-s", str(rate)]
            summary = batch_summary(folder, images, questions, *options[lane], *told)
            row |= {lane: summary["answer_tokens_per_s"], f"{lane}, share": round(summary["efficiency"], 3)}
            print(shape, lane, summary["answer_tokens"], summary["utilisation"], file=sys.stderr)
        row["server over one process"] = round(row["server"] / row["one process"], 3)
        print(json.dumps(row), flush=True)
        rows.append(row)
        first += count
    return rows


def medians(rows: Sequence[Row]) -> list[Row]:
    return [
        {
            name: shape
            if name == "shape"
            else round(statistics.median(row[name] for row in rows if row["shape"] == shape), 3)
            for name in rows[0]
        }
        for shape in SHAPES
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=64, help="requests of each lane")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/batch_efficiency.*")
    given = parser.parse_args()
    rows: list[Row] = []
    with TemporaryDirectory() as name:
        folder = Path(name)
        model = str(build_qwen2_5_vl(folder / "model", **MODEL))
        engine = Ours(Path(model))
        engine_rate(engine, drawn(folder, 4, 0), asked(1))
        with life(folder, [model, "--topology", "1epd"]) as server:
            for number in range(given.rounds):
                first = 1000 * (number + 1)
                rows += one_round(folder, model, server.url, engine, given.images, first)
    found = {"setting": setting(["torch"], requests=given.images), "shares": medians(rows), "rounds": rows}
    titles = {
        "shares": "Output tokens a second and shares (aims: .9 of the engine, .95 of one process)",
        "rounds": "Each round",
    }
    command = f"python -m benchmarks.serving.batch_efficiency --images {given.images} --rounds {given.rounds}"
    text = markdown("A batch beside its engine alone", f"{command} --write", found, titles)
    print(text)
    if given.write:
        (RESULTS / "batch_efficiency.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        (RESULTS / "batch_efficiency.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
