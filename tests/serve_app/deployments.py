"""Deployments of real stages in threads, and the questions that are put to them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from epd.chat import ChatMessage, ContentPart
from epd.control.routing import InFlight
from epd.encoders import FrameSampling
from epd.engine_config import EngineConfig
from epd.kv.pass_limits import PassLimits
from epd.sampling_params import SamplingParams
from epd.serve_app.local.fleet import LocalFleet, LocalFleetConfig
from epd.serve_app.media.media_worker import MediaSettings
from epd.serve_app.orchestration.config import OrchestratorConfig, SwitchLimits
from epd.serve_app.orchestration.orchestrator import Orchestrator
from epd.serve_app.orchestration.request_planner import RequestPlanner
from epd.serve_app.service import (
    AnswerEnd,
    AnswerItem,
    AnswerRequest,
    MediaSource,
    StageSpan,
    TokenDelta,
    TokenLogprob,
)
from epd.serve_app.worker.prefill_role import PrefillRole
from epd.serve_app.worker.worker_core import WorkerCore
from epd.serve_app.worker.worker_roles import EncodeRole
from epd.serve_app.worker.worker_settings import WorkerSettings
from epd.topology import Stage
from epd.video import media_kind
from tests.clear_draws import clear_draws, close_draws
from tests.engine_options import parted
from tests.serve_app.held_answers import HeldAnswers
from tests.serve_app.media_fleet import ANY_FILE, reference_to, unheld
from tests.serve_app.server import NEVER_S as NEVER_S  # others have it from here

LETTERS: dict[str, Stage] = {"v": "video", "e": "encode", "p": "prefill", "d": "decode"}
NUM_FRAMES = 6
MAX_TOKENS = 10
_numbers = itertools.count()


def workers_of(topology: str) -> dict[str, frozenset[Stage]]:
    """ "2e1p1d" as workers e0, e1, p0, d0, and a video decoder v0."""
    workers: dict[str, frozenset[Stage]] = {"v0": frozenset({"video"})}
    number = ""
    for digits, group in itertools.groupby(topology, str.isdigit):
        text = "".join(group)
        if digits:
            number = text
        else:
            roles = frozenset(LETTERS[letter] for letter in text)
            workers |= {f"{text}{index}": roles for index in range(int(number))}
    return workers


@dataclass(frozen=True)
class Question:
    """media: paths, before the text."""

    media: tuple[Path, ...]
    text: str = "What is shown?"
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=MAX_TOKENS))
    frame_sampling: FrameSampling = field(default_factory=lambda: FrameSampling(num_frames=NUM_FRAMES))

    def request(self, sources: tuple[MediaSource, ...] | None = None, **options: Any) -> AnswerRequest:
        """sources: its media, as a media worker has them; by default they are only good for planning."""
        parts = [ContentPart(media_kind(path)) for path in self.media]
        message = ChatMessage("user", (*parts, ContentPart("text", self.text)))
        return AnswerRequest(
            f"q{next(_numbers)}",
            "tiny",
            (message,),
            unheld(self.media) if sources is None else sources,
            self.sampling,
            self.frame_sampling,
            **options,
        )


@dataclass
class Answered:
    """What came of a question. token_ids: of each choice."""

    token_ids: dict[int, list[int]] = field(default_factory=dict)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    spans: list[StageSpan] = field(default_factory=list)
    end: AnswerEnd | None = None

    def take_all(self, items: Sequence[AnswerItem]) -> None:
        for item in items:
            self.take(item)

    def take(self, item: AnswerItem) -> None:
        if isinstance(item, TokenDelta):
            self.token_ids.setdefault(item.index, []).extend(item.token_ids)
            self.text += item.text
            self.logprobs += item.logprobs
        elif isinstance(item, StageSpan):
            self.spans.append(item)
        else:
            self.end = item

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for choice in sorted(self.token_ids) for token in self.token_ids[choice])


def patient(options: dict[str, Any]) -> OrchestratorConfig:
    """options: of it; by default no limit acts on a machine that is only slow"""
    never: dict[str, Any] = {"stall_timeout_s": NEVER_S, "unavailable_s": NEVER_S, "max_wait_s": NEVER_S}
    limits = SwitchLimits(drain_s=NEVER_S, leave_s=NEVER_S, limit_s=NEVER_S)
    return OrchestratorConfig(**{**never, "switching": limits, **options})


class Deployment:
    """An orchestrator over a LocalFleet. held: whether answers stay in their middle."""

    def __init__(self, path: Path, topology: str, fleet: dict[str, Any], **options: Any) -> None:
        settings = WorkerSettings(
            path,
            EngineConfig(num_kv_tokens=8192),
            num_embeddings=4096,
            max_batch_patches=512,
            scheduler=PassLimits(max_chunk_tokens=64),
        )
        engine, others = parted(options.pop("settings", {}), settings.engine)
        self.held = HeldAnswers()
        settings = replace(settings, engine=engine, **{"pace": self.held, **others})
        fleet.setdefault("media", MediaSettings(path, ANY_FILE))
        fleet.setdefault("hang_s", NEVER_S)
        workers = {**workers_of(topology), **fleet.pop("more_workers", {})}
        self.fleet = LocalFleet(LocalFleetConfig(workers, **fleet), settings)
        planner = RequestPlanner(path, "tiny", group_tokens=16)
        self.service = Orchestrator(self.fleet, planner, patient(options))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Runs the service while the block runs."""
        try:
            await self.service.start()
            yield
        finally:
            await self.service.close()

    def cores(self) -> list[WorkerCore]:
        workers = self.fleet.workers.values()
        return [core_of(self.fleet, info.name) for info in workers if "video" not in info.roles]

    async def ask(
        self,
        question: Question,
        answered: Answered | None = None,
        barrier: asyncio.Barrier | None = None,
        **options: Any,
    ) -> Answered:
        """Asks a question.

        answered: takes what comes, for who looks on. barrier: where it waits with its media fetched
        """
        answered = answered or Answered()
        async with self.requested(question, **options) as request:
            if barrier is not None:
                await barrier.wait()
            async with aclosing(self.service.answer(request)) as answer:
                async for items in answer:
                    answered.take_all(items)
        return answered

    async def ask_at_once(self, questions: Sequence[Question], answers: Sequence[Answered]) -> None:
        """Asks all questions, none before the media of all of them are fetched. answers: take what comes."""
        barrier = asyncio.Barrier(len(questions))
        await asyncio.gather(*(self.ask(*each, barrier) for each in zip(questions, answers, strict=True)))

    @asynccontextmanager
    async def requested(self, question: Question, **options: Any) -> AsyncIterator[AnswerRequest]:
        """The request of a question, its media fetched while the block runs."""
        references = tuple(map(reference_to, question.media))
        async with self.service.media.sources(f"m{next(_numbers)}", references) as sources:
            yield question.request(sources, **options)

    async def ask_all(self, questions: Sequence[Question]) -> list[Answered]:
        return list(await asyncio.gather(*(self.ask(question) for question in questions)))

    async def settle(self, seconds: float = 200.0) -> None:
        """Returns when nothing of any request is left anywhere."""
        end = asyncio.get_running_loop().time() + seconds
        while left := self.leftovers():
            assert asyncio.get_running_loop().time() < end, f"left behind: {left}"
            await asyncio.sleep(0.02)
        for core in self.cores():
            core.check_integrity()

    def leftovers(self) -> list[str]:
        lost = [info.name for info in self.fleet.workers.values() if not info.is_alive]
        if lost:
            return [f"{lost} are not back"]
        left = [f"{core.name} has work" for core in self.cores() if core.has_work()]
        left += [f"{core.name} uses KV" for core in self.cores() if core.load().kv_usage]
        left += [f"{core.name} holds embeddings" for core in self.cores() if num_held(core)]
        left += [
            f"{name} has {held}"
            for name, worker in self.fleet.media.items()
            if any(held := (worker.num_holds, worker.num_streams, worker.num_pixel_bytes))
        ]
        left += ["media"] if self.service.media.num_held else []
        left += ["readers"] if any(self.service.media.reading.values()) else []
        left += ["attempts"] if self.service.num_attempts else []
        left += ["tickets"] if self.service.num_tickets else []
        left += [
            f"{name} has {self.service.router.in_flight(name)}"
            for name in self.fleet.workers
            if self.service.router.in_flight(name) != InFlight()
        ]
        return left


