"""Serves the layouts of a comparison in this process, each worker as if it had a device of its own.

Plans its requests as the server does, and describes them to the simulator: by the small model that runs.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path

from epd.bench.bench import Client
from epd.bench.body import question_text
from epd.bench.client import AnswerError, ChatReply
from epd.bench.compare import Serve, Served
from epd.chat import ChatMessage, ContentPart
from epd.client.body import Body
from epd.encoders import FrameSampling, VideoFacts, load_adapter
from epd.encoders.adapter import Adapter
from epd.encoders.groups import plan_groups
from epd.encoders.plans import MediaPlan, PromptPlan
from epd.errors import EPDError
from epd.models import embedded_model_path
from epd.planning.replay import group_tokens, paced_deployment
from epd.profiles.media import MediaWork
from epd.profiles.profile import Profile
from epd.serve_app.app_args import AppArgs
from epd.serve_app.local.own_service import OwnService, own_service
from epd.serve_app.local.pacing import Pace
from epd.simulate.clock import ticks_of
from epd.simulate.requests import GroupWork, Job
from epd.workload.comparison import Layout, Question, Traffic
from epd.workload.requests import PlannedRequest, RequestShape

MODEL = embedded_model_path()


@cache
def _adapter(model: Path) -> Adapter:
    return load_adapter(model)


class PacedJobs:
    """Makes jobs of images, videos and text; media are there at once."""

    def __init__(self, model: Path, group_tokens: int) -> None:
        self._model = model
        self._group_tokens = group_tokens
        self._groups: dict[RequestShape, tuple[list[MediaPlan], tuple[GroupWork, ...]]] = {}

    @property
    def _adapter(self) -> Adapter:
        return _adapter(self._model)

    def jobs(self, requests: Sequence[PlannedRequest]) -> list[Job]:
        return [self._job(each) for each in requests]

    def _job(self, request: PlannedRequest) -> Job:
        shape = request.shape
        plans, groups = self._media(shape)
        prompt = self._prompt(shape, plans, question_text(request.text_seed, shape.text_tokens))
        num_text = len(prompt) - sum(each.num_tokens for each in plans)
        return Job(
            request.index,
            ticks_of(request.due_s),
            groups,
            num_text,
            shape.output_tokens,
            request.media_seed,
            request.text_seed,
            prompt.media[0].units[0].offset if prompt.media else self._num_leading(prompt),
        )

    def _prompt(self, shape: RequestShape, plans: Sequence[MediaPlan], text: str) -> PromptPlan:
        parts = [ContentPart("image")] * len(shape.images) + [ContentPart("video")] * len(shape.videos)
        return self._adapter.plan_chat(plans, (ChatMessage("user", (*parts, ContentPart("text", text))),))

    def _num_leading(self, prompt: PromptPlan) -> int:
        """Returns how many tokens a prompt of text begins with that every other one begins with."""
        blank = self._adapter.plan_chat((), (ChatMessage("user", (ContentPart("text", "?"),)),))
        pairs = zip(prompt.token_ids, blank.token_ids, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def _media(self, shape: RequestShape) -> tuple[list[MediaPlan], tuple[GroupWork, ...]]:
        if shape not in self._groups:
            plans = list(self._plans(shape))
            works = tuple(
                GroupWork(MediaWork(group.spec.num_patches, group.spec.num_embeddings), 0, is_video=is_video)
                for place, plan in enumerate(plans)
                for is_video in [place >= len(shape.images)]
                for group in plan_groups([plan], [""], model="", group_tokens=self._group_tokens)
            )
            self._groups[shape] = plans, works
        return self._groups[shape]

    def _plans(self, shape: RequestShape) -> Iterator[MediaPlan]:
        for size in shape.images:
            yield self._adapter.plan_image(size.height, size.width)
        for video in shape.videos:
            facts = VideoFacts(video.num_frames, video.fps, video.size.height, video.size.width)
            yield self._adapter.plan_video(facts, FrameSampling())


_WAIT_S, _MAX_REQUESTS = 600.0, 4096


class OwnClient:
    """Asks a service of this process, and notes when chunks are there. Is a `Client` of `epd.bench`."""

    def __init__(self, service: OwnService, timeout_s: float) -> None:
        self._service = service
        self._timeout_s = timeout_s

    def now_s(self) -> float:
        return time.perf_counter()

    async def ask(self, body: Body) -> ChatReply:
        reply = ChatReply(self.now_s())
        try:
            async with asyncio.timeout(self._timeout_s):
                asked = json.loads(b"".join(body.pieces))
                await self._service.chunks(asked, lambda chunk: reply.take_chunk(chunk, self.now_s()))
        except EPDError as error:
            reply.error = AnswerError(type(error).__name__, str(error))
        except TimeoutError:
            reply.error = AnswerError("timeout", f"no end within {self._timeout_s:g} s")
        reply.end_s = self.now_s()
        return reply


@dataclass(frozen=True, slots=True)
class PacedLayout:
    """Holds a layout that runs."""

    clients: Sequence[tuple[str, Client]]
    pace: Pace

    @property
    def late_share(self) -> float:
        return self.pace.late_share

    def begin(self) -> None:
        self.pace.reset()


def paced_layouts(question: Question, profile: Profile) -> Serve:
    """Returns what serves a layout of a question. profile: of `paced_profile`."""

    @asynccontextmanager
    async def serve(layout: Layout, traffic: Traffic) -> AsyncIterator[Served]:
        pace = Pace(profile, traffic.dilate)
        args = paced_args(layout, question, traffic.dilate)
        stack = ExitStack()
        try:
            clients = []
            for _ in range(layout.num_copies):
                opened = own_service(args, is_greedy=True, pace=pace)
                service = await asyncio.to_thread(stack.enter_context, opened)
                clients.append(
                    (service.model, OwnClient(service, question.timeout_s * max(1.0, traffic.dilate)))
                )
            yield PacedLayout(clients, pace)
        finally:
            await asyncio.to_thread(stack.close)

    return serve


def paced_args(layout: Layout, question: Question, dilate: float) -> AppArgs:
    """Returns the arguments of one server of a layout: those of `paced_deployment`."""
    deployment = paced_deployment(layout, question)
    limits = deployment.language
    return AppArgs(
        model=MODEL,
        topology=str(layout.topology),
        elastic=layout.has_roles,
        encode_beside=deployment.encode_beside,
        max_batch_patches=deployment.max_batch_patches,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_chunk_tokens=limits.max_chunk_tokens,
        max_num_seqs=limits.max_num_seqs,
        num_kv_tokens=deployment.kv_tokens,
        num_embeddings=deployment.num_embeddings,
        group_tokens=group_tokens(question.tokens),
        num_video_threads=min(64, deployment.cpu_threads),
        max_requests=_MAX_REQUESTS,
        max_waiting=_MAX_REQUESTS,
        max_wait_s=_WAIT_S * max(1.0, dilate),
        device="cpu",
    )
