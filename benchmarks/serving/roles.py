"""Changes of roles in the running app: what each kind takes, and whether roles that follow the load pay.

    python -m benchmarks.serving.roles [--quick] [--section switches|weights|elastic|paced]

switches: worker processes on Ray with shapes-vl change roles in a circle, idle and while answers are made;
medians of each phase. A switch from decode under load moves its answers; then the tokens are compared too.
weights: a role's weights from the checkpoint and from the memory that workers share, in turns.
elastic: short answers about images, then long ones, open loop at a rate that one decode worker cannot keep
up with; rounds with the layout as it is and with roles that follow the load, in turns, on one fleet. All
processes share the cores of the machine: another decode worker adds no computing power once they are busy.
paced: the same with workers as threads that wait until a pass has taken as long as in PASS_S, as if each had
a device of its own. Tokens, queues and switches are real, the speed of the devices is not.
Results go to benchmarks/results/roles.{json,md}.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
import torch
from ray import serve

from benchmarks.reporting import Row, Section, median_ratio, run_sections, setting
from epd.bench.media import draw_image
from epd.chat import ChatMessage, ContentPart
from epd.control.elasticity.controller import ControllerConfig, RoleController
from epd.encoders import FrameSampling
from epd.engine_config import EngineConfig
from epd.kv.pass_limits import PassLimits
from epd.models import embedded_model_path
from epd.sampling_params import SamplingParams
from epd.serve_app.app import build_app
from epd.serve_app.app_args import AppArgs
from epd.serve_app.local.fleet import LocalFleet, LocalFleetConfig
from epd.serve_app.media.media_worker import MediaSettings
from epd.serve_app.network.members import ProcessAddress, Purpose
from epd.serve_app.network.remote_fleet import RemoteFleet
from epd.serve_app.orchestration.orchestrator import Orchestrator
from epd.serve_app.orchestration.request_planner import RequestPlanner
from epd.serve_app.ray.board import RayBoard
from epd.serve_app.ray.cluster import LOOPBACK, RaySettings, ray_cluster
from epd.serve_app.ray.server import APP_NAME
from epd.serve_app.service import AnswerRequest, MediaReference, TokenDelta
from epd.serve_app.service_status import RoleSwitch
from epd.serve_app.worker.worker_core import WorkerCore
from epd.serve_app.worker.worker_settings import WorkerSettings
from epd.stages.loading.weight_files import write_weights
from epd.stages.loading.weights import WholeModel, load_role
from epd.stages.placement import CPU_FLOAT32
from epd.topology import STAGES, Stage, parse_topology, role_letters
from epd.video import FetchPolicy
from epd.workload.requests import Resolution

MODEL = embedded_model_path()
# Every kind once, from 1e1p2d back to it.
CIRCLES = ((("d", "p"), ("p", "e"), ("e", "d")), (("d", "e"), ("e", "p"), ("p", "d")))
NUM_SEATS = 8  # answers that a decode worker makes at once
LONG_TOKENS, SHORT_TOKENS = 240, 4
# Seconds of one pass of a paced worker, and tokens of its long answers.
PASS_S: Mapping[Stage, float] = {"encode": 0.05, "prefill": 0.05, "decode": 0.06}
PACED_TOKENS = 60
OVERLOAD = 1.35  # arrivals of long answers, by what one decode worker can do
IMAGES_PER_S = 4.0


@dataclass
class App:
    """An orchestrator of this process over worker processes. folder: for media."""

    service: Orchestrator
    fleet: RemoteFleet | LocalFleet
    folder: Path
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    def with_role(self, letter: str) -> list[str]:
        return [name for name, info in self.fleet.workers.items() if role_letters(info.roles) == letter]

    async def switch(self, before: str, after: str) -> RoleSwitch:
        """The last worker of a role takes another one."""
        return await self.service.switch_roles(self.with_role(before)[-1], roles_of(after))

    async def switch_under_load(self, before: str, after: str) -> RoleSwitch:
        """While answers are made; they are compared with the same ones made in peace."""
        params = SamplingParams(max_tokens=120, ignore_eos=True, temperature=0.7, seed=3)
        texts = [f"Tell me about {number}" for number in range(NUM_SEATS // 2)]
        asking = asyncio.gather(*(self.ask(text, 0, params) for text in texts), self.ask("Where?", 2, params))
        while sum(each.answer.has_begun for each in self.service.attempts.values()) < len(texts):
            await asyncio.sleep(0.002)
        switch = await self.switch(before, after)
        tokens = [answer for _, answer in (await asking)[:-1]]
        again = await asyncio.gather(*(self.ask(text, 0, params) for text in texts))
        if tokens != [answer for _, answer in again]:
            raise SystemExit(f"tokens differ after {switch.line()}")
        return switch

    async def ask(self, text: str, num_images: int, params: SamplingParams) -> tuple[float, list[int]]:
        """Seconds until the whole answer was there, and its tokens. Images are new ones."""
        number = next(self.numbers)
        paths = [self.folder / f"{number}-{index}.png" for index in range(num_images)]
        for index, path in enumerate(paths):
            draw_image(path, 1000 * number + index, Resolution(224, 224), "png")
        references = [MediaReference("image", path.as_uri(), "image") for path in paths]
        message = ChatMessage("user", (*(ContentPart("image") for _ in paths), ContentPart("text", text)))
        start, tokens = time.perf_counter(), list[int]()
        async with self.service.media.sources(f"q{number}", references) as sources:
            request = AnswerRequest(f"q{number}", "shapes-vl", (message,), sources, params, FrameSampling())
            async with aclosing(self.service.answer(request)) as answer:
                async for items in answer:
                    for item in items:
                        if isinstance(item, TokenDelta):
                            tokens += item.token_ids
        return time.perf_counter() - start, tokens


def roles_of(letters: str) -> frozenset[Stage]:
    return frozenset(stage for stage in STAGES if stage[0] in letters)


SETTINGS = WorkerSettings(
    MODEL,
    EngineConfig(num_kv_tokens=16_384),
    num_embeddings=16_384,
    decode_scheduler=PassLimits(max_num_seqs=NUM_SEATS),
)


MEDIA = MediaSettings(MODEL, FetchPolicy(media_folder=Path(tempfile.gettempdir())))


def workers_of(topology: str) -> dict[str, frozenset[Stage]]:
    workers = {worker.name: worker.roles for worker in parse_topology(topology).workers()}
    return workers | {"v0": frozenset({"video"})}


def running(topology: str) -> AbstractAsyncContextManager[App]:
    """Worker processes on Ray, with a front in this process."""
    return _running_on_ray(topology)


@asynccontextmanager
async def _running_on_ray(topology: str) -> AsyncIterator[App]:
    args = AppArgs(
        topology=topology,
        num_kv_tokens=SETTINGS.engine.num_kv_tokens,
        decode_max_num_seqs=NUM_SEATS,
        allowed_media_path=Path(tempfile.gettempdir()),
    )
    await asyncio.to_thread(serve.run, build_app(args), name=APP_NAME)
    place = ProcessAddress(LOOPBACK, ray.get_runtime_context().get_node_id())
    board = RayBoard(APP_NAME)
    fleet = RemoteFleet(board, place, Purpose(str(args.model_path)))
    try:
        async with _running(fleet, fleet.owner) as app:
            while not (await app.service.status()).is_ready:
                await asyncio.sleep(0.05)
            yield app
    finally:
        await asyncio.to_thread(serve.delete, APP_NAME)


def running_threads(topology: str) -> AbstractAsyncContextManager[App]:
    return _running(LocalFleet(LocalFleetConfig(workers_of(topology), media=MEDIA), SETTINGS))


@asynccontextmanager
async def _running(fleet: RemoteFleet | LocalFleet, owner: str = "") -> AsyncIterator[App]:
    service = Orchestrator(fleet, RequestPlanner(MODEL, "shapes-vl"), owner=owner)
    with tempfile.TemporaryDirectory() as folder:
        try:
            await service.start()
            yield App(service, fleet, Path(folder))
        finally:
            await service.close()


# Kinds of switches


def switch_rows(num_rounds: int) -> list[Row]:
    with ray_cluster(RaySettings()):
        return asyncio.run(_switch_rows(num_rounds))


async def _switch_rows(num_rounds: int) -> list[Row]:
    done: dict[tuple[str, str], list[RoleSwitch]] = {}
    async with running("1e1p2d") as app:
        await app.ask("How many?", 1, SamplingParams(max_tokens=4))
        for load in ("idle", "answers under way") * num_rounds:
            for before, after in itertools.chain(*CIRCLES):
                switching = app.switch if load == "idle" else app.switch_under_load
                switch = await switching(before, after)
                done.setdefault((switch.kind, load), []).append(switch)
    return [_phases(kind, load, switches) for (kind, load), switches in sorted(done.items())]


def _phases(kind: str, load: str, switches: Sequence[RoleSwitch]) -> Row:
    def milliseconds(name: str) -> float:
        return round(1000 * statistics.median(getattr(switch, name) for switch in switches), 1)

    return {
        "kind": kind,
        "load": load,
        "num": len(switches),
        **{f"{name}_ms": milliseconds(f"{name}_s") for name in ("total", "offload", "migrate", "onload")},
        "weights_ms": milliseconds("weights_s"),
        "max_total_ms": round(1000 * max(switch.total_s for switch in switches), 1),
        "moved": sum(switch.num_moved for switch in switches),
        "handed_on": sum(switch.num_handed_on for switch in switches),
        "redone": sum(switch.num_redone for switch in switches),
    }


# Weights


def weight_rows(num_repeats: int) -> list[Row]:
    rows = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        weights = Path(folder) / "weights"
        write_weights(MODEL, torch.float32, weights)
        whole = WholeModel(MODEL, CPU_FLOAT32, weights)
        for role in ("encode", "language"):
            seconds: dict[str, list[float]] = {"read": [], "mapped": []}
            for _ in range(num_repeats):
                start = time.perf_counter()
                load_role(MODEL, role, CPU_FLOAT32)
                middle = time.perf_counter()
                whole.part(role)
                seconds["read"].append(middle - start)
                seconds["mapped"].append(time.perf_counter() - middle)
            rows.append(
                {
                    "role": role,
                    "read_ms": round(1000 * statistics.median(seconds["read"]), 2),
                    "mapped_ms": round(1000 * statistics.median(seconds["mapped"]), 3),
                    "ratio": round(median_ratio(seconds["read"], seconds["mapped"])),
                }
            )
    return rows


# Roles that follow the load


@dataclass(frozen=True, slots=True)
class Phase:
    """Requests at a steady rate. seconds: of arrivals."""

    num_images: int
    max_tokens: int
    per_s: float
    seconds: float

    async def run(self, app: App) -> list[float]:
        """Seconds that each answer took."""
        params = SamplingParams(max_tokens=self.max_tokens, ignore_eos=True)
        asking = []
        for number in range(round(self.per_s * self.seconds)):
            asking.append(asyncio.ensure_future(app.ask(f"What is {number}?", self.num_images, params)))
            await asyncio.sleep(1 / self.per_s)
        return [seconds for seconds, _ in await asyncio.gather(*asking)]


def elastic_rows(num_rounds: int, phase_s: float) -> list[Row]:
    with ray_cluster(RaySettings()):
        return asyncio.run(_elastic_rows(num_rounds, phase_s))


def paced_rows(num_rounds: int, phase_s: float) -> list[Row]:
    build = WorkerCore._build

    def build_paced(core: WorkerCore, stage: Stage) -> Any:
        role: Any = build(core, stage)
        role.stage.step = _paced(role.stage.step, PASS_S[stage])
        return role

    WorkerCore._build = build_paced  # type: ignore[method-assign]
    try:
        return asyncio.run(_elastic_rows(num_rounds, phase_s, running_threads, PACED_TOKENS))
    finally:
        WorkerCore._build = build  # type: ignore[method-assign]


def _paced(step: Callable[[], Any], pass_s: float) -> Callable[[], Any]:
    """A stage's step that takes at least so long when it has computed anything."""

    def paced() -> Any:
        start = time.perf_counter()
        result = step()
        if result if isinstance(result, int) else result.num_tokens:
            time.sleep(max(0.0, pass_s - (time.perf_counter() - start)))
        return result

    return paced


