"""A service that answers from a script: what it says, when, and what goes wrong is set by the question."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from epd.control.elasticity.controller import Decision
from epd.control.elasticity.replicas import ReplicaAdvice
from epd.control.recent import RequestWork
from epd.errors import EPDError
from epd.serve_app.media.media_spool import FetchedFile
from epd.serve_app.service import (
    AnswerEnd,
    AnswerItem,
    AnswerRequest,
    Estimate,
    FinishReason,
    HeldItem,
    ModelCard,
    StageSpan,
    TokenDelta,
    TokenLogprob,
)
from epd.serve_app.service_status import RoleSwitch, ServiceStatus, SwitchTotals, WorkerStatus
from epd.serve_app.worker_info import MemoryUse
from epd.topology import Stage
from epd.types import StageTimings, Usage

WORDS = ("A ", "red ", "cirçle", " 🙂.")
USAGE = Usage(8, visual_tokens=24, prompt_tokens=40, completion_tokens=len(WORDS), visual_tokens_before=48)
TIMINGS = StageTimings(
    probe_s=0.01, decode_video_s=0.2, encode_s=0.3, prefill_s=0.1, decode_s=0.05, total_s=0.7
)


SWITCH = RoleSwitch(
    "e1", "e", "d", 1_700_000_000.0, 0.01, 0.2, 0.125, 0.005, weights_s=0.1, num_handed_on=3, num_moved=2
)


def _no_file(held: HeldItem) -> FetchedFile:
    raise AssertionError(f"no worker has {held}")


class FakePrompts:
    """Gives every request the same estimate, and every letter its number as a token."""

    async def estimate(self, request: AnswerRequest) -> Estimate:
        return Estimate(replace(USAGE, completion_tokens=0), 0.5, request.sampling.max_tokens or 99, (1, 2))

    async def tokens(self, text: str, *, with_special: bool) -> tuple[int, ...]:
        return (*([0] if with_special else []), *map(ord, text))

    async def text(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(each % 128) for each in token_ids)

    async def names(self, token_ids: Sequence[int]) -> tuple[str, ...]:
        return tuple(chr(each % 128) for each in token_ids)


@dataclass
class FakeService:
    """error: raised after `words_before_error` words. word_s: seconds before each word.

    holds_after: words after which an answer waits until it `may_go_on`, however slow its reader is.
    num_open, num_closed: answers begun and those whose iterator has ended in any way; most_open: at once.
    requests: as received; files_seen: the bytes of their media, as read meanwhile, from paths_seen.
    file_of: where the media worker has a medium.
    """

    error: Exception | None = None
    words_before_error: int = 0
    holds_after: int | None = None
    may_go_on: threading.Event = field(default_factory=threading.Event, repr=False)
    word_s: float = 0.0
    words: tuple[str, ...] = WORDS
    is_ready: bool = True
    has_end: bool = True
    usage: Usage = USAGE
    counters: dict[str, float] = field(default_factory=lambda: {"encoder_cache_hits": 7.0})
    requests: list[AnswerRequest] = field(default_factory=list)
    files_seen: list[list[bytes]] = field(default_factory=list)
    paths_seen: list[list[Path]] = field(default_factory=list)
    file_of: Callable[[HeldItem], FetchedFile] = field(default=_no_file, repr=False)
    num_open: int = 0
    num_closed: int = 0
    most_open: int = 0
    switch_error: EPDError | None = None
    switched: list[tuple[str, frozenset[Stage]]] = field(default_factory=list)
    _kept: list[AsyncGenerator[Sequence[AnswerItem], None]] = field(default_factory=list)
    prompts: FakePrompts = field(default_factory=FakePrompts)
    thinks: bool = False
    models: tuple[ModelCard, ...] = (ModelCard("shapes-vl", 1_700_000_000, 4096), ModelCard("other/vl", 1))

    def answer(self, request: AnswerRequest) -> AsyncGenerator[Sequence[AnswerItem], None]:
        """Keeps the iterator: only closing it ends it, not that nobody has it any more."""
        self._kept.append(self._answer(request))
        return self._kept[-1]

    async def _answer(self, request: AnswerRequest) -> AsyncGenerator[Sequence[AnswerItem], None]:
        self.requests.append(request)
        self.paths_seen.append([self.file_of(source.held).path for source in request.media])
        self.files_seen.append([path.read_bytes() for path in self.paths_seen[-1]])
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open - self.num_closed)
        try:
            async for item in self._items(request):
                yield (item,)
        finally:
            self.num_closed += 1

    async def _items(self, request: AnswerRequest) -> AsyncGenerator[AnswerItem, None]:
        if request.wants_spans:
            for group in range(3):
                for stage, worker in (("decode_video", "v0"), ("encode", f"e{group % 2}"), ("prefill", "p0")):
                    now = time.time()
                    yield StageSpan(stage, worker, now, now + 0.02, item=0, group=group)  # type: ignore[arg-type]
        for number, word in enumerate(self.words):
            await asyncio.sleep(self.word_s)
            if number == self.holds_after:
                while not self.may_go_on.is_set():
                    await asyncio.sleep(0.01)
            if (error := self.error) and number == self.words_before_error:
                raise error
            last = number == len(self.words) - 1
            for choice in range(request.sampling.n):
                yield self._delta(request, choice, number, word, last)
        if error := self.error:
            raise error
        if self.has_end:
            yield AnswerEnd(self.usage, TIMINGS, cached_tokens=16, retention=0.5)

    def _delta(self, request: AnswerRequest, choice: int, number: int, word: str, last: bool) -> TokenDelta:
        logprobs = ()
        if request.sampling.logprobs is not None:
            others = tuple(
                TokenLogprob(90 + rank, f"t{rank}", f"t{rank}".encode(), -1.0 - rank)
                for rank in range(request.sampling.logprobs)
            )
            logprobs = (TokenLogprob(number, word, word.encode(), -0.25, others),)
        reason: FinishReason | None = "stop" if last else None
        num_tokens = USAGE.prompt_tokens
        return TokenDelta(choice, word, (number,), logprobs, reason, num_tokens, thinks=self.thinks)

    async def switch_roles(self, worker: str, roles: frozenset[Stage]) -> RoleSwitch:
        if self.switch_error is not None:
            raise self.switch_error
        self.switched.append((worker, roles))
        return SWITCH

    def recent_load(self) -> list[tuple[float, RequestWork]]:
        now_s = time.time()
        return [(now_s - 60.0, RequestWork(256, 100, 32)), (now_s, RequestWork(0, 20, 500))]

    async def status(self) -> ServiceStatus:
        return ServiceStatus(
            is_ready=self.is_ready,
            topology="2e1p1d",
            workers=(
                WorkerStatus("e0", "e", num_waiting=1, encoder_cache_usage=0.25),
                WorkerStatus("e1", "e", is_alive=False),
                WorkerStatus(
                    "p0",
                    "p",
                    num_running=2,
                    kv_usage=0.5,
                    num_role_switches=3,
                    transports={"d1": "link", "d0": "shared memory", "d2": "link"},
                    memory=MemoryUse(
                        "bfloat16 on cuda:0",
                        72 * 10**9,
                        15_230_000_000,
                        3 * 10**9,
                        50 * 10**9,
                        65_536,
                        871_920,
                    ),
                ),
                WorkerStatus("d0", "d", kv_usage=0.125),
            ),
            counters=self.counters,
            num_waiting=2,
            decisions=(
                Decision(1_700_000_000.0, "switch", "e1: e to d, gains 9.0 s for 1.0 s: worth it"),
                Decision(1_700_000_010.0, "no gain", "nothing is better than what is"),
            ),
            advice={"Stage": ReplicaAdvice(1_700_000_010.0, "enough", 4, "4 of 3 to 8 replicas: why")},
            switches=(SWITCH,),
            switch_totals=(SwitchTotals("e->d").plus(SWITCH),),
        )
