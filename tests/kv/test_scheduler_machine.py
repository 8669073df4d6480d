"""Scheduler and KV cache policy under any arrivals, media, steps, aborts and holds. No tensors."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from epd.errors import InfeasibleError
from epd.kv.kv_cache import BlockCopy, KVCacheManager, KVCacheSpec
from epd.kv.kv_identity import token_identity
from epd.kv.scheduling import ScheduledRequest, Scheduler, SchedulerConfig, SchedulerOutput

VOCABULARY = 3  # few tokens, so that prompts often begin alike


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(4, 24),
        block_size=st.sampled_from([1, 3, 4]),
        groups=st.integers(1, 2),
        budget=st.integers(1, 24),
        max_seqs=st.integers(1, 6),
        chunk=st.integers(1, 24),
        mode=st.sampled_from(["recompute", "offload"]),
        caching=st.booleans(),
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
    ) -> None:
        config = SchedulerConfig(budget, max_seqs, chunk, mode)  # type: ignore[arg-type]
        spec = KVCacheSpec((num_blocks,) * groups, block_size)
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
        """Requests of which something is in the cache."""
        return [each for each in self.scheduler.running if self.scheduler.kv.num_tokens(each.request_id)]

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

    @rule(wrong=st.integers(0, 4))
    def step(self, wrong: int) -> None:
        """Schedules, checks what was decided, and does what the engine would."""
        decoding = [request for request in self.scheduler.running if request.is_decoding]
        output = self.scheduler.schedule()
        self.check(output, decoding)
        self.follow_moves(output)
        for chunk in output.chunks:
            request = chunk.request
            if not chunk.is_sampled:
                self.scheduler.advance(request, chunk.stop)
                continue
            is_first = request.num_tokens == request.num_prompt_tokens
            num_new = 1 + max(chunk.num_drafts - wrong, 0)
            for token in range(num_new):
                request.identity.append(token % VOCABULARY)
            request.num_tokens += num_new
            self.scheduler.advance(request, chunk.stop - chunk.num_drafts + num_new - 1)
            request.num_drafts = 0
            if is_first:
                self.fork(request)
            if request.num_tokens >= request.max_total_tokens:
                self.scheduler.remove(request)
                del self.requests[request.request_id]

    def fork(self, request: ScheduledRequest) -> None:
        for index in range(1, request.num_copies):
            copy = ScheduledRequest(
                request_id=f"{request.request_id}#{index}",
                identity=request.identity.copy(),
                num_prompt_tokens=request.num_prompt_tokens,
                max_total_tokens=request.max_total_tokens,
                num_ready=request.num_ready,
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
        if self.scheduler.waiting and self.scheduler._has_seat(self.scheduler.waiting[0]):
            assert self.scheduler._open(self.scheduler.waiting[0]) is None, "it would have fitted"
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
        back = [each for each in output.admitted if each in decoding]  # gave way and came back at once
        stalled = [
            each
            for each in decoding
            if each.is_decoding and each.request_id not in names and each not in back
        ]
        if stalled:
            assert output.num_tokens == config.max_num_batched_tokens, "a decode was stalled for no reason"
            assert all(chunk.request in decoding for chunk in output.chunks)

    def follow_moves(self, output: SchedulerOutput) -> None:
        """What was offloaded comes back whole, and only that."""
        self.scheduler.kv.copied(output.copies)
        for preemption in output.preemptions:
            self.offloaded[preemption.request.request_id] = preemption.num_tokens
            assert len(preemption.block_tables[0]) * self.scheduler.kv.block_size >= preemption.num_tokens
        for restore in output.restores:
            assert 0 <= restore.start < restore.stop == self.offloaded.pop(restore.request.request_id)
            self.scheduler.advance(restore.request, restore.stop)
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
            self.step(0)
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


def scheduler(**limits: int) -> Scheduler:
    return Scheduler(SchedulerConfig(**limits), KVCacheManager(KVCacheSpec((64,), 4)))


def request(
    name: str, num_prompt: int, *, num_ready: int | None = None, max_new: int = 4, priority: int = 0
) -> ScheduledRequest:
    tokens = np.arange(num_prompt) + 100 * ord(name[0])
    return ScheduledRequest(
        name, token_identity(tokens.tolist()), num_prompt, num_prompt + max_new,
        num_prompt if num_ready is None else num_ready, priority=priority,
    )  # fmt: skip


def spans(output: SchedulerOutput) -> list[tuple[str, int, int]]:
    return [(chunk.request.request_id, chunk.start, chunk.stop) for chunk in output.chunks]


def test_chunks_of_several_requests_share_one_pass() -> None:
    queue = scheduler(max_num_batched_tokens=20, max_chunk_tokens=16)
    queue.add(request("a", 10))
    queue.add(request("b", 6))
    queue.add(request("c", 9))
    assert spans(queue.schedule()) == [("a", 0, 10), ("b", 0, 6), ("c", 0, 4)]


def test_a_request_that_waits_for_its_media_leaves_the_pass_to_others() -> None:
    queue = scheduler(max_num_batched_tokens=20, max_chunk_tokens=16)
    first, second = request("a", 30, num_ready=3), request("b", 8)
    queue.add(first)
    queue.add(second)
    assert spans(queue.schedule()) == [("a", 0, 3), ("b", 0, 8)]
    queue.advance(first, 3)
    queue.advance(second, 8)
    second.identity.append(1)
    second.num_tokens += 1
    assert spans(queue.schedule()) == [("b", 8, 9)]
    queue.advance(second, 9)
    first.num_ready = 30
    assert spans(queue.schedule()) == [("a", 3, 19)]


def test_room_is_given_first_come_first_served() -> None:
    queue = scheduler()
    for name, length in (("a", 200), ("b", 100), ("c", 8)):
        queue.add(request(name, length))
    queue.schedule()
    assert [each.request_id for each in queue.running] == ["a"]
    assert [each.request_id for each in queue.waiting] == ["b", "c"], "the small one does not overtake"


def computed(queue: Scheduler, output: SchedulerOutput) -> None:
    """What the engine would do after a step: every chunk is computed, every answer grows."""
    queue.kv.copied(output.copies)
    for chunk in output.chunks:
        queue.advance(chunk.request, chunk.stop)
        if chunk.request.num_computed == chunk.request.num_tokens:
            chunk.request.identity.append(1)
            chunk.request.num_tokens += 1


def test_important_requests_are_prefilled_first_whenever_they_came() -> None:
    queue = scheduler(max_num_batched_tokens=10, max_chunk_tokens=16)
    queue.add(request("b", 8, priority=10))
    queue.add(request("c", 8, priority=10))
    queue.add(request("i", 6))
    assert spans(queue.schedule()) == [("i", 0, 6), ("b", 0, 4)]


def test_the_least_important_gives_way_first_though_it_is_the_oldest() -> None:
    queue = Scheduler(SchedulerConfig(), KVCacheManager(KVCacheSpec((6,), 4)))
    queue.add(request("b", 8, max_new=12, priority=10))
    queue.add(request("i", 10, max_new=12))
    gave_way = []
    for _ in range(8):
        output = queue.schedule()
        gave_way += [each.request.request_id for each in output.preemptions]
        computed(queue, output)
        queue.check_integrity()
    assert gave_way == ["b"]
    assert [each.request_id for each in queue.running] == ["i"]


def test_batch_requests_make_room_at_once_for_an_interactive_one() -> None:
    """All seats are taken by long answers that nobody waits for; the youngest of them gives its seat up."""
    queue = scheduler(max_num_seqs=2)
    for name in ("b", "c"):
        queue.add(request(name, 8, max_new=100, priority=10))
    computed(queue, queue.schedule())
    queue.add(request("i", 8))
    output = queue.schedule()
    assert [each.request.request_id for each in output.preemptions] == ["c"]
    assert spans(output) == [("b", 8, 9), ("i", 0, 8)]
    assert [each.request_id for each in queue.waiting] == ["c"]
    computed(queue, output)
    queue.remove(queue.running[0])
    assert [each.request_id for each in queue.schedule().admitted] == ["c"]


def test_nobody_gives_way_where_that_makes_no_room() -> None:
    """Neither to one of the same priority, nor to one for which all less important ones are not enough."""
    queue = Scheduler(SchedulerConfig(), KVCacheManager(KVCacheSpec((8,), 4)))
    queue.add(request("b", 4, max_new=8, priority=10))
    queue.add(request("k", 18, max_new=8))
    computed(queue, queue.schedule())
    queue.add(request("i", 12))
    queue.add(request("c", 4, priority=10))
    assert not queue.schedule().preemptions
    assert [each.request_id for each in queue.waiting] == ["i", "c"]
    assert not queue.can_admit(request("d", 1, priority=10))


def test_a_child_that_finds_no_room_files_no_block_that_was_never_written() -> None:
    """Its part of a block would have been a copy; the copy is not carried out where the child must wait."""
    queue = Scheduler(SchedulerConfig(), KVCacheManager(KVCacheSpec((8,), 4)))
    held = request("h", 6, max_new=1)
    queue.add(held)
    computed(queue, queue.schedule())
    queue.remove(held, hold=True)
    question = [*(np.arange(6) + 100 * ord("h")).tolist(), *range(25)]
    child = ScheduledRequest("child", token_identity(question), 31, 32, num_ready=31, parent="h")
    queue.add(child)
    assert queue.kv.num_cached(child.identity) == 4
    for _ in range(2):
        output = queue.schedule()
        assert not output.admitted
        assert not output.copies
        assert queue.kv.num_cached(child.identity) == 4, "the last 2 tokens of the held one are not filed"
        queue.check_integrity()
    queue.release("h")
    assert queue.kv.num_cached(child.identity) == 6


def test_the_check_knows_what_has_been_written() -> None:
    """A copy that was decided and not carried out leaves its block unwritten, whoever files it."""
    kv = KVCacheManager(KVCacheSpec((8,), 4))
    kv.open("a", token_identity([1] * 6), max_cached=0)
    kv.allocate("a", 6)
    kv.commit("a", token_identity([1] * 6), 6)
    copies = kv.fork("a", "child")
    assert not kv.is_written("child")
    kv.allocate("child", 8)
    kv.commit("child", token_identity([1] * 8), 8)
    with pytest.raises(AssertionError, match="never written"):
        kv.check_integrity()
    kv.free("child")
    kv.clear_idle()
    kv.fork("a", "other")
    kv.copied(copies)
    kv.check_integrity()


def test_a_prompt_that_waits_for_room_is_not_looked_up_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first 40 tokens are cached and idle: whether it fits does not follow from free blocks alone."""
    queue = Scheduler(SchedulerConfig(), KVCacheManager(KVCacheSpec((40,), 4)))
    cached = request("w", 40, max_new=1)
    queue.add(cached)
    computed(queue, queue.schedule())
    queue.remove(cached)
    running = request("r", 90, max_new=40)
    queue.add(running)
    computed(queue, queue.schedule())
    queue.add(request("w", 60))
    opened: list[str] = []
    opening = KVCacheManager.open

    def count(kv: KVCacheManager, name: str, *args: Any, **options: Any) -> list[BlockCopy]:
        opened.append(name)
        return opening(kv, name, *args, **options)

    monkeypatch.setattr(KVCacheManager, "open", count)
    for _ in range(32):
        computed(queue, queue.schedule())
        queue.check_integrity()
    assert [each.request_id for each in queue.waiting] == ["w"]
    assert len(opened) <= 2
    queue.remove(running)
    assert [each.request_id for each in queue.schedule().admitted] == ["w"]
