"""How long messages to workers wait, and what users feel of it: images at a local fleet, one commit or two.

    python -m benchmarks.front.message_waits [--quick] [--against CHECKOUT ...] [--topology 1epd] [--rounds N]
                                       [--per-second N] [--pass-ms N]

An orchestrator over workers as threads of one process, without HTTP, with the embedded model. Questions about
one new image each come from a closed loop, 1 or 8 at a time, or by chance so many per second, with answers of
16 tokens. Each checkout has a process of its own; they take turns in every round, so ratios are medians of
the ratios within a round. A closed loop falls into step and out of it: give a copy of the same code with
--against too, to see what chance does.

--pass-ms: workers that only decode pause after each pass and take no message in it, as while a GPU computes.

grant_ms: from the prompt's submission until the first group is granted. reserve_ms, prefill_ms, encode_ms:
until a worker has answered the message. messages: to stage workers, per request.
Results go to benchmarks/results/message_waits.{json,md}.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import subprocess
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image

from benchmarks.reporting import Row, Section, run_sections, setting
from epd.bench.media import draw_image
from epd.chat import ChatMessage, ContentPart
from epd.encoders import FrameSampling
from epd.engine_config import EngineConfig
from epd.models import embedded_model_path
from epd.sampling_params import SamplingParams
from epd.serve_app.fleet import FleetEvent
from epd.serve_app.local.fleet import LocalFleet, LocalFleetConfig
from epd.serve_app.media.media_worker import MediaSettings
from epd.serve_app.messages import Prefill, WorkerReport
from epd.serve_app.orchestration.orchestrator import Orchestrator
from epd.serve_app.orchestration.request_planner import RequestPlanner
from epd.serve_app.service import AnswerRequest, MediaReference, TokenDelta
from epd.serve_app.worker.worker_core import WorkerCore
from epd.serve_app.worker.worker_roles import DecodeRole
from epd.serve_app.worker.worker_stages import WorkerSettings
from epd.stages.engine.generation import StepResult
from epd.topology import parse_topology
from epd.transfer.transfers import Grant
from epd.video import FetchPolicy
from epd.workload.requests import Resolution

MODEL = embedded_model_path()
TOPOLOGIES = ("1epd", "1ep1d", "1e1p1d")
_SIDE = 448
_ANSWER_TOKENS = 16
_ANSWER = SamplingParams(max_tokens=_ANSWER_TOKENS, ignore_eos=True)
_WAITS = ("Grant", "Reserve", "Prefill", "EncodeGroup")


class WatchedFleet(LocalFleet):
    """Keeps how long each message waited for its reply, by kind; of grants, since the prompt was sent."""

    def __init__(self, config: LocalFleetConfig, settings: WorkerSettings) -> None:
        super().__init__(config, settings)
        self.waits_s: dict[str, list[float]] = defaultdict(list)
        self._sent_s: dict[str, float] = {}

    async def send(self, stage: Any, target: str, message: Any, bulk: Any = None) -> Any:
        start_s = time.perf_counter()
        if isinstance(message, Prefill):
            self._sent_s[message.request.request_id] = start_s
        try:
            return await super().send(stage, target, message, bulk)
        finally:
            if stage != "video":
                self.waits_s[type(message).__name__].append(time.perf_counter() - start_s)

    async def events(self) -> AsyncIterator[FleetEvent]:
        async for event in super().events():
            for each in event.events if isinstance(event, WorkerReport) else ():
                if isinstance(each, Grant) and each.request_id in self._sent_s:
                    sent_s = self._sent_s.pop(each.request_id)
                    self.waits_s["Grant"].append(time.perf_counter() - sent_s)
            yield event


class Asker:
    """Asks about images that nobody has seen."""

    def __init__(self, service: Orchestrator, folder: Path) -> None:
        self._service = service
        self._folder = folder
        self._numbers = itertools.count(os.getpid())
        self._picture: Image.Image | None = None

    def drawn(self) -> Path:
        """Returns a new image: of a picture drawn once, whose first pixels say which it is."""
        number = next(self._numbers)
        path = self._folder / f"{number}.png"
        if self._picture is None:
            draw_image(path, number, Resolution(_SIDE, _SIDE), "png")
            self._picture = Image.open(path).convert("RGB")
        self._picture.putpixel((0, 0), (number % 256, number // 256 % 256, number // 65_536 % 256))
        self._picture.save(path, compress_level=1)
        return path

    async def ask(self, path: Path) -> tuple[float, float]:
        """Returns seconds until the first token, and until the last."""
        number = path.stem
        message = ChatMessage("user", (ContentPart("image"), ContentPart("text", "What is shown?")))
        reference = MediaReference("image", path.as_uri(), "image")
        start_s, first_s = time.perf_counter(), 0.0
        async with self._service.media.sources(f"q{number}", [reference]) as sources:
            request = AnswerRequest(f"q{number}", "shapes-vl", (message,), sources, _ANSWER, FrameSampling())
            async with aclosing(self._service.answer(request)) as answer:
                async for items in answer:
                    if any(isinstance(item, TokenDelta) for item in items):
                        first_s = first_s or time.perf_counter() - start_s
        path.unlink()
        return first_s, time.perf_counter() - start_s


def _slow_down(core: WorkerCore, pass_s: float) -> None:
    """Lets the passes of a decode worker take longer, in which it takes no message."""
    role = core.hosted["decode"]
    assert isinstance(role, DecodeRole)
    step = role.stage.step

    def slow() -> StepResult:
        result = step()
        time.sleep(pass_s if result.num_tokens else 0.0)
        return result

    role.stage.step = slow  # type: ignore[method-assign]
    if hasattr(role.stage.engine, "call_between_layers"):  # earlier commits take no message in a pass
        role.stage.engine.call_between_layers(lambda: None)


async def _serve_rounds(topology: str, pass_s: float) -> None:
    """Runs rounds as they are asked for on the standard input, and prints a row for each."""
    workers = {worker.name: worker.roles for worker in parse_topology(topology).workers()}
    media = MediaSettings(MODEL, FetchPolicy(media_folder=Path(tempfile.gettempdir())))
    config = LocalFleetConfig(workers | {"v0": frozenset({"video"})}, media=media)
    fleet = WatchedFleet(
        config, WorkerSettings(MODEL, EngineConfig(num_kv_tokens=16_384), num_embeddings=16_384)
    )
    service = Orchestrator(fleet, RequestPlanner(MODEL, "shapes-vl"))
    with tempfile.TemporaryDirectory() as folder:
        try:
            await service.start()
            for name in workers if pass_s else ():
                if workers[name] == {"decode"}:
                    _slow_down(fleet.core(name), pass_s)
            asker = Asker(service, Path(folder))
            while line := await asyncio.to_thread(sys.stdin.readline):
                row = await _round(asker, fleet, Round(*json.loads(line)))
                print(json.dumps(row), flush=True)
        finally:
            await service.close()


class Round(NamedTuple):
    """Says which requests come: `num_at_once`, the next as one is answered, or `per_s` in the mean."""

    num_requests: int
    num_at_once: int
    per_s: float = 0.0
    seed: int = 0


async def _answers(asker: Asker, round_: Round) -> list[tuple[float, float]]:
    images = [asker.drawn() for _ in range(round_.num_requests)]
    answers: list[tuple[float, float]] = []

    async def loop() -> None:
        while images:
            answers.append(await asker.ask(images.pop()))

    if not round_.per_s:
        await asyncio.gather(*(loop() for _ in range(round_.num_at_once)))
        return answers
    gaps, asking = random.Random(round_.seed), list[asyncio.Task[tuple[float, float]]]()
    for image in images:
        asking.append(asyncio.create_task(asker.ask(image)))
        await asyncio.sleep(gaps.expovariate(round_.per_s))
    return await asyncio.gather(*asking)


async def _round(asker: Asker, fleet: WatchedFleet, round_: Round) -> Row:
    fleet.waits_s.clear()
    start_s = time.perf_counter()
    answers = await _answers(asker, round_)
    seconds = time.perf_counter() - start_s
    num_messages = sum(len(waits) for name, waits in fleet.waits_s.items() if name != "Grant")
    return {
        "requests_per_s": len(answers) / seconds,
        "ttft_ms": 1e3 * statistics.median(first for first, _ in answers),
        "tpot_ms": 1e3 * statistics.median((last - first) / (_ANSWER_TOKENS - 1) for first, last in answers),
        **{
            f"{name.lower().removesuffix('group')}_ms": 1e3 * statistics.median(fleet.waits_s[name])
            for name in _WAITS
            if fleet.waits_s[name]
        },
        "messages": num_messages / len(answers),
    }


class Checkout:
    """Is a process that runs rounds with the code of a checkout."""

    def __init__(self, folder: Path, topology: str, pass_ms: float) -> None:
        self._process = subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).resolve()),
                "--rounds-of",
                topology,
                "--pass-ms",
                str(pass_ms),
            ],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def round(self, round_: Round) -> Row:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(round_), file=self._process.stdin, flush=True)
        row: Row = json.loads(self._process.stdout.readline())
        return row

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


@contextmanager
def _running(folders: Sequence[Path], topology: str, pass_ms: float) -> Iterator[list[Checkout]]:
    running = [Checkout(folder, topology, pass_ms) for folder in folders]
    try:
        yield running
    finally:
        for each in running:
            each.close()


def rows(
    folders: Sequence[Path],
    topologies: Sequence[str],
    loads: Sequence[Round],
    num_rounds: int,
    pass_ms: float = 0.0,
) -> list[Row]:
    """Measures all topologies, the checkouts in turns within each round."""
    found = []
    for topology in topologies:
        with _running(folders, topology, pass_ms) as running:
            for each in running:  # warm
                each.round(Round(16, 8))
            for load in loads:
                rounds: list[list[Row]] = [[] for _ in running]
                for number in range(num_rounds):
                    for place in range(len(running)):
                        index = (place + number) % len(running)
                        rounds[index].append(running[index].round(load._replace(seed=number)))
                names = [f"before {index + 1}" for index in range(len(rounds) - 1)] + ["now"]
                found += [_row(topology, load, index, names, rounds) for index in range(len(rounds))]
                print(*found[-len(rounds) :], sep="\n", file=sys.stderr)
    return found


def _row(
    topology: str, load: Round, index: int, names: Sequence[str], rounds: Sequence[Sequence[Row]]
) -> Row:
    """Sums up the rounds of a checkout; ratios are to the first one, within each round."""
    mine, first = rounds[index], rounds[0]

    def ratio(name: str) -> float:
        ratios = [float(a[name]) / float(b[name]) for a, b in zip(mine, first, strict=True)]
        return round(statistics.median(ratios), 3)

    medians = {name: round(statistics.median(each[name] for each in mine), 2) for name in mine[0]}
    return {
        "topology": topology,
        "load": f"{load.per_s:g} per second" if load.per_s else f"{load.num_at_once} in flight",
        "code": names[index],
        **medians,
        "ttft_ratio": ratio("ttft_ms"),
        "tpot_ratio": ratio("tpot_ms"),
        "requests_ratio": ratio("requests_per_s"),
        "rounds": len(mine),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="little traffic, one round; writes nothing")
    parser.add_argument(
        "--against",
        type=Path,
        action="append",
        default=[],
        help="a checkout of another commit, before ours; may be repeated, ratios are to the first",
    )
    parser.add_argument("--topology", action="append", help=f"of {', '.join(TOPOLOGIES)}; may be repeated")
    parser.add_argument("--in-flight", type=int, action="append", help="by default 1 and 8; may be repeated")
    parser.add_argument("--per-second", type=float, default=0.0, help="by chance, in place of --in-flight")
    parser.add_argument("--pass-ms", type=float, default=0.0, help="pause of decode workers after each pass")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--requests", type=int, default=48, help="of a round with 8 at a time (default: 48)")
    parser.add_argument("--rounds-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.rounds_of:
        asyncio.run(_serve_rounds(options.rounds_of, options.pass_ms / 1e3))
        return
    here = Path(__file__).resolve().parents[2]
    folders = [*(each.resolve() for each in options.against), here]
    num_rounds, num_requests = (1, 16) if options.quick else (options.rounds, options.requests)
    topologies = options.topology or TOPOLOGIES
    at_once = options.in_flight or (1, 8)
    loads = [Round(num_requests // 2 if num == 1 else num_requests, num) for num in at_once]
    if options.per_second:
        loads = [Round(num_requests, 0, options.per_second)]
    title = f"Questions about one image of {_SIDE} x {_SIDE} each, answers of {_ANSWER_TOKENS} tokens"
    sections = {
        "images": Section(title, lambda: rows(folders, topologies, loads, num_rounds, options.pass_ms))
    }
    run_sections(
        "message_waits",
        "Waits of messages to workers",
        sections,
        list(sections),
        lambda: setting(("torch", "transformers", "numpy"), checkpoint="shapes-vl, float32"),
        save=not options.quick,
    )


if __name__ == "__main__":
    main()
