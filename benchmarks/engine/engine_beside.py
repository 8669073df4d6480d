"""What running answers feel of images and videos that a merged worker encodes, in its turns or beside them.

    python -m benchmarks.engine.engine_beside [--quick] [--threads N] [--section images|one_at_a_time|videos]

One worker with all roles, in this process, without HTTP: eight texts are answered while requests with media
come, a few at a time, the next as one of them has got its answer. Frames are drawn, and new in every request.
The lanes take turns within a repeat, with one worker; ratios are medians of the ratios within a repeat.

gap: between two tokens of a text, milliseconds. work_s: until all is answered, the throughput's inverse.
Results go to benchmarks/results/engine_beside.{json,md}.
"""

from __future__ import annotations

import argparse
import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import itertools
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from benchmarks.reporting import Row, Section, median_ratio, run_sections, setting
from epd.encode.sharding import GROUP_TOKENS
from epd.encoders import FrameSampling
from epd.encoders.groups import plan_groups, prompt_identity
from epd.encoders.plans import MediaPlan, VideoFacts
from epd.engine_config import EngineConfig
from epd.models import embedded_model_path
from epd.sampling_params import SamplingParams
from epd.serve_app.local.fleet import LocalTransport
from epd.serve_app.messages import EncodeGroup, Prefill
from epd.serve_app.worker.worker_core import WorkerCore
from epd.serve_app.worker.worker_roles import EncodeRole
from epd.serve_app.worker.worker_settings import WorkerSettings
from epd.stages.encode.beside import InTurn
from epd.stages.engine.generation import GenerateRequest
from epd.topology import Stage
from epd.transfer.transfers import Grant
from epd.types import UInt8Array

NUM_TEXTS = 8
ROLES: frozenset[Stage] = frozenset({"encode", "prefill", "decode"})
_IMAGE = (448, 448)
_VIDEO = VideoFacts(64, 2.0, 224, 384)
_ANSWER_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Traffic:
    """Says what comes.

    num_media, num_at_once: requests with media of `kind`, and how many of them at a time
    text_tokens: of each text's answer
    """

    kind: str
    num_media: int
    num_at_once: int
    text_tokens: int


@dataclass(slots=True)
class Told:
    """Holds what a lane took: seconds between tokens of texts, and until all was answered."""

    gaps_s: list[float] = field(default_factory=list)
    work_s: float = 0.0


class Worker:
    """Runs a merged worker in this thread."""

    def __init__(self) -> None:
        self._wake = threading.Event()
        settings = WorkerSettings(
            embedded_model_path(),
            EngineConfig(num_kv_tokens=65_536, dtype="float32"),
            enable_prefix_caching=False,
        )
        self.core = WorkerCore(
            "w0", ROLES, settings, LocalTransport(wake=self._wake.set), wake=self._wake.set
        )
        role = self.core.hosted["encode"]
        assert isinstance(role, EncodeRole)
        self._stage = role.stage
        self._lanes = {"in_turn": InTurn(), "beside": self._stage.lane}
        self.adapter = self.core._builder.adapter
        self._ids = itertools.count()
        self._media: dict[str, tuple[Prefill, list[UInt8Array]]] = {}
        self._draws = np.random.default_rng(7)

    def run(self, lane: str, traffic: Traffic) -> Told:
        """Answers the traffic, with all texts decoding before the first media come."""
        self._stage.lane = self._lanes[lane]
        told, last_s = Told(), dict[str, float]()
        texts = {self._submit([], traffic.text_tokens) for _ in range(NUM_TEXTS)}
        while len(last_s) < NUM_TEXTS:
            self._turn(texts, last_s, Told())
        open_ids, num_left = set(texts), traffic.num_media
        start_s = time.perf_counter()
        while open_ids or num_left:
            while num_left and len(open_ids - texts) < traffic.num_at_once:
                open_ids.add(self._submit(self._plans(traffic.kind), _ANSWER_TOKENS))
                num_left -= 1
            open_ids -= self._turn(texts, last_s, told)
        told.work_s = time.perf_counter() - start_s
        return told

    def _plans(self, kind: str) -> list[MediaPlan]:
        if kind == "images":
            return [self.adapter.plan_image(*_IMAGE) for _ in range(4)]
        return [self.adapter.plan_video(_VIDEO, FrameSampling(num_frames=_VIDEO.num_frames))]

    def _submit(self, plans: list[MediaPlan], max_tokens: int) -> str:
        name = f"r{next(self._ids)}"
        hashes = [f"{name} {index}" for index in range(len(plans))]
        prompt = self.adapter.plan_prompt(plans, "What is shown?")
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = GenerateRequest(name, prompt, prompt_identity(prompt, hashes), sampling)
        groups = plan_groups(plans, hashes, model="m", group_tokens=GROUP_TOKENS)
        frames = [
            self._draws.integers(0, 256, (group.plan.num_frames, *group.plan.size, 3), np.uint8)
            for group in groups
        ]
        message = Prefill(request, tuple(groups), None)
        self._media[name] = message, frames
        assert self.core.handle(message)
        return name

    def _turn(self, texts: set[str], last_s: dict[str, float], told: Told) -> set[str]:
        """Advances the worker by one turn; returns the requests that have ended."""
        self._wake.clear()
        has_moved = self.core.step()
        report = self.core.take_report()
        ended: set[str] = set()
        for event in report.events if report else ():
            if isinstance(event, Grant):
                message, frames = self._media[event.request_id]
                order = EncodeGroup(event.request_id, event.ticket, message.groups[event.group])
                assert self.core.handle(order, frames[event.group])
                has_moved = True
        now_s = time.perf_counter()
        for output in report.outputs if report else ():
            name = output.request_id
            if name in texts:
                told.gaps_s += [now_s - last_s[name]] if name in last_s else []
                last_s[name] = now_s
            if output.finish_reason is not None:
                ended.add(name)
                del self._media[name]
        if not has_moved:
            self._wake.wait(0.01)
        return ended


