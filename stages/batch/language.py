"""Runs the language model of a batch: media prefilled once, then all their questions over that prefix.

    items    | v0 | v0 g0 | v0 g1 | v1 | v1 g0 | ...
    engine        [v0 media      )[v0 q0 q1 q2 ...      )
                                  [v1 media      )[v1 q0 ...           in the same passes

A job's media are admitted when the cache has room for them and for the answers under way; until then its
groups wait, and so do the stages before. All groups of a job come before the next job.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from time import perf_counter

import torch

from epd.encoders import Adapter
from epd.errors import EPDError, InfeasibleError, InternalError
from epd.stages.batch.ahead import Ahead
from epd.stages.batch.jobs import BatchAnswer, BatchJob, BatchSink, EmbeddingItem, TextRequest
from epd.stages.engine.engine import LanguageEngine
from epd.stages.engine.generation import GenerateRequest, GenerationSettings, StepResult, TokenOutput
from epd.stages.group_driver import FailedJob
from epd.stages.media_prefix import MediaPrefix
from epd.transfer.bounded_queue import BusyClock, QueueClosed
from epd.types import ceil_div

logger = logging.getLogger(__name__)

# Slots that are kept for media beside the answers under way.
_MEDIA_SLOTS = 8
_WAIT_S = 0.05
_MAX_IDLE_TURNS = 2


@dataclass(slots=True, eq=False)
class _Live:
    """Holds a job at the engine. upcoming: the next question and its request; None after the last."""

    job: BatchJob
    prefix: MediaPrefix
    upcoming: tuple[TextRequest, GenerateRequest] | None
    is_ready: bool = False
    num_open: int = 0


@dataclass(slots=True, eq=False)
class _Open:
    """Holds a request that is being answered. num_left: sequences that have not ended."""

    live: _Live
    request: GenerateRequest
    num_left: int
    outputs: list[TokenOutput] = field(default_factory=list)
    first_s: float = 0.0


class LanguageStage:
    """Runs the language stage. Not thread-safe."""

    def __init__(
        self,
        engine: LanguageEngine,
        adapter: Adapter,
        settings: GenerationSettings,
        items: Ahead[EmbeddingItem],
        sink: BatchSink,
    ) -> None:
        self.clock = BusyClock()
        self.num_prefilled = 0
        self._engine = engine
        self._adapter = adapter
        self._settings = settings
        self._items = items
        self._sink = sink
        self._max_open = max(1, engine.scheduler.config.max_num_seqs - _MEDIA_SLOTS)
        self._live: dict[str, _Live] = {}
        self._open: dict[str, _Open] = {}
        self._blocked: _Live | None = None
        self._arriving = ""  # the job whose groups come
        self._has_all = False
        self._is_stopped = False
        self._num_idle_turns = 0

    @torch.inference_mode()
    def run(self) -> None:
        """Works until all items have come and every request is answered or has failed, or until `stop`."""
        self.clock.start()
        try:
            while not self._is_stopped and (not self._has_all or self._live or self._blocked):
                self._turn()
        finally:
            self.clock.stop()
            self._drop_all()

    def stop(self) -> None:
        """Ends `run` after its current pass, whatever is left; may be called from any thread."""
        self._is_stopped = True

    def _drop_all(self) -> None:
        """Empties the engine."""
        for name in (*self._open, *self._live):
            self._engine.abort(name)

    def _turn(self) -> None:
        if self._blocked is not None and self._has_room(self._blocked):
            live, self._blocked = self._blocked, None
            self._begin_media(live)
        self._take_items()
        for live in list(self._live.values()):
            self._ask(live)
        result = self._engine.step()
        self._record(result)
        has_moved = result.num_tokens or result.outputs or result.admissions
        self._num_idle_turns = 0 if has_moved else self._num_idle_turns + 1
        if self._is_stuck():
            self._give_up_first()

    # Items

    def _take_items(self) -> None:
        """Takes all items that have come; waits for some if there is nothing else to do."""
        may_wait = self._num_idle_turns > 0
        while self._blocked is None and not self._has_all:
            item = self._next_item(may_wait=may_wait)
            if item is None:
                return
            may_wait = False
            self._take(item)

    def _next_item(self, *, may_wait: bool) -> EmbeddingItem | None:
        if may_wait:
            self.clock.stop()
        try:
            return self._items.get(_WAIT_S if may_wait else 0.0)
        except QueueClosed:
            self._has_all = True
            return None
        finally:
            if may_wait:
                self.clock.start()

    def _take(self, item: EmbeddingItem) -> None:
        if isinstance(item, BatchJob):
            self._start(item)
        elif isinstance(item, FailedJob):
            self._fail_job(item.job, _media_error(item))
        elif self._arriving in self._live:
            self._live[self._arriving].prefix.add(item, self._engine)

    # Jobs

    def _start(self, job: BatchJob) -> None:
        """Admits the media of a job that has a question which can be asked."""
        self._arriving = job.name
        mm_hashes = [f"{job.name}/{item}" for item in range(len(job.media))]
        try:
            prefix = MediaPrefix(
                job.name, job.plans, mm_hashes, self._adapter, self._settings, job.reduction, job.messages
            )
        except Exception as error:  # noqa: BLE001 - logged; costs this job alone
            self._fail_job(job, explained(error))
            return
        upcoming = self._next_question(job, prefix)
        if upcoming is not None:
            self._begin(_Live(job, prefix, upcoming))
        else:
            job.is_failed = True  # there is nothing to answer about it
            self._end(job)

    def _next_question(
        self, job: BatchJob, prefix: MediaPrefix
    ) -> tuple[TextRequest, GenerateRequest] | None:
        """Returns the next question that can be asked; those before it that cannot are reported."""
        for text in job.requests:
            try:
                return text, prefix.question(text.request_id, text.messages, text.sampling, text.seed)
            except Exception as error:  # noqa: BLE001 - logged; costs this line alone
                self._sink.failed(text.request_id, explained(error))
        return None

    def _end(self, job: BatchJob) -> None:
        if not job.is_done:
            job.is_done = True
            self._sink.job_done(job)

    def _begin(self, live: _Live) -> None:
        if not live.job.media:
            live.is_ready = True
            self._live[live.job.name] = live
        elif self._has_room(live):
            self._begin_media(live)
        else:
            self._blocked = live

    def _begin_media(self, live: _Live) -> None:
        self._live[live.job.name] = live
        try:
            self._engine.add(live.prefix.request())
        except Exception as error:  # noqa: BLE001 - logged; costs this job alone
            self._fail_job(live.job, explained(error))

    def _has_room(self, live: _Live) -> bool:
        """Reports whether the media would be admitted now, beside the answers under way and one of its own.

        The first job is always admitted: the engine reports if there is too little room.
        """
        engine, block_size = self._engine, self._engine.kv.spec.block_size
        if not self._live:
            return True
        assert live.upcoming is not None
        text, request = live.upcoming
        num_tokens = len(request.prompt)
        num_tokens += self._settings.expected_tokens(text.sampling, num_tokens)
        num_blocks = ceil_div(num_tokens, block_size) + 1 + len(self._open)
        groups = range(len(engine.kv.spec.num_blocks))
        has_blocks = all(engine.kv.num_free_blocks(group) >= num_blocks for group in groups)
        return has_blocks and not engine.scheduler.waiting and len(self._live) < _MEDIA_SLOTS

    def _fail_job(self, job: BatchJob, error: EPDError) -> None:
        """Fails all of its requests for the same reason."""
        job.is_failed = True
        live = self._live.pop(job.name, None)
        self._engine.abort(job.name)
        for request_id in [each for each, opened in self._open.items() if opened.live is live]:
            del self._open[request_id]
            self._engine.abort(request_id)
            self._sink.failed(request_id, error)
        if live is not None and live.upcoming is not None:
            self._sink.failed(live.upcoming[0].request_id, error)
        for request in job.requests:
            self._sink.failed(request.request_id, error)
        self._end(job)

    # Requests

    def _ask(self, live: _Live) -> None:
        """Adds questions of a job whose media are there, up to the number of free slots."""
        while live.is_ready and live.upcoming is not None and self._num_open < self._max_open:
            _, request = live.upcoming
            live.upcoming = self._next_question(live.job, live.prefix)
            self._add_request(live, request)
        if live.upcoming is None and not live.num_open:
            del self._live[live.job.name]
            if live.prefix.parent is not None:
                self._engine.release(live.prefix.parent)
            self._end(live.job)

    @property
    def _num_open(self) -> int:
        return sum(request.num_left for request in self._open.values())

    def _add_request(self, live: _Live, request: GenerateRequest) -> None:
        try:
            self._engine.add(request)
        except Exception as error:  # noqa: BLE001 - logged; costs this line alone
            self._engine.abort(request.request_id)
            self._sink.failed(request.request_id, explained(error))
            return
        live.num_open += 1
        self._open[request.request_id] = _Open(live, request, request.sampling.n)

    # Steps

    def _record(self, result: StepResult) -> None:
        for name in result.prefilled:
            self._live[name].is_ready = True
            self.num_prefilled += len(self._live[name].job.media)
        for fault in result.faults:
            self._give_up(fault.request_id, fault.error)
        for output in result.outputs:
            opened = self._open.get(output.request_id)
            if opened is None:  # of a request that has failed in the same step
                continue
            opened.first_s = opened.first_s or perf_counter()
            opened.outputs.append(output)
            if output.finish_reason is not None:
                opened.num_left -= 1
                if not opened.num_left:
                    self._finish(output.request_id, self._open.pop(output.request_id))

    def _finish(self, request_id: str, opened: _Open) -> None:
        live = opened.live
        usage = replace(
            opened.request.prompt.usage(len(opened.outputs)),
            num_substituted_frames=live.job.num_substituted_frames,
            num_unseen_frames=live.job.num_unseen_frames,
        )
        live.num_open -= 1
        num_cached = len(live.prefix.token_ids)
        outputs = sorted(opened.outputs, key=lambda output: output.choice)
        self._sink.answered(BatchAnswer(request_id, outputs, usage, num_cached, opened.first_s))

    def _is_stuck(self) -> bool:
        """Reports whether requests wait for room, nothing moves, and nothing to come would make room.

        A request that gets its blocks in one pass may be computed only from the next one on.
        """
        return (
            self._num_idle_turns > _MAX_IDLE_TURNS
            and bool(self._engine.scheduler.waiting)
            and all(live.is_ready or not live.prefix.num_missing for live in self._live.values())
        )

    def _give_up_first(self) -> None:
        """Gives up the first waiting request, which has no room beside the media that are held."""
        waiting = self._engine.scheduler.waiting[0]
        first = waiting.request_id.partition("#")[0]
        error = InfeasibleError(
            f"{waiting.num_prompt_tokens} prompt tokens do not fit beside the media "
            "that are held; ask for fewer frames or a shorter answer, or enlarge the KV cache"
        )
        self._give_up(first, error)

    def _give_up(self, name: str, error: EPDError) -> None:
        """Gives up a job whose media cannot be prefilled, or a request that cannot be answered."""
        if name in self._live:
            self._fail_job(self._live[name].job, error)
            return
        opened = self._open.pop(name)
        opened.live.num_open -= 1
        self._engine.abort(name)
        self._sink.failed(name, error)


def explained(error: Exception) -> EPDError:
    """Returns the error of a request's lines. Unexpected errors are logged."""
    if not isinstance(error, EPDError):
        logger.error("a request was not taken", exc_info=error)
    return InternalError.of(error)


def _media_error(failed: FailedJob[BatchJob]) -> EPDError:
    """Returns the error of a job's lines. Unexpected errors are logged."""
    if isinstance(failed.error, EPDError):
        return failed.error
    logger.warning("media of %s: %s", failed.job.name, failed.error, exc_info=failed.error)
    return EPDError(f"the media cannot be used: {type(failed.error).__name__}: {failed.error}")
