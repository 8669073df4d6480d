"""Brings the groups of simulated requests to their prefill workers: read, planned, dispatched, encoded, sent.

    missing | granted room -- at an encoder already? ------------------+-> sent | received | may be computed
            |              -- read -- planned -- dispatched -- encoded-+

Where caches are simulated, room is granted by the live reception, and what a cache has is not brought again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby

from epd.control.decoders import DECODERS_OF_A_GPU, THREADS_OF_A_DECODER, soonest
from epd.control.placement import Candidates
from epd.control.routing import Router
from epd.control.way_back import cheapest
from epd.encode.sharding import wanted_encoder
from epd.profiles.profile import Profile
from epd.simulate.clock import EventPriority, EventQueue, Machine, ticks_of
from epd.simulate.deployment import Deployment
from epd.simulate.encoding import EncodeSide, EncodeTask
from epd.simulate.kept_media import Disk, Fleet, part_costs
from epd.simulate.receiving import GroupReceiver, group_key
from epd.simulate.requests import GroupWork, RequestState
from epd.simulate.worker import CpuPool, SimulatedWorker


class MediaFlow:
    """Serves all requests of a fleet. candidates: the workers that take new work."""

    def __init__(
        self,
        profile: Profile,
        deployment: Deployment,
        events: EventQueue,
        machine: Machine,
        workers: Mapping[str, SimulatedWorker],
        router: Router,
        candidates: Callable[[], Candidates],
    ) -> None:
        self._profile = profile
        self._deployment = deployment
        self._events = events
        self._machine = machine
        self._workers = workers
        self._router = router
        self._candidates = candidates
        self._readers = [CpuPool(machine, deployment.cpu_threads)]
        if deployment.video_gpus:
            num_decoders = DECODERS_OF_A_GPU * deployment.video_gpus
            self._readers.append(CpuPool(machine, num_decoders, THREADS_OF_A_DECODER))
        self._disk = None if deployment.kept is None else Disk(events, deployment.kept)
        self._num_dispatched = 0
        self.num_groups = self.num_encoded = 0  # of all requests, and those that were not in a cache

    def begin(self, state: RequestState) -> None:
        """Brings all groups of a request that has been placed, and submits it to its prefill worker."""
        self.num_groups += len(state.job.groups)
        state.missing = self._missing_groups(state)
        if self._disk is None or not state.missing or state.job.media_key not in self._disk:
            self._begin_missing(state)
        else:
            self._read_back(state, self._disk)

    def note_computed(self, state: RequestState) -> None:
        """Notes that the prompt of a request is computed."""
        if self._disk is not None:
            self._disk.add(state.job.media_key)

    def _begin_missing(self, state: RequestState) -> None:
        if not state.missing:
            self._plan_known(state)
            return
        if self._deployment.is_overlapped and not self._profile.media.is_whole:
            self._submit(state)
        self.receive(state)

    def _read_back(self, state: RequestState, disk: Disk) -> None:
        """Reads the keys and values of leading groups, as far as that is the cheapest way; then begins."""
        deployment, kept = self._deployment, self._deployment.kept
        assert kept is not None
        groups = sorted(state.missing)
        num_encoders = min(len(groups), max(1, len(self._candidates().taking("encode"))))
        chunk_tokens = deployment.language.max_chunk_tokens
        fleet = Fleet(num_encoders, deployment.max_batch_patches, chunk_tokens)
        parts = list(part_costs(self._profile, fleet, kept, state, groups))
        way = cheapest(parts, deployment.cpu_threads)
        num_kv = way.num_kv
        state.kept = {groups[number] for number in way.embeddings}
        num_tokens = sum(state.job.groups[group].media.num_tokens for group in groups[:num_kv])

        def restored() -> None:
            if num_kv:
                self._restore(state, state.starts[groups[num_kv - 1] + 1])
                state.missing = self._missing_groups(state)
            self._begin_missing(state)

        if num_kv:
            disk.read(self._profile.memory.sequence_bytes(num_tokens), restored)
        else:
            restored()

    def _restore(self, state: RequestState, stop: int) -> None:
        """Puts keys and values behind those that are cached, if there is room."""
        self._workers[state.prefill_worker].wake()
        kv = self._workers[state.prefill_worker].language_side.kv
        start = kv.num_cached(state.identity, stop) // kv.block_size * kv.block_size
        if start < stop:
            kv.restore(state.identity, start, stop)

    def _plan_known(self, state: RequestState) -> None:
        """Plans a prompt whose media are all known: they come all the same, and are looked at."""
        images = [group for group in state.job.groups if not group.is_video]
        left = len(images)

        def plan() -> None:
            for _ in images:
                self._machine.spend_in_turn("image", planned)
            if not images:
                submit()

        def planned() -> None:
            nonlocal left
            left -= 1
            if not left:
                submit()

        def submit() -> None:
            state.media_read = state.encoded = self._events.now
            self._submit(state)

        if state.job.groups:
            self._machine.spend(("media",), plan)
        else:
            submit()

    def receive(self, state: RequestState) -> None:
        """Brings the groups that a request misses to its prefill worker, once that has room for them."""
        worker = self._workers[state.prefill_worker]
        if worker.receiver is None:
            self._bring(state, sorted(state.missing))
        else:
            state.receiver = worker.receiver
            worker.receiver.open(state)
            worker.between_turns(partial(self._grant, worker.receiver))

    def _grant(self, receiver: GroupReceiver) -> None:
        """Brings what there is room for, and passes on what is there already."""
        granted = receiver.grant()
        for _, grants in groupby(granted, key=lambda grant: grant[0].request_id):
            pairs = list(grants)
            state = pairs[0][0]
            unknown = [group for _, group in pairs if not self._is_sent_from_cache(state, group)]
            if unknown:
                self._bring(state, unknown)
        self._take(receiver)

    def _is_sent_from_cache(self, state: RequestState, group: int) -> bool:
        """Asks the encoder that had the group last for it. Returns whether it still has it."""
        key = group_key(state, group, self._profile.model)
        name = self._router.contents.encoder(self._candidates().taking("encode"), key)
        if name is None:
            return False
        encoder = self._workers[name].encoder
        if encoder is None or encoder.cache is None or not encoder.cache.is_ready(key):
            return False
        self.encode(state, group, name)
        return True

    def _bring(self, state: RequestState, wanted: Sequence[int]) -> None:
        """Reads groups, plans the prompt when all its images are there, and hands them over."""
        for group in (each for each in wanted if each in state.kept):
            self._read_embeddings(state, group)
        wanted = [group for group in wanted if group not in state.kept]
        if not wanted:
            return
        unread = len(wanted)
        images = [group for group in wanted if not state.job.groups[group].is_video]
        unplanned = len(images)

        def read(group: int) -> None:
            nonlocal unread
            unread -= 1
            if unread == 0:
                state.media_read = self._events.now
            if self._deployment.is_overlapped and state.job.groups[group].is_video:
                self._machine.spend_in_turn("video", partial(self.deal, state, [group]))
            elif self._deployment.is_overlapped:
                self._machine.spend_in_turn("image", planned)
            elif unread == 0:
                self.deal(state, wanted)

        def planned() -> None:
            nonlocal unplanned
            unplanned -= 1
            if unplanned == 0:
                for group in images:
                    self._machine.spend_in_turn("image", partial(self.deal, state, [group]))

        def begin() -> None:
            for group in wanted:
                self._reader(state.job.groups[group]).submit(
                    state.job.groups[group].decode_ticks, partial(read, group)
                )

        self._machine.spend(("media",), begin)

    def _reader(self, group: GroupWork) -> CpuPool:
        """Returns what reads a group: of a video, the CPU or the GPUs, which is through with it first."""
        readers = self._readers if group.is_video else self._readers[:1]
        return readers[soonest([each.load for each in readers], group.decode_ticks)]

    def _read_embeddings(self, state: RequestState, group: int) -> None:
        """Brings the embeddings of a group from the disk."""
        assert self._disk is not None
        num_tokens = state.job.groups[group].media.num_tokens
        num_bytes = num_tokens * self._profile.memory.embedding_bytes_per_token

        def arrived() -> None:
            receiver = state.receiver
            if receiver is None:
                self._has_come(state, group)
            else:
                receiver.deliver(group_key(state, group, self._profile.model))
                self._take(receiver)

        self._disk.read(num_bytes, partial(self.after_transfer, num_bytes, arrived))

    def _missing_groups(self, state: RequestState) -> set[int]:
        """Returns groups that the prefill worker has no keys and values of."""
        num_groups = len(state.job.groups)
        if not self._deployment.enable_prefix_caching or not num_groups:
            return set(range(num_groups))
        self._workers[state.prefill_worker].wake()  # blocks that steps under way have evicted are gone by now
        kv = self._workers[state.prefill_worker].language_side.kv
        num_cached = kv.num_cached(state.identity, state.job.num_prompt_tokens - 1)
        return {group for group in range(num_groups) if state.starts[group + 1] > num_cached}

    def _submit(self, state: RequestState) -> None:
        state.is_added = True
        self._workers[state.prefill_worker].language_side.add(state)
        self._workers[state.prefill_worker].wake()

    def deal(self, state: RequestState, groups: Sequence[int]) -> None:
        """Dispatches groups to encoders."""
        encoders, deployment = self._candidates().taking("encode"), self._deployment
        if deployment.deal is None or deployment.sharding != "groups" or len(groups) == 1:
            for group in groups:
                wanted = wanted_encoder(deployment.sharding, state.prefill_worker, state.encoder)
                state.encoder = self._router.encoder(encoders, wanted)
                self.encode(state, group, state.encoder)
            return
        patches = [state.job.groups[group].media.num_patches for group in groups]
        outstanding = [self._router.in_flight(name).encode_patches for name in encoders]
        for encoder, group in sorted(zip(deployment.deal(patches, outstanding), groups, strict=True)):
            self.encode(state, group, encoders[encoder])

    def encode(self, state: RequestState, group: int, encoder: str) -> None:
        """Dispatches one group to an encoder."""
        worker = self._workers[encoder]
        assert worker.encoder is not None
        self._router.add(encoder, encode_patches=state.job.groups[group].media.num_patches)
        self._num_dispatched += 1
        key, number = group_key(state, group, self._profile.model), self._num_dispatched
        worker.encoder.add(EncodeTask(state, group, key, str(number), state.receiver))
        worker.wake()

    def encoded(self, worker: SimulatedWorker, tasks: list[EncodeTask]) -> None:
        """Sends embeddings to the worker that prefills them."""
        for state in {id(task.state): task.state for task in tasks}.values():
            state.encode_ticks += worker.last_ticks
        if worker.last_ticks:
            self.num_encoded += len({task.key for task in tasks})
        for task in tasks:
            media = task.state.job.groups[task.group].media
            self._router.add(worker.name, encode_patches=-media.num_patches)
            arrived = partial(self._arrived, worker, worker.encoder, task)
            if worker.name == task.state.prefill_worker:
                arrived()
                continue
            num_bytes = media.num_tokens * self._profile.memory.embedding_bytes_per_token
            self.after_transfer(num_bytes, partial(self._machine.spend, ("sent",), arrived))

    def after_transfer(self, num_bytes: int, then: Callable[[], None]) -> None:
        """Calls a function when that number of bytes has been sent."""
        ticks = ticks_of(self._profile.transfer.cost.seconds(num_bytes, 1))
        self._events.push(self._events.now + ticks, EventPriority.END, then)

    def _arrived(self, worker: SimulatedWorker, encoder: EncodeSide | None, task: EncodeTask) -> None:
        receiver = task.receiver
        if receiver is None:
            self._has_come(task.state, task.group)
            return
        if encoder is not None:
            encoder.release(task)
            worker.wake()  # batches may wait for room
        self._router.contents.remember_group(worker.name, task.key)
        receiver.deliver(task.key)
        self._take(receiver)

    def _take(self, receiver: GroupReceiver) -> None:
        for state, group in receiver.taken():
            self._has_come(state, group)

    def _has_come(self, state: RequestState, group: int) -> None:
        """Lets a request prefill up to the next group that is missing."""
        state.missing.discard(group)
        if not state.missing:
            state.encoded = self._events.now
            state.media_read = max(state.media_read, state.placed)  # of caches alone nothing is read
        if state.is_added:
            self._workers[state.prefill_worker].wake()
            self._workers[state.prefill_worker].language_side.set_ready(state)
        elif not state.missing:
            self._submit(state)

    def prefilled(self, states: Sequence[RequestState]) -> None:
        """Makes room where tokens of groups have been computed."""
        for state in states:
            if state.receiver is not None:
                state.receiver.prefilled(state)
                self._grant(state.receiver)