def rows(traffic: Traffic, repeats: int) -> list[Row]:
    """Measures both lanes in turns, with `in_turn` a second time, which says what chance does."""
    worker = Worker()
    told: dict[str, list[Told]] = {"in_turn": [], "beside": [], "in_turn again": []}
    for name in told:  # warm
        worker.run(name.removesuffix(" again"), Traffic(traffic.kind, 1, 1, 8))
    for repeat in range(repeats):
        for name in _turned(list(told), repeat):
            told[name].append(worker.run(name.removesuffix(" again"), traffic))
            print(name, _row(name, told), file=sys.stderr)
    return [_row(name, told) for name in told]


def _turned(names: list[str], number: int) -> Iterator[str]:
    start = number % len(names)
    yield from (*names[start:], *names[:start])


def _row(name: str, told: dict[str, list[Told]]) -> Row:
    mine, first = told[name], told["in_turn"]
    gaps = [np.array(each.gaps_s) * 1e3 for each in mine]
    pairs = list(zip(mine, first, strict=False))
    return {
        "lane": name,
        "gap_p50_ms": round(statistics.median(float(np.median(each)) for each in gaps), 2),
        "gap_p99_ms": round(statistics.median(float(np.percentile(each, 99)) for each in gaps), 2),
        "longest_gap_ms": round(statistics.median(float(each.max()) for each in gaps), 1),
        "work_s": round(statistics.median(each.work_s for each in mine), 3),
        "work_over_in_turn": round(
            median_ratio([each.work_s for each, _ in pairs], [each.work_s for _, each in pairs]), 3
        ) if pairs else None,
        "repeats": len(mine),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="little traffic, one repeat; writes nothing")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default: 1)")
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--section", action="append", help="images, one_at_a_time or videos; may be repeated")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    repeats = 1 if options.quick else options.repeats
    traffic = {
        "images": Traffic("images", 1, 1, 20) if options.quick else Traffic("images", 12, 4, 120),
        "one_at_a_time": Traffic("images", 1, 1, 20) if options.quick else Traffic("images", 12, 1, 120),
        "videos": Traffic("videos", 1, 1, 20) if options.quick else Traffic("videos", 4, 2, 120),
    }
    sections = {
        name: Section(
            f"{NUM_TEXTS} texts of {each.text_tokens} tokens, {each.num_media} requests with {each.kind}, "
            f"{each.num_at_once} at a time",
            lambda each=each: rows(each, repeats),  # type: ignore[misc]
        )
        for name, each in traffic.items()
    }
    run_sections(
        "engine_beside",
        "Answers beside media that a merged worker encodes",
        sections,
        options.section or list(sections),
        lambda: setting(("torch", "transformers", "numpy"), checkpoint="shapes-vl, float32"),
        save=not options.quick,
    )


if __name__ == "__main__":
    main()
