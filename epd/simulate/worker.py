"""Simulates a worker, one device or process with its roles; and the CPU threads that decode media."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from typing import Literal

from epd.control.decoders import DecoderLoad
from epd.kv.kv_room import KVCacheSpec
from epd.profiles.profile import Profile
from epd.simulate.clock import EventPriority, EventQueue, Machine, SimulatedTask
from epd.simulate.deployment import Deployment
from epd.simulate.encoding import EncodeSide, EncodeTask
from epd.simulate.language import LanguageSide, PassResult
from epd.simulate.receiving import GroupReceiver, embedding_cache
from epd.simulate.records import WorkSpan
from epd.topology import STAGES, Stage, stages_of
from epd.types import ceil_div

OnSpan = Callable[[WorkSpan], None]
_ALONE = 1000


class _Lane:
    """Runs one task of a worker at a time. pace: of thousand ticks of work, those that it takes for them."""

    __slots__ = ("_machine", "_on_span", "_pace", "_worker", "name", "started", "task")

    def __init__(
        self, worker: str, name: Literal["encode", "language"], machine: Machine, on_span: OnSpan | None
    ) -> None:
        self.name = name
        self.task: SimulatedTask | None = None
        self.started = -1
        self._worker, self._machine, self._on_span = worker, machine, on_span
        self._pace = _ALONE

    def run(self, now: int, ticks: int | None, end: Callable[[], None], pace: int) -> bool:
        """Begins a task, which calls `end`. Returns whether there is one."""
        if ticks is None:
            return False
        self.started, self._pace = now, pace
        self.task = self._machine.run(ticks, end)
        return True

    def end(self, now: int) -> int:
        """Ends the task; returns the ticks that it took."""
        self.task, ticks = None, now - self.started
        if self._on_span is not None:
            self._on_span(WorkSpan(self._worker, self.name, self.started, ticks))
        return ticks

    def set_left(self, ticks: int) -> None:
        assert self.task is not None
        self._machine.set_left(self.task, ticks)

    def set_pace(self, pace: int) -> None:
        """Changes what it has left of a task to another pace."""
        if self.task is not None and self._pace != pace:
            self.set_left(ceil_div(self._machine.left(self.task) * pace, self._pace))
            self._pace = pace


class SimulatedWorker:
    """Runs a batch of the encoder, then a pass of the language model, and so on; or one beside the other.

        in turns | batch | pass | batch | pass |         beside | batch .......... | batch ...
                                                                | pass | pass | pass | pass |

    Beside each other both are slower. A worker looks for messages between two passes: then a batch begins, is
    handed on, and requests get room for their groups. So it is with workers of the application.

    roles: kinds of work sent to it; it finishes its work of a role that it had before
    is_switching: it changes its roles, and takes nothing new for those in `closed`
    """

    def __init__(
        self,
        name: str,
        roles: frozenset[Stage],
        events: EventQueue,
        machine: Machine,
        on_encoded: Callable[[SimulatedWorker, list[EncodeTask]], None],
        on_passed: Callable[[SimulatedWorker, PassResult], None],
        on_span: OnSpan | None = None,
    ) -> None:
        self.name = name
        self.roles = roles
        self.encoder: EncodeSide | None = None
        self.receiver: GroupReceiver | None = None  # where caches are simulated
        self.language: LanguageSide | None = None
        self.is_switching = False
        self.closed: frozenset[Stage] = frozenset()
        self.last_ticks = 0  # of the last work that is over
        self._events = events
        self._on_encoded = on_encoded
        self._on_passed = on_passed
        self._encoding = _Lane(name, "encode", machine, on_span)
        self._passing = _Lane(name, "language", machine, on_span)
        self._is_beside = False
        self._pace = _ALONE  # of both lanes while both run
        self._was_encoding = False
        self._is_woken = False
        self._encoded_ticks: int | None = None  # of a batch that is over, and handed on after the pass
        self._between: list[Callable[[], None]] = []

    def host(self, roles: frozenset[Stage], deployment: Deployment, profile: Profile) -> None:
        """Takes these roles, with what they need of the deployment; what others needed is gone."""
        kept, self.roles = stages_of(self.roles) & stages_of(roles), roles
        num_blocks = deployment.num_blocks(profile, roles)
        profile = profile.on(deployment.degree(roles))
        self._is_beside = deployment.encodes_beside(roles)
        self._pace = round(_ALONE * profile.beside)
        embeddings = deployment.num_embeddings, deployment.block_size
        has_caches = deployment.enable_prefix_caching
        if "encode" not in roles:
            self.encoder = None
        elif self.encoder is None:
            cache = embedding_cache(*embeddings) if has_caches else None
            self.encoder = EncodeSide(profile, deployment.max_batch_patches, cache)
        if self.language is not None and kept - {"encode"}:
            return
        self.language = self.receiver = None
        if "prefill" in roles and has_caches:
            self.receiver = GroupReceiver(self.name, *embeddings, profile.model)
        if roles & {"prefill", "decode"}:
            self.language = LanguageSide(
                profile,
                deployment.scheduler_config(roles),
                KVCacheSpec((num_blocks,), deployment.block_size),
                enable_prefix_caching=deployment.enable_prefix_caching,
                is_stepwise=deployment.is_stepwise,
                drafts=deployment.drafts,
            )

    @property
    def language_side(self) -> LanguageSide:
        """Returns the side of a worker that prefills or decodes, for those who know that it does."""
        assert self.language is not None
        return self.language

    @property
    def is_busy(self) -> bool:
        """Returns whether a turn is under way. A batch beside the passes is in no turn."""
        return self._passing.task is not None or (self._encoding.task is not None and not self._is_beside)

    def takes(self, stage: Stage) -> bool:
        """Returns whether it takes new work of a stage."""
        return stage in self.roles and stage not in self.closed

    def has_work(self, stages: Collection[Stage] = STAGES) -> bool:
        """Returns whether any work of these stages is left; of an encoder, one with a batch has."""
        encoder = self.encoder if "encode" in stages else None
        language = self.language if "prefill" in stages or "decode" in stages else None
        is_encoding = encoder is not None and (encoder.has_work() or self._encoding.task is not None)
        return is_encoding or (
            language is not None and (language.has_work() or self._passing.task is not None)
        )

    def wake(self) -> None:
        """Reacts to a change: an idle worker looks for work once all of this instant is known.

        A run of decode steps ends with the step that is under way.
        """
        if self.is_busy:
            self._cut()
        elif not self._is_woken:
            self._is_woken = True
            self._events.push(self._events.now, EventPriority.START, self._start)

    def between_turns(self, then: Callable[[], None]) -> None:
        """Calls a function once no turn is under way: a message waits for its end."""
        if self.is_busy:
            self._between.append(then)
            self.wake()
        else:
            then()

    def _start(self) -> None:
        self._is_woken = False
        if self.is_busy:
            return
        if self.encoder is not None and (hits := self.encoder.take_hits()):
            self.last_ticks = 0
            self._on_encoded(self, hits)
        if self._is_beside:
            if self._encoding.task is None:
                self._start_encoder()
            self._start_language(is_single=False)
            self._encoding.set_pace(self._pace if self.is_busy else _ALONE)
            return
        for is_encoding in (not self._was_encoding, self._was_encoding):
            is_single = self.encoder is not None and self.encoder.is_waited_for
            if self._start_encoder() if is_encoding else self._start_language(is_single=is_single):
                return

    def _start_encoder(self) -> bool:
        ticks = None if self.encoder is None else self.encoder.start()
        return self._encoding.run(self._events.now, ticks, self._end_batch, _ALONE)

    def _start_language(self, *, is_single: bool) -> bool:
        if self.language is None:
            return False
        is_beside = self._encoding.task is not None
        ticks = self.language.start(is_single=is_single, is_beside=is_beside)
        pace = self._pace if is_beside else _ALONE
        return self._passing.run(self._events.now, ticks, self._end_pass, pace)

    def _cut(self) -> None:
        if self._passing.task is None or self.language is None:
            return
        now, started = self._events.now, self._passing.started
        ticks = self.language.cut(now - started)
        if ticks is not None:
            self._passing.set_left(started + ticks - now)

    def _end_batch(self) -> None:
        self._encoded_ticks = self._encoding.end(self._events.now)
        self._was_encoding = True
        self._cut()
        self._passing.set_pace(_ALONE)
        if not self.is_busy:
            self._end_turn()
        self.wake()

    def _end_pass(self) -> None:
        self.last_ticks = self._passing.end(self._events.now)
        self._was_encoding = False
        self._on_passed(self, self.language_side.end())
        self._end_turn()
        self.wake()

    def _end_turn(self) -> None:
        """Hands on a batch that is over, and handles what has waited."""
        if self._encoded_ticks is not None:
            assert self.encoder is not None
            self.last_ticks, self._encoded_ticks = self._encoded_ticks, None
            self._on_encoded(self, self.encoder.end())
        waiting, self._between = self._between, []
        for then in waiting:
            then()


class CpuPool:
    """Runs tasks on threads in the order of their arrival. speed: times as fast as a thread of the CPU."""

    def __init__(self, machine: Machine, num_threads: int, speed: int = 1) -> None:
        self._machine = machine
        self._num_threads = self._num_free = num_threads
        self._speed = speed
        self._work = 0  # ticks that are not done
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()

    @property
    def load(self) -> DecoderLoad:
        return DecoderLoad(self._num_threads * self._speed, self._work)

    def submit(self, ticks: int, done: Callable[[], None]) -> None:
        self._work += ticks
        if self._num_free:
            self._num_free -= 1
            self._run(ticks, done)
        else:
            self._waiting.append((ticks, done))

    def _run(self, ticks: int, done: Callable[[], None]) -> None:
        self._machine.run(ticks // self._speed, partial(self._end, ticks, done))

    def _end(self, ticks: int, done: Callable[[], None]) -> None:
        self._work -= ticks
        if self._waiting:
            self._run(*self._waiting.popleft())
        else:
            self._num_free += 1
        done()
