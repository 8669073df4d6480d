"""Live runs of `benchmarks.epd_pays`: the real app with workers that are paced as devices of a profile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast
from zlib import crc32

from benchmarks.epd_pays.mixes import MODEL, VIDEO_FPS, Arrival, Mix
from epd.bench.media import draw_image
from epd.control.elasticity.controller import ControllerConfig
from epd.encoders import FrameSampling
from epd.engine_config import EngineConfig
from epd.errors import EPDError
from epd.kv.scheduling import SchedulerConfig
from epd.planning.space import Settings
from epd.sampling_params import SamplingParams
from epd.serve_app.local.fleet import LocalFleet, LocalFleetConfig
from epd.serve_app.local.pacing import Pace, slowed
from epd.serve_app.media.media_worker import MediaSettings
from epd.serve_app.orchestration.config import OrchestratorConfig
from epd.serve_app.orchestration.orchestrator import Orchestrator
from epd.serve_app.orchestration.request_planner import RequestPlanner
from epd.serve_app.service import AnswerRequest, MediaReference, TokenDelta
from epd.serve_app.worker.worker_stages import WorkerSettings
from epd.stages.visual_inputs import VisualInputs
from epd.topology import parse_topology
from epd.video import FetchPolicy
from epd.workload.requests import Resolution
from tests.media import write_video

MAX_TOKENS_LIVE = 32_768  # of keys and values, and of embeddings: never what binds


@dataclass(frozen=True, slots=True)
class Layout:
    """A deployment. settings: in patches and tokens of the device.

    is_overlapped: whether prefill begins before all of a request is encoded
    is_elastic: whether roles follow the load
    """

    topology: str
    settings: Settings
    is_overlapped: bool = True
    is_elastic: bool = False


@dataclass(frozen=True, slots=True)
class Times:
    """Times of one answer, seconds of the device. Infinite where there was no answer.

    gap_s: the longest between two of its tokens
    """

    has_media: bool
    ttft_s: float
    tpot_s: float
    gap_s: float


@dataclass(frozen=True, slots=True)
class Round:
    """Holds a round. late_share: of passes whose own work took longer than the device's."""

    times: tuple[Times, ...]
    late_share: float = 0.0
    num_switches: int = 0


@contextmanager
def not_overlapped() -> Iterator[None]:
    """Lets prefill begin only when all of a request is encoded."""
    num_ready = VisualInputs.num_ready

    def whole(inputs: VisualInputs) -> int:
        ready = cast(property, num_ready).fget(inputs)  # type: ignore[misc]
        return ready if ready == inputs._num_prompt_tokens else 0

    cast(Any, VisualInputs).num_ready = property(whole)
    try:
        yield
    finally:
        cast(Any, VisualInputs).num_ready = num_ready


@dataclass(slots=True)
class _Answer:
    sent_s: float
    tokens_s: list[float] = field(default_factory=list)

    def times(self, has_media: bool, num_tokens: int, dilate: float) -> Times:
        if len(self.tokens_s) < num_tokens:
            return Times(has_media, *(float("inf"),) * 3)
        gaps = [after - before for before, after in zip(self.tokens_s, self.tokens_s[1:], strict=False)]
        seconds = (self.tokens_s[0] - self.sent_s, sum(gaps) / max(1, len(gaps)), max(gaps, default=0.0))
        return Times(has_media, *(round(each / dilate, 5) for each in seconds))


Media = Mapping[str, Sequence[MediaReference]]


class Load:
    """Sends requests to one app. media: of each request, by its name; new to the app."""

    def __init__(self, service: Orchestrator, media: Media, dilate: float) -> None:
        self._service = service
        self._media = media
        self._dilate = dilate

    async def run(self, arrivals: Sequence[Arrival]) -> tuple[Times, ...]:
        """Sends requests at their times, and waits for their answers."""
        asking, start = list[asyncio.Task[Times]](), time.perf_counter()
        for each in arrivals:
            due = start + each.at_s * self._dilate
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            asking.append(asyncio.create_task(self._ask(each, due)))
        return tuple(await asyncio.gather(*asking))

    async def _ask(self, arrival: Arrival, due: float) -> Times:
        answer, kind, name = _Answer(due), arrival.kind, arrival.name
        params = SamplingParams(max_tokens=kind.num_tokens, ignore_eos=True)
        frames = FrameSampling(num_frames=kind.num_frames or None)
        try:
            async with self._service.media.sources(name, self._media[name]) as sources:
                request = AnswerRequest(name, "shapes-vl", (kind.message(name),), sources, params, frames)
                async with aclosing(self._service.answer(request)) as items_of:
                    async for items in items_of:
                        now_s = time.perf_counter()
                        for item in items:
                            if isinstance(item, TokenDelta):
                                answer.tokens_s += [now_s] * len(item.token_ids)
        except EPDError as error:
            print(f"{name}: {error}", flush=True)
        return answer.times(bool(kind.media), kind.num_tokens, self._dilate)


