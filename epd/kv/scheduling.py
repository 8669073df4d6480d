"""Decides which tokens of which requests the language model computes next, and who is preempted. No tensors.

One rule serves prefill and decode: a request knows some tokens and has computed the first of them.

    tokens     | prompt ......................... | output ... |
    computed   [                )                               num_computed, only grows, but for preemption
    ready      [                          )                     embeddings have come this far
    known      [                                               num_tokens

A *decode* is a request that has computed all but its last token; it gets that one token in every step, before
any prefill chunk is cut, so prefills never stall it (Sarathi-Serve, section 4.2). The rest of the budget goes
to prefill chunks of the oldest requests, several in one pass (Prepacking). A request that waits for its media
takes nothing from the others.

Blocks for the whole prompt are reserved on admission, first come, first served. Output may outgrow the pool:
then the youngest running request is preempted and waits at its old place in the queue. Priority goes before
age: the more important are admitted and prefilled first, and preempt the less important.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection, Sequence

from epd.kv.block_pool import BlockCopy
from epd.kv.kv_cache import KVCacheManager
from epd.kv.pass_limits import SchedulerConfig
from epd.kv.scheduled_request import (
    Chunk,
    KeptPrompts,
    Preemption,
    Reservations,
    Restore,
    ScheduledRequest,
    SchedulerOutput,
)
from epd.types import ceil_div


def _by_order(request: ScheduledRequest) -> tuple[int, int]:
    return request.priority, request.arrival


class Scheduler:
    """Keeps one worker's KV blocks and its queues `waiting` and `running`, by priority and arrival."""

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager) -> None:
        self.config = config
        self.kv = kv
        self.reservations = Reservations(kv, recomputes=config.preemption == "recompute")
        self.prompts = KeptPrompts(kv)
        self.waiting: list[ScheduledRequest] = []
        self.running: list[ScheduledRequest] = []
        self.num_preempted = 0
        # A request whose blocks may be read by others must keep them.
        self.may_preempt: Callable[[str], bool] = lambda _: True
        self._tells_each = kv.spec.keeps_states  # the cache, of each token of a decode
        self._held: set[str] = set()
        self._num_arrived = 0

    def add(self, request: ScheduledRequest) -> None:
        """Queues a request. Raises InfeasibleError when it would not fit into the empty pool."""
        self.reservations.check_fits(request)
        self._number(request)
        insort(self.waiting, request, key=_by_order)

    def adopt(self, request: ScheduledRequest) -> None:
        """Takes over a request whose blocks are in the cache already, filled up to `num_computed`."""
        self._number(request)
        insort(self.running, request, key=_by_order)

    def _number(self, request: ScheduledRequest) -> None:
        request.arrival = self._num_arrived
        self._num_arrived += 1

    def can_admit(self, request: ScheduledRequest) -> bool:
        """Returns whether `request` would run at once if it were added now: first in the queue, with room."""
        pairs = enumerate(self.reservations.num_blocks(request))
        has_blocks = all(self.kv.num_free_blocks(group) >= needed for group, needed in pairs)
        is_first = all(each.priority > request.priority for each in self.waiting)
        return is_first and self._has_slot(request) and has_blocks and self.kv.has_states(1)

    def remove(self, request: ScheduledRequest, *, hold: bool = False) -> None:
        """Takes a request out, finished or aborted. hold: its blocks stay until `release`."""
        if request in self.running:
            self.running.remove(request)
            self._settle(request)
            if hold:
                self._held.add(request.request_id)
            else:
                self.kv.free(request.request_id)
        else:
            self.waiting.remove(request)

    def release(self, request_id: str) -> None:
        """Frees the blocks of a removed request that was held."""
        self._held.remove(request_id)
        self.kv.free(request_id)

    def is_held(self, request_id: str) -> bool:
        return request_id in self._held

    def take_back(self, request: ScheduledRequest) -> None:
        """Resumes a request that was removed and held, with its blocks and at its old place."""
        self._held.remove(request.request_id)
        insort(self.running, request, key=_by_order)

    def schedule(self) -> SchedulerOutput:
        """Decides one step and reserves its blocks; `advance` must follow for every chunk."""
        output = SchedulerOutput()
        budget = self._schedule_decodes(output, self.config.max_num_batched_tokens)
        self._reserve_states(output)
        self._admit(output)
        self._schedule_prefills(output, budget)
        return output

    def _schedule_decodes(self, output: SchedulerOutput, budget: int) -> int:
        """Gives each decode one token and its drafts, oldest first. Returns the rest of the budget.

        Those with a recurrent state repeat the last drafts that held first: see `advance_drafted`.
        """
        for request in [each for each in self.running if each.is_decoding and each.may_sample]:
            if budget == 0:
                break
            if not request.is_decoding:  # it was just preempted for an older one
                continue
            num_known = min(request.num_tokens - request.num_computed, budget)
            num_drafts = min(request.num_drafts, budget - num_known)
            stop = request.num_computed + num_known + num_drafts
            if self._make_room(request, stop - request.num_dropped, output):
                output.chunks.append(Chunk(request, request.num_computed, stop, num_drafts))
                budget -= num_known + num_drafts
        return budget

    def _reserve_states(self, output: SchedulerOutput) -> None:
        """Gives each prefill a slot for its next state, and room in windows for its next chunk.

        Its other blocks it has had since its admission.
        """
        prefills = [each for each in self.running if not each.is_decoding]
        for request in prefills if self.kv.spec.keeps_states else ():
            if request in self.running:
                self._make_room(request, self._num_reserved(request), output)

    def _num_reserved(self, request: ScheduledRequest) -> int:
        """Returns for how many held tokens a prefill needs a state, or room in windows, in its next pass."""
        num_ahead = self.reservations.num_ahead(request) if self.kv.spec.num_windows else 1
        more = min(num_ahead, self.reservations.num_tokens(request) - request.num_held)
        return request.num_held + max(more, 1)

    def decodes_ahead(self, unread: Collection[ScheduledRequest]) -> list[ScheduledRequest]:
        """Lists the decodes that go on, those of `unread` behind a token that nobody knows yet.

        Without those that this token ends. Lists none where a pass cannot take all.
        """
        going_on = [each for each in self.running if each in unread or (each.is_decoding and each.may_sample)]
        going_on = [each for each in going_on if each.num_tokens + (each in unread) < each.max_total_tokens]
        return going_on if len(going_on) <= self.config.max_num_batched_tokens else []

    def prefills_ahead(self, num_decodes: int, under_way: Collection[ScheduledRequest]) -> list[Chunk] | None:
        """Cuts chunks for a pass of so many decodes, but of requests whose chunks are under way.

        Returns None if others had to be preempted for them.
        """
        output = SchedulerOutput()
        self._schedule_prefills(output, self.config.max_num_batched_tokens - num_decodes, under_way)
        requests = [chunk.request for chunk in output.chunks] if self.kv.spec.keeps_states else ()
        has_room = all(self.make_room_ahead(each, self._num_reserved(each)) for each in requests)
        return output.chunks if has_room else None

    def may_admit(self) -> bool:
        """Returns whether a step might admit a request, or preempt another for it."""
        if not self.waiting:
            return False
        first = self.waiting[0]
        may_open = self._has_slot(first) and self.reservations.may_fit(first)
        return may_open or (bool(self.running) and self.running[-1].priority > first.priority)

    def make_room_ahead(self, request: ScheduledRequest, num_tokens: int) -> bool:
        """Reserves blocks for held tokens; False, and nothing is changed, if others had to be preempted.

        Blocks that are not used after all wait for its next tokens.
        """
        if not self.kv.can_allocate(request.request_id, num_tokens):
            return False
        self.kv.allocate(request.request_id, num_tokens)
        return True

    def _make_room(self, request: ScheduledRequest, num_tokens: int, output: SchedulerOutput) -> bool:
        """Reserves blocks for held tokens, preempting the youngest for them; False if that was `request`."""
        while not self.kv.can_allocate(request.request_id, num_tokens):
            if self.prompts.give_way():
                continue
            preempted = next(each for each in reversed(self.running) if self._can_preempt(each, request))
            self.running.remove(preempted)
            self._preempt(preempted, output)
            if preempted is request:
                return False
        self.kv.allocate(request.request_id, num_tokens)
        return True

    def _can_preempt(self, candidate: ScheduledRequest, request: ScheduledRequest) -> bool:
        """Returns whether `candidate` may be preempted for `request`; the last one is `request` itself."""
        return candidate is request or self.may_preempt(candidate.request_id)

    def _preempt(self, preempted: ScheduledRequest, output: SchedulerOutput) -> None:
        self.num_preempted += 1
        self._settle(preempted)
        output.chunks = [chunk for chunk in output.chunks if chunk.request is not preempted]
        if self.config.preemption == "offload" and preempted.num_computed:
            groups = range(len(self.kv.spec.num_blocks))
            tables = tuple(tuple(self.kv.block_table(preempted.request_id, group)) for group in groups)
            state = self.kv.current_state(preempted.request_id)
            output.preemptions.append(Preemption(preempted, preempted.num_held, tables, state))
            preempted.num_offloaded = preempted.num_computed
        else:
            preempted.num_dropped = 0
        preempted.num_computed = preempted.num_seen = 0
        self.kv.free(preempted.request_id)
        insort(self.waiting, preempted, key=_by_order)

    def _admit(self, output: SchedulerOutput) -> None:
        """Gives blocks to waiting requests in order, from free room or by preempting less important ones.

        Those come later in the queue, so none is admitted and then preempted in one step.
        """
        while self.waiting:
            first = self.waiting[0]
            has_room = self._admit_first(output) or (self._has_slot(first) and self.prompts.give_way())
            if not has_room and not self._preempt_for(first, output):
                return

    def admit_early(self) -> SchedulerOutput:
        """Admits waiting requests for which there is plenty of room, before a step or in the middle of one.

        Whatever the step has decided holds: nobody is preempted, and each running request finds blocks for
        its next tokens. What comes back from host memory waits for `schedule`.
        """
        output = SchedulerOutput()
        while self.waiting and self._has_plenty(self.waiting[0]) and self._admit_first(output):
            pass
        return output

    def _has_plenty(self, request: ScheduledRequest) -> bool:
        """Returns whether blocks for the next tokens of all others stay free beside a request's own."""
        if request.num_offloaded:
            return False
        size = self.kv.block_size
        others = sum(1 + ceil_div(each.num_drafts, size) for each in self.running)
        has_states = self.kv.has_states(1 + len(self.running))
        return has_states and all(
            self.kv.num_free_blocks(group) >= needed + others
            for group, needed in enumerate(self.reservations.num_blocks(request))
        )

    def _admit_first(self, output: SchedulerOutput) -> bool:
        """Gives the first waiting request its blocks. Returns False if there is no room."""
        request = self.waiting[0]
        may_open = self._has_slot(request) and self.reservations.may_fit(request)
        copies = self.reservations.open(request) if may_open else None
        if copies is None:
            return False
        del self.waiting[0]
        insort(self.running, request, key=_by_order)
        output.copies += copies
        if request.num_offloaded > request.num_computed:
            dropped = request.num_dropped
            start, stop = request.num_computed - dropped, request.num_offloaded - dropped
            output.restores.append(Restore(request, start, stop))
            request.num_computed = request.num_offloaded
        request.num_offloaded = 0
        output.admitted.append(request)
        return True

    def _preempt_for(self, request: ScheduledRequest, output: SchedulerOutput) -> bool:
        """Preempts one less important request for one that waits; False where all could not make room."""
        preemptible = [
            each
            for each in reversed(self.running)
            if each.priority > request.priority and self.may_preempt(each.request_id)
        ]
        if not preemptible or request.parent is not None or not self._would_fit(request, preemptible):
            return False
        self.running.remove(preemptible[0])
        self._preempt(preemptible[0], output)
        return True

    def _would_fit(self, request: ScheduledRequest, preemptible: Sequence[ScheduledRequest]) -> bool:
        """Returns whether there would be blocks and sequence slots for a request without these."""
        others = sum(each.num_seqs for each in self.running if each not in preemptible)
        is_alone = len(preemptible) == len(self.running)
        has_slot = is_alone or others + request.num_seqs <= self.config.max_num_seqs
        return has_slot and all(
            self.kv.num_free_blocks(group)
            + sum(self.kv.num_held_blocks(each.request_id, group) for each in preemptible)
            >= needed
            for group, needed in enumerate(self.reservations.num_blocks(request))
        )

    def _has_slot(self, request: ScheduledRequest) -> bool:
        """Returns whether `max_num_seqs` allows the request; one with more answers than that runs alone."""
        if len(self.running) >= self.config.max_num_seqs:  # each counts at least one
            return False
        num_seqs = sum(each.num_seqs for each in self.running) + request.num_seqs
        return num_seqs <= self.config.max_num_seqs or not self.running

    def _schedule_prefills(
        self, output: SchedulerOutput, budget: int, under_way: Collection[ScheduledRequest] = ()
    ) -> None:
        """Cuts prefill chunks. A pruned range larger than the rest of the budget waits, or goes first.

        A recurrent state that comes back in this step takes the slot of the next one: its request waits.
        """
        num_decodes = len(output.chunks)
        has_states = self.kv.spec.num_states > 0
        back = {restore.request.request_id for restore in output.restores} if has_states else set()
        for request in self.running:
            if budget <= 0:
                return
            waits = request.is_decoding or request.request_id in back or request in under_way
            chunk = None if waits else self._next_chunk(request, budget)
            if chunk and (chunk.num_inputs <= budget or len(output.chunks) == num_decodes):
                output.chunks.append(chunk)
                budget -= chunk.num_inputs

    def _next_chunk(self, request: ScheduledRequest, budget: int) -> Chunk | None:
        """Returns a pruned range, regardless of limits; else what they allow, up to the next such range."""
        start, num_tokens = request.num_computed, request.num_computable
        pruned = request.pruned_range(start)
        if pruned and pruned.start == start:
            num_kept = pruned.stop - start
            chunk = Chunk(request, start, pruned.stop, num_pruned=pruned.num_inputs - num_kept)
            return chunk if num_tokens >= num_kept else None
        if pruned:
            num_tokens = min(num_tokens, pruned.start - start)
        num_tokens = min(num_tokens, self.config.max_chunk_tokens, budget)
        num_tokens = min(num_tokens, request.next_state_stop(start) - start)
        return Chunk(request, start, start + num_tokens) if num_tokens > 0 else None

    def advance(self, request: ScheduledRequest, num_computed: int) -> None:
        """Records a chunk that has been run: tokens [0, num_computed) are in the cache, but those dropped."""
        request.num_computed = num_computed
        request.num_ready = max(request.num_ready, num_computed)
        keeps_state = num_computed in request.state_stops
        self.kv.commit(request.request_id, request.identity, request.num_held, keeps_state=keeps_state)
        if request.pruned and num_computed == request.pruned[-1].stop:  # no more is written than stays
            self.kv.truncate(request.request_id, self.reservations.num_tokens(request, num_computed))

    def advance_drafted(self, chunk: Chunk, num_held: int) -> None:
        """Records a decode that has been run, of whose drafts the first `num_held` hold.

        A recurrent state has taken no draft. It takes those that hold in the next pass, which repeats them.
        """
        stop = chunk.stop - chunk.num_drafts
        chunk.request.num_seen = stop + num_held
        self.advance(chunk.request, stop if self.kv.spec.num_states else stop + num_held)

    def advance_one(self, request: ScheduledRequest) -> None:
        """Records the token that a decode has computed; the cache is told when a block is whole."""
        request.num_computed += 1
        num_held = request.num_computed - request.num_dropped
        if self._tells_each or not num_held % self.kv.block_size:
            self._settle(request)

    def _settle(self, request: ScheduledRequest) -> None:
        """Tells the cache of the tokens that a decode has computed."""
        if request.num_tokens > request.num_prompt_tokens:
            self.kv.commit(request.request_id, request.identity, request.num_held)

    def drop(self, request: ScheduledRequest) -> None:
        """Records that what a computed prompt keeps was copied behind it; the rest leaves the cache."""
        num_kept = request.num_computed - request.num_to_drop
        self.kv.keep_behind(request.request_id, [num_kept] * len(self.kv.spec.num_blocks))
        request.num_dropped = request.num_to_drop

    def fork(self, request: ScheduledRequest, copy: ScheduledRequest) -> list[BlockCopy]:
        """Starts `copy` where `request` has just ended its prompt, on the room reserved for that."""
        copies = self.kv.truncate(request.request_id, request.num_held)
        copies += self.kv.fork(request.request_id, copy.request_id)
        copy.num_dropped = request.num_dropped
        copy.num_computed = copy.num_ready = request.num_computed
        copy.priority = request.priority
        self.adopt(copy)
        return copies

    def check_integrity(self) -> None:
        """Raises AssertionError unless queues are in order, and running and held requests own blocks."""
        self.kv.check_integrity()
        for queue in (self.waiting, self.running):
            order = [_by_order(request) for request in queue]
            if order != sorted(set(order)):
                raise AssertionError(f"a queue is out of order: {order}")
        for request in self.running:
            held = self.kv.num_tokens(request.request_id)
            if not self.kv.is_written(request.request_id):
                raise AssertionError(f"a copy for {request} was not carried out, or never recorded")
            is_known = request.num_computed <= request.num_tokens <= request.max_total_tokens + 1
            if not (held <= request.num_held and is_known):
                raise AssertionError(f"{held} tokens are in the cache of {request}")
        owners = {request.request_id for request in self.running} | self._held | self.prompts.ids
        lost = {owner for owner in owners if owner not in self.kv}
        if lost or any(request.request_id in self.kv for request in self.waiting):
            raise AssertionError(f"{lost} run without blocks, or a waiting request has some")