def core_of(fleet: LocalFleet, name: str) -> WorkerCore:
    """Returns the stages of a worker: to be inspected only while nothing runs."""
    core = fleet._threads[name].core
    assert core is not None
    return core


def num_held(core: WorkerCore) -> int:
    """Groups in its encoder caches that somebody holds."""
    encode, prefill = core.hosted.get("encode"), core.hosted.get("prefill")
    held = encode.stage.cache.num_held if isinstance(encode, EncodeRole) else 0
    return held + (prefill.feeds.receiver.reception.cache.num_held if isinstance(prefill, PrefillRole) else 0)


async def until_busy(deployment: Deployment, worker: str) -> None:
    """Returns when the worker is there and has something to do."""
    router, workers = deployment.service.router, deployment.fleet.workers
    while not (workers[worker].is_alive and router.in_flight(worker) != InFlight()):
        await asyncio.sleep(0.002)


async def until_decoding(deployment: Deployment, worker: str, num_requests: int) -> None:
    """Returns when the worker has so many answers in their middle."""
    attempts = deployment.service.attempts

    def num_there() -> int:
        return sum(
            each.decode_worker == worker and each.is_handed_over and each.answer.has_begun
            for each in attempts.values()
        )

    while num_there() < num_requests:
        await asyncio.sleep(0.002)


@asynccontextmanager
async def deployed(
    path: Path, topology: str, *, fleet: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[Deployment]:
    """fleet: options of LocalFleetConfig. options: of OrchestratorConfig; settings: of WorkerSettings."""
    deployment = Deployment(path, topology, fleet or {}, **options)
    async with deployment.running():
        yield deployment


def undisturbed(path: Path, questions: Sequence[Question], **settings: Any) -> list[tuple[int, ...]]:
    """The tokens that come of the questions when one worker does everything and nothing happens to it.

    settings: of WorkerSettings
    """
    with clear_draws():
        return [answer.tokens for answer in asyncio.run(ask_alone(path, questions, settings))]


def clear_questions(
    path: Path, questions: Sequence[Question], number: int, **settings: Any
) -> tuple[list[Question], list[Answered]]:
    """The first questions, so many, whose tokens rounding cannot turn, and their undisturbed answers.

    questions: some to spare, each with a seed of its own. settings: of WorkerSettings
    """
    with close_draws() as close:
        answers = asyncio.run(ask_alone(path, questions, settings))
    clear = [place for place, each in enumerate(questions) if each.sampling.seed not in close][:number]
    assert len(clear) == number, f"not enough questions to spare: {close}"
    return [questions[place] for place in clear], [answers[place] for place in clear]


async def ask_alone(path: Path, questions: Sequence[Question], settings: dict[str, Any]) -> list[Answered]:
    """Asks all questions at once, of one worker that does everything. settings: of WorkerSettings"""
    options: dict[str, Any] = {"max_waiting": len(questions), "max_wait_s": 3600.0}  # all at once
    async with deployed(path, "1epd", settings=settings, **options) as deployment:
        return await deployment.ask_all(questions)