def drawn(arrivals: Sequence[Arrival], folder: Path) -> dict[str, Sequence[MediaReference]]:
    """Writes the media of requests, those of each request unlike all others. Returns what refers to them."""
    return {
        each.name: [_drawn(each, place, folder) for place in range(len(each.kind.media))] for each in arrivals
    }


def _drawn(arrival: Arrival, place: int, folder: Path) -> MediaReference:
    kind, is_image = arrival.kind, arrival.kind.media[place] == "image"
    path = folder / f"{arrival.name}-{place}.{'png' if is_image else 'mp4'}"
    seed = crc32(path.name.encode())
    if is_image:
        draw_image(path, seed, Resolution(kind.side, kind.side), "png")
        return MediaReference("image", path.as_uri(), "image")
    size = {"height": kind.side, "width": kind.side}
    write_video(path, num_frames=kind.num_frames, fps=VIDEO_FPS, seed=seed, **size)
    return MediaReference("video", path.as_uri(), "video")


def fleet_of(mix: Mix, layout: Layout, media: MediaSettings, pace: Pace, dilate: float) -> LocalFleet:
    """Returns threads with the limits of the layout, by the patches and tokens of shapes-vl."""
    settings = layout.settings
    workers = {worker.name: worker.roles for worker in parse_topology(layout.topology).workers()}
    workers["v0"] = frozenset({"video"})

    def limits(num_seqs: int) -> SchedulerConfig:
        chunk = settings.chunk_tokens // mix.tokens
        return SchedulerConfig(max(chunk, num_seqs), num_seqs, chunk)

    return LocalFleet(
        LocalFleetConfig(workers, media=media, hang_s=60 * max(1.0, dilate)),
        WorkerSettings(
            MODEL,
            EngineConfig(num_kv_tokens=MAX_TOKENS_LIVE),
            num_embeddings=MAX_TOKENS_LIVE,
            scheduler=limits(settings.language_seqs),
            decode_scheduler=limits(settings.decode_seqs),
            max_batch_patches=max(1, settings.encode_patches // mix.patches),
            encode_beside=False,  # a worker's stages share its device, and a pause is no work beside others
            pace=pace,
        ),
    )


def run_live(mix: Mix, layout: Layout, arrivals: Sequence[Arrival], folder: Path, dilate: float) -> Round:
    """Runs one round with workers of its own. folder: for media."""
    warm = [replace(each, at_s=0.0, name=f"warm-{each.name}") for each in arrivals[:2]]
    media = drawn([*warm, *arrivals], folder)
    pace = Pace(mix.live_profile, dilate)
    with nullcontext() if layout.is_overlapped else not_overlapped():
        return asyncio.run(_run_live(mix, layout, (warm, arrivals), folder, media, pace, dilate))


async def _run_live(
    mix: Mix,
    layout: Layout,
    parts: tuple[Sequence[Arrival], Sequence[Arrival]],
    folder: Path,
    media: Media,
    pace: Pace,
    dilate: float,
) -> Round:
    fleet = fleet_of(mix, layout, MediaSettings(MODEL, FetchPolicy(media_folder=folder)), pace, dilate)
    planner = RequestPlanner(MODEL, "shapes-vl", group_tokens=mix.group_tokens)
    service = Orchestrator(fleet, planner, _config(layout, dilate))
    await service.start()
    try:
        load = Load(service, media, dilate)
        await load.run(parts[0])
        pace.reset()
        times = await load.run(parts[1])
        switches = [each for each in service.switcher.last if not each.error]
        return Round(times, pace.late_share, len(switches))
    finally:
        await service.close()


def _config(layout: Layout, dilate: float) -> OrchestratorConfig:
    return OrchestratorConfig(
        max_waiting=4096,
        max_wait_s=600 * max(1.0, dilate),
        stall_timeout_s=180 * max(1.0, dilate),
        sharding=layout.settings.sharding,
        elastic=slowed(ControllerConfig(), dilate) if layout.is_elastic else None,
    )
