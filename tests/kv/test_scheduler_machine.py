"""Scheduler and KV cache policy under any arrivals, media, steps, aborts and holds. No tensors."""

from __future__ import annotations

from contextlib import suppress

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from epd.errors import InfeasibleError
from epd.kv.kv_cache import KVCacheManager
from epd.kv.kv_room import KVCacheSpec
from epd.kv.pass_limits import SchedulerConfig
from epd.kv.prefix_cache import token_identity
from epd.kv.scheduled_request import ScheduledRequest, SchedulerOutput
from epd.kv.scheduling import Scheduler

VOCABULARY = 3  # few tokens, so that prompts often begin alike


class SchedulerMachine(RuleBasedStateMachine):
    has_states = True  # drawn requests may keep a recurrent state

    @initialize(
        num_blocks=st.integers(4, 24),
        block_size=st.sampled_from([1, 3, 4]),
        groups=st.integers(1, 2),
        budget=st.integers(1, 24),
        max_seqs=st.integers(1, 6),
        chunk=st.integers(1, 24),
        mode=st.sampled_from(["recompute", "offload"]),
        caching=st.booleans(),
        num_states=st.sampled_from([0, 0, 2, 3, 8]),
        window=st.sampled_from([None, None, 1, 5, 12]),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        groups: int,
        budget: int,
        max_seqs: int,
        chunk: int,
        mode: str,
        caching: bool,
        num_states: int,
        window: int | None,
    ) -> None:
        config = SchedulerConfig(budget, max_seqs, chunk, mode)  # type: ignore[arg-type]
        window = window if self.has_states else None
        spec = KVCacheSpec(
            (num_blocks,) * (groups + (window is not None)),
            block_size,
            num_states if self.has_states else 0,
            (None,) * groups + ((window,) if window is not None else ()),
            max(chunk, 9),
        )
        self.scheduler = Scheduler(config, KVCacheManager(spec, enable_prefix_caching=caching))
        self.requests: dict[str, ScheduledRequest] = {}
        self.offloaded: dict[str, int] = {}
        self.held: list[str] = []
        self.num_started = 0

    @rule(
        tokens=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=30),
        max_new=st.integers(1, 12),
        ready=st.floats(0, 1),
        copies=st.sampled_from([1, 1, 3]),
        priority=st.sampled_from([0, 0, 5, -1]),
        is_unlike_others=st.booleans(),
    )
    def add(
        self,
        tokens: list[int],
        max_new: int,
        ready: float,
        copies: int,
        priority: int,
        is_unlike_others: bool,
    ) -> None:
        self.num_started += 1
        if is_unlike_others:
            tokens = [VOCABULARY + self.num_started, *tokens[1:]]
        request = ScheduledRequest(
            request_id=f"r{self.num_started}",
            identity=token_identity(tokens),
            num_prompt_tokens=len(tokens),
            max_total_tokens=len(tokens) + max_new,
            num_ready=int(ready * len(tokens)),
            num_copies=copies,
            priority=priority,
        )
        spec = self.scheduler.kv.spec
        if spec.keeps_states:
            request.state_stops = (len(tokens) // spec.block_size * spec.block_size,)
        try:
            self.scheduler.add(request)
        except InfeasibleError:
            needed = max(request.max_total_tokens, len(tokens) + 1 + (copies - 1) * spec.block_size)
            assert -(-needed // spec.block_size) > min(spec.num_blocks)
        else:
            self.requests[request.request_id] = request

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def media_arrive(self, data: st.DataObject) -> None:
        request = self.pick(data)
        more = data.draw(st.integers(0, max(request.num_prompt_tokens - request.num_ready, 0)))
        request.num_ready += more

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = self.pick(data)
        self.scheduler.remove(request)
        del self.requests[request.request_id]
        self.offloaded.pop(request.request_id, None)

    @precondition(lambda self: self.scheduler.running)
    @rule(data=st.data())
    def hold_and_release(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.scheduler.running))
        self.scheduler.remove(request, hold=True)
        del self.requests[request.request_id]
        self.scheduler.check_integrity()
        self.scheduler.release(request.request_id)

    @precondition(lambda self: self.written())
    @rule(
        data=st.data(),
        questions=st.lists(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=40), max_size=3),
        max_new=st.integers(1, 12),
    )
    def hold_and_ask(self, data: st.DataObject, questions: list[list[int]], max_new: int) -> None:
        """A request is over but for its blocks, with which its children begin."""
        parent = data.draw(st.sampled_from(self.written()))
        num_written = self.scheduler.kv.num_tokens(parent.request_id)
        self.scheduler.remove(parent, hold=True)
        del self.requests[parent.request_id]
        self.held.append(parent.request_id)
        for question in questions:
            tokens = [*parent.identity.rows[:num_written, 0].tolist(), *question]
            self.ask(ScheduledRequest(
                f"c{self.num_started}", token_identity(tokens), len(tokens), len(tokens) + max_new,
                num_ready=len(tokens), parent=parent.request_id,
            ))  # fmt: skip

    def ask(self, child: ScheduledRequest) -> None:
        self.num_started += 1
        with suppress(InfeasibleError):
            self.scheduler.add(child)
            self.requests[child.request_id] = child

    def written(self) -> list[ScheduledRequest]:
        """Requests of which something is in the cache, and nothing is to be dropped."""
        running = [each for each in self.scheduler.running if not each.num_to_drop]
        return [each for each in running if self.scheduler.kv.num_tokens(each.request_id)]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.release_one(data.draw(st.sampled_from(self.held)))

    def release_one(self, parent: str) -> None:
        """A held request goes, and with it the children that could not be opened again without it."""
        for child in [each for each in self.requests.values() if each.parent == parent]:
            self.scheduler.remove(child)
            del self.requests[child.request_id]
            self.offloaded.pop(child.request_id, None)
        self.held.remove(parent)
        self.scheduler.release(parent)

    @precondition(lambda self: self.scheduler.running)
    @rule(data=st.data(), drafts=st.integers(1, 4))
    def guess(self, data: st.DataObject, drafts: int) -> None:
        request = data.draw(st.sampled_from(self.scheduler.running))
        if request.is_decoding:
            request.num_drafts = min(drafts, request.max_total_tokens - request.num_tokens - 1)

    @rule()
    def admit_early(self) -> None:
        """Nobody is preempted then, nor by what was admitted in the step that follows."""
        num_preempted = self.scheduler.num_preempted
        output = self.scheduler.admit_early()
        assert [*output.chunks, *output.preemptions, *output.restores] == []
        self.follow_moves(output)
        assert self.scheduler.num_preempted == num_preempted

    @rule(wrong=st.integers(0, 4), admits_within=st.booleans())
    def step(self, wrong: int, admits_within: bool) -> None:
        """Schedules, checks what was decided, and does what the engine would."""
        decoding = [request for request in self.scheduler.running if request.is_decoding]
        output = self.scheduler.schedule()
        self.check(output, decoding)
        self.follow_moves(output)
        if admits_within:
            self.admit_early()
        for chunk in output.chunks:
            request = chunk.request
            if not chunk.is_sampled:
                self.scheduler.advance(request, chunk.stop)
                self.drop(request)
                continue
            is_first = request.num_tokens == request.num_prompt_tokens
            num_new = 1 + max(chunk.num_drafts - wrong, 0)
            for token in range(num_new):
                request.identity.append(token % VOCABULARY)
            request.num_tokens += num_new
            self.scheduler.advance_drafted(chunk, num_new - 1)
            request.num_drafts = 0
            if is_first:
                self.drop(request)
                self.fork(request)
            if request.num_tokens >= request.max_total_tokens:
                self.scheduler.remove(request)
                del self.requests[request.request_id]

    def drop(self, request: ScheduledRequest) -> None:
        """What a computed prompt keeps has been copied behind it."""
        kv = self.scheduler.kv
        if not request.num_to_drop or request.num_dropped or request.num_computed < request.num_prompt_tokens:
            return
        num_kept = request.num_prompt_tokens - request.num_to_drop
        self.scheduler.drop(request)
        for group in range(len(kv.spec.num_blocks)):
            assert kv.num_tokens(request.request_id, group) == num_kept
            # One that is computed again has room for its answer so far.
            num_held = request.num_tokens - request.num_to_drop
            needed = num_held + 1 + request.num_copies * kv.block_size
            assert len(kv.block_table(request.request_id, group)) <= -(-needed // kv.block_size)

    def fork(self, request: ScheduledRequest) -> None:
        for index in range(1, request.num_copies):
            copy = ScheduledRequest(
                request_id=f"{request.request_id}#{index}",
                identity=request.identity.copy(),
                num_prompt_tokens=request.num_prompt_tokens,
                max_total_tokens=request.max_total_tokens,
                num_ready=request.num_ready,
                num_to_drop=request.num_to_drop,
                pruned=request.pruned,
                num_tokens=request.num_tokens,
            )
            if copy.num_tokens < copy.max_total_tokens:
                self.scheduler.kv.copied(self.scheduler.fork(request, copy))
                self.requests[copy.request_id] = copy

    def check(self, output: SchedulerOutput, decoding: list[ScheduledRequest]) -> None:
        config = self.scheduler.config
        assert output.num_tokens <= config.max_num_batched_tokens
        num_seqs = sum(each.num_seqs for each in self.scheduler.running)
        if self.scheduler.waiting and output.admitted:
            assert max(each.priority for each in output.admitted) <= self.scheduler.waiting[0].priority
        if self.scheduler.waiting and self.scheduler._has_slot(self.scheduler.waiting[0]):
            assert self.scheduler.reservations.open(self.scheduler.waiting[0]) is None, "it would have fitted"
        assert num_seqs <= config.max_num_seqs or len({r.split("#")[0] for r in self.running}) == 1
        names = [chunk.request.request_id for chunk in output.chunks]
        assert len(set(names)) == len(names)
        for chunk in output.chunks:
            assert chunk.request in self.scheduler.running
            assert chunk.start == chunk.request.num_computed < chunk.stop
            assert chunk.stop <= chunk.request.num_tokens + chunk.num_drafts
            if chunk.start < chunk.request.num_prompt_tokens:
                has_all = chunk.request.num_ready >= chunk.request.num_prompt_tokens
                assert has_all or chunk.stop <= chunk.request.num_ready
                assert chunk.stop - chunk.start <= config.max_chunk_tokens
                assert not any(chunk.start < stop < chunk.stop for stop in chunk.request.state_stops)
            self.check_states(chunk.request)
        back = [each for each in output.admitted if each in decoding]  # gave way and came back at once
        stalled = [
            each
            for each in decoding
            if each.is_decoding and each.request_id not in names and each not in back
        ]
        if stalled:
            assert output.num_tokens == config.max_num_batched_tokens, "a decode was stalled for no reason"
            assert all(chunk.request in decoding for chunk in output.chunks)

    def check_states(self, request: ScheduledRequest) -> None:
        """What is computed reads one slot, unless it begins, and writes another that nobody else holds."""
        kv = self.scheduler.kv
        if not kv.spec.num_states:
            return
        current, following = kv.current_state(request.request_id), kv.next_state(request.request_id)
        assert (current is None) == (request.num_computed == 0)
        assert following is not None
        assert kv._room.states is not None
        assert kv._room.states.references(following) == 1

    def follow_moves(self, output: SchedulerOutput) -> None:
        """What was offloaded comes back whole, and only that."""
        self.scheduler.kv.copied(output.copies)
        for preemption in output.preemptions:
            self.offloaded[preemption.request.request_id] = preemption.num_tokens
            assert len(preemption.block_tables[0]) * self.scheduler.kv.block_size >= preemption.num_tokens
            assert (preemption.state is None) == (not self.scheduler.kv.spec.num_states)
        for restore in output.restores:
            assert 0 <= restore.start < restore.stop == self.offloaded.pop(restore.request.request_id)
            self.scheduler.advance(restore.request, restore.stop + restore.request.num_dropped)
        for request in output.admitted:
            self.offloaded.pop(request.request_id, None)

    @property
    def running(self) -> list[str]:
        return [each.request_id for each in self.scheduler.running]

    def pick(self, data: st.DataObject) -> ScheduledRequest:
        return self.requests[data.draw(st.sampled_from(sorted(self.requests)))]

    @invariant()
    def books_are_in_order(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()
            queued = {r.request_id for r in (*self.scheduler.waiting, *self.scheduler.running)}
            assert queued == set(self.requests)

    def teardown(self) -> None:
        """Once their media are there, all come to an end: nobody starves."""
        if not hasattr(self, "scheduler"):
            return
        for parent in list(self.held):
            self.release_one(parent)
        for request in self.requests.values():
            request.num_ready = max(request.num_ready, request.num_prompt_tokens)
        for _ in range(5000):
            if not self.requests:
                break
            for request in self.requests.values():
                request.num_ready = max(request.num_ready, request.num_prompt_tokens)
            self.step(0, False)
            self.books_are_in_order()
        assert not self.requests, "somebody starves"
        assert self.scheduler.kv.usage == 0


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
)
