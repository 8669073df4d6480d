"""Simulates a worker: one device or process whose roles take turns; and the CPU threads decoding media."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from epd.kv.kv_cache import KVCacheSpec
from epd.profiles.profile import Profile
from epd.simulate.clock import EventQueue, Rank
from epd.simulate.deployment import Deployment
from epd.simulate.encoding import EncodeSide, EncodeTask
from epd.simulate.language import LanguageSide, PassResult
from epd.simulate.machine import Machine
from epd.simulate.records import WorkSpan
from epd.topology import Stage

OnSpan = Callable[[WorkSpan], None]


class SimulatedWorker:
    """Runs one task at a time on a device: a batch of the encoder, then a pass of the language model.

    roles: kinds of work sent to it; it finishes its work of a role that it had before
    is_switching: it takes nothing new
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
        self.language: LanguageSide | None = None
        self.is_switching = False
        self.busy_ticks = 0
        self.last_ticks = 0  # of its last work
        self.encode_ticks = 0
        self._events = events
        self._machine = machine
        self._on_encoded = on_encoded
        self._on_passed = on_passed
        self._on_span = on_span
        self._started = -1
        self._is_encoding = False
        self._was_encoding = False
        self._is_woken = False
        self._version = 0

    def host(self, roles: frozenset[Stage], deployment: Deployment, profile: Profile) -> None:
        """Takes these roles, with what they need of the deployment; what it had is gone."""
        self.roles = roles
        num_blocks = deployment.num_blocks(profile, roles)
        profile = profile.on(deployment.degree(roles))
        self.encoder = self.language = None
        if "encode" in roles:
            self.encoder = EncodeSide(profile, deployment.max_batch_patches, deployment.language.order)
        if roles & {"prefill", "decode"}:
            self.language = LanguageSide(
                profile,
                deployment.scheduler_config(roles),
                KVCacheSpec((num_blocks,), deployment.block_size),
                hands_over="decode" not in roles,
                enable_prefix_caching=deployment.enable_prefix_caching,
                is_stepwise=deployment.is_stepwise,
            )

    @property
    def is_busy(self) -> bool:
        return self._started >= 0

    def takes(self, stage: Stage) -> bool:
        """Returns whether it takes new work of a stage."""
        return stage in self.roles and not self.is_switching

    def has_work(self) -> bool:
        sides = (self.encoder, self.language)
        return self.is_busy or any(side is not None and side.has_work() for side in sides)

    def wake(self) -> None:
        """Reacts to a change: an idle worker looks for work once all of this instant is known.

        A run of decode steps ends with the step that is under way.
        """
        if self.is_busy:
            self._cut()
        elif not self._is_woken:
            self._is_woken = True
            self._events.push(self._events.now, Rank.START, self._start)

    def _start(self) -> None:
        self._is_woken = False
        if self.is_busy:
            return
        for is_encoding in (not self._was_encoding, self._was_encoding):
            ticks = self._start_encoder() if is_encoding else self._start_language()
            if ticks is not None:
                self._started, self._is_encoding = self._events.now, is_encoding
                self._version += 1
                self._machine.run(ticks, partial(self._end, self._version))
                return

    def _start_encoder(self) -> int | None:
        return self.encoder.start() if self.encoder is not None else None

    def _start_language(self) -> int | None:
        if self.language is None:
            return None
        return self.language.start(is_single=self.encoder is not None and self.encoder.is_waited_for)

    def _cut(self) -> None:
        if self._is_encoding or self.language is None:
            return
        ticks = self.language.cut(self._events.now - self._started)
        if ticks is not None:
            self._version += 1
            self._events.push(self._started + ticks, Rank.END, partial(self._end, self._version))

    def _end(self, version: int) -> None:
        if version != self._version:
            return
        started, self._started = self._started, -1
        self._was_encoding = self._is_encoding
        self.last_ticks = self._events.now - started
        self.busy_ticks += self.last_ticks
        if self._on_span is not None:
            name = "encode" if self._is_encoding else "language"
            self._on_span(WorkSpan(self.name, name, started, self._events.now - started))
        if self._is_encoding:
            assert self.encoder is not None
            self.encode_ticks += self._events.now - started
            self._on_encoded(self, self.encoder.end())
        else:
            assert self.language is not None
            self._on_passed(self, self.language.end())
        self.wake()


class CpuPool:
    """Runs tasks on threads in the order of their arrival."""

    def __init__(self, machine: Machine, num_threads: int) -> None:
        self._machine = machine
        self._num_free = num_threads
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()

    def submit(self, ticks: int, done: Callable[[], None]) -> None:
        if self._num_free:
            self._num_free -= 1
            self._run(ticks, done)
        else:
            self._waiting.append((ticks, done))

    def _run(self, ticks: int, done: Callable[[], None]) -> None:
        self._machine.run(ticks, partial(self._end, done))

    def _end(self, done: Callable[[], None]) -> None:
        if self._waiting:
            self._run(*self._waiting.popleft())
        else:
            self._num_free += 1
        done()