Running = Callable[[str], AbstractAsyncContextManager[App]]


async def _elastic_rows(
    num_rounds: int, phase_s: float, run: Running = running, num_tokens: int = LONG_TOKENS
) -> list[Row]:
    rows = []
    async with run("3e1p1d") as app:
        long_per_s = OVERLOAD * await _long_answers_per_s(app, num_tokens)
        phases = [
            Phase(2, SHORT_TOKENS, IMAGES_PER_S, phase_s / 2),
            Phase(0, num_tokens, long_per_s, phase_s),
        ]
        for number in range(2 * num_rounds):
            is_elastic = number % 4 in (1, 2)  # static, elastic, elastic, static, ...
            rows.append(await _round(app, phases, is_elastic=is_elastic))
    return _compared(rows)


async def _long_answers_per_s(app: App, num_tokens: int) -> float:
    """By one decode worker with all its seats taken, from a closed loop."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    await asyncio.gather(*(app.ask(f"warm {number}", 1, params) for number in range(NUM_SEATS)))
    start = time.perf_counter()
    await asyncio.gather(*(app.ask(f"measure {number}", 0, params) for number in range(3 * NUM_SEATS)))
    return 3 * NUM_SEATS / (time.perf_counter() - start)


async def _round(app: App, phases: Sequence[Phase], *, is_elastic: bool) -> Row:
    elastic = app.service.elastic
    num_before = len(app.service.switcher.last)
    if is_elastic:
        elastic.controller = RoleController(ControllerConfig())
        elastic.start()
    seconds = [await phase.run(app) for phase in phases]
    elastic.controller = None
    while app.service.switcher.in_flight:
        await asyncio.sleep(0.05)
    topology = (await app.service.status()).topology
    switches = list(app.service.switcher.last)[num_before:]
    for switch in reversed([each for each in switches if not each.error]):  # as it was
        await app.service.switch_roles(switch.worker, roles_of(switch.before))
    return {
        "layout": "elastic" if is_elastic else "static",
        "requests": sum(map(len, seconds)),
        "topology_at_the_end": topology,
        "mean_s": statistics.mean(itertools.chain(*seconds)),
        "mean_short_s": statistics.mean(seconds[0]),
        "mean_long_s": statistics.mean(seconds[1]),
        "long_per_s": round(phases[1].per_s, 2),
        "switches": ", ".join(f"{each.worker} {each.kind}" for each in switches) or "none",
    }


def _compared(rows: list[Row]) -> list[Row]:
    """With the ratio of each pair of rounds, static by elastic, and the median of all."""
    by_layout = {name: [row for row in rows if row["layout"] == name] for name in ("static", "elastic")}
    ratios: list[float] = []
    for static, elastic in zip(by_layout["static"], by_layout["elastic"], strict=True):
        ratios.append(static["mean_s"] / elastic["mean_s"])
        static["static_by_elastic"] = ""
        elastic["static_by_elastic"] = round(ratios[-1], 2)
    for row in rows:
        row |= {name: round(row[name], 2) for name in ("mean_s", "mean_short_s", "mean_long_s")}
    median = dict.fromkeys(rows[0], "") | {
        "layout": "median of the ratios",
        "static_by_elastic": round(statistics.median(ratios), 2),
    }
    return [*rows, median]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few repeats; results are not kept")
    parser.add_argument("--section", choices=("switches", "weights", "elastic", "paced"), action="append")
    options = parser.parse_args()
    few = options.quick
    sections = {
        "switches": Section("Switches by kind, milliseconds (medians)", lambda: switch_rows(1 if few else 4)),
        "weights": Section("A role's weights", lambda: weight_rows(3 if few else 15)),
        "paced": Section(
            "The same with paced workers",
            lambda: paced_rows(1 if few else 2, 10.0 if few else 40.0),
        ),
        "elastic": Section(
            "3e1p1d, short answers about images, then long ones",
            lambda: elastic_rows(1 if few else 3, 10.0 if few else 40.0),
        ),
    }
    run_sections(
        "roles",
        "Changes of roles",
        sections,
        options.section or list(sections),
        lambda: setting(("torch", "transformers", "ray"), model="shapes-vl", seats=NUM_SEATS),
        save=not few,
    )


if __name__ == "__main__":
    main()
