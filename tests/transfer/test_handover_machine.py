"""Hand-overs under any sequence of steps: refusals, cancellations, lost workers, mail in disorder.

Two prefill and two decode workers with little room, real pools. What a decode worker has received must be
what the prompt leaves behind, then and when the request ends, and nothing may leak.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from epd.stages.connectors.mailbox import InProcessHub
from epd.transfer.connectors import TransferOutcome
from tests.stages.handover_workers import DecodeWorker, PrefillWorker, pools_shape

PREFILLS, DECODES = ("p0", "p1"), ("d0", "d1")
# Few and alike, so that prompts often share the beginning of others.
PROMPTS = st.builds(
    lambda base, length, end: [*[base, base, 5, 6, 7, 8, 9, 1][:length], end],
    st.integers(1, 2),
    st.integers(1, 8),
    st.integers(1, 3),
)
PREFILL, DECODE, PICK = st.sampled_from(PREFILLS), st.sampled_from(DECODES), st.integers(0, 100)


@dataclass
class Job:
    """A request at its prefill worker. is_aborted: its end is only waited for."""

    prefill: str
    token_ids: list[int]
    is_delivered: bool = False
    is_aborted: bool = False


class HandoverMachine(RuleBasedStateMachine):
    num_states = 0  # of each worker

    def __init__(self) -> None:
        super().__init__()
        self.hub = InProcessHub()
        self.prefills: dict[str, PrefillWorker] = {}
        self.decodes: dict[str, DecodeWorker] = {}
        self.jobs: dict[str, Job] = {}
        self.prompts: dict[str, list[int]] = {}  # of every request there ever was
        self.running: dict[str, str] = {}  # received, at which decode worker
        self.taken: set[str] = set()  # received by any decode worker, also by one that was lost after that
        self.num_started = 0
        for name in PREFILLS:
            self.start_prefill(name)
        for name in DECODES:
            self.start_decode(name)

    def start_prefill(self, name: str) -> None:
        pools = pools_shape(5, 4, self.num_states).build()
        self.prefills[name] = PrefillWorker(pools, self.hub.connect(name, pools))

    def start_decode(self, name: str) -> None:
        pools = pools_shape(9, 2, self.num_states).build()
        self.decodes[name] = DecodeWorker(pools, self.hub.connect(name, pools))

    def pick(self, number: int) -> str | None:
        """A request at a prefill worker that is not given up."""
        live = [request_id for request_id, job in self.jobs.items() if not job.is_aborted]
        return live[number % len(live)] if live else None

    @rule(prefill=PREFILL, prompt=PROMPTS, decode=DECODE)
    def start(self, prefill: str, prompt: list[int], decode: str) -> None:
        self.num_started += 1
        request_id = f"r{self.num_started}"
        if self.prefills[prefill].start(request_id, prompt):
            self.jobs[request_id] = Job(prefill, prompt)
            self.prompts[request_id] = prompt
            self.reserve(request_id, decode)

    @rule(number=PICK, decode=DECODE)
    def reserve_late(self, number: int, decode: str) -> None:
        request_id = self.pick(number)
        if request_id is not None:
            self.reserve(request_id, decode)

    def reserve(self, request_id: str, decode: str) -> None:
        job, worker = self.jobs[request_id], self.decodes[decode]
        outbox = self.prefills[job.prefill].outbox
        if job.is_delivered or outbox.is_open(request_id) or request_id in worker.cache:
            return
        ticket = worker.reserve(request_id, job.prefill, job.token_ids)
        if ticket is not None:
            outbox.open(ticket)
            self.prefills[job.prefill].send(request_id)

    @rule(number=PICK, num_tokens=st.integers(1, 9))
    def compute(self, number: int, num_tokens: int) -> None:
        request_id = self.pick(number)
        if request_id is not None:
            job = self.jobs[request_id]
            worker = self.prefills[job.prefill]
            if worker.cache.num_tokens(request_id) < len(job.token_ids):
                worker.compute(request_id, num_tokens)

    @rule(name=st.sampled_from(PREFILLS + DECODES), seed=st.integers(0, 9), is_doubled=st.booleans())
    def disorder(self, name: str, seed: int, is_doubled: bool) -> None:
        """Mail that has not been read changes places, and some of it comes twice."""
        end = self.hub.find(name)
        assert end is not None
        mail = list(end.inbox) + (list(end.inbox)[:2] if is_doubled else [])
        random.Random(seed).shuffle(mail)
        end.inbox.clear()
        end.inbox.extend(mail)

    @rule(decode=DECODE)
    def receive(self, decode: str) -> None:
        for end in self.decodes[decode].poll():
            if end.outcome is TransferOutcome.DELIVERED:
                assert self.decodes[decode].holds(end.request_id, self.prompts[end.request_id])
                assert end.state is not None
                assert end.state.prompt_token_ids.tolist() == self.prompts[end.request_id]
                self.running[end.request_id] = decode
                self.taken.add(end.request_id)
            else:
                is_lost = end.request_id not in self.jobs
                assert end.error == "aborted" or (is_lost and "is gone" in end.error)

    @rule(prefill=PREFILL)
    def take_receipts(self, prefill: str) -> None:
        worker = self.prefills[prefill]
        for end in worker.outbox.poll():
            if end.outcome is TransferOutcome.DELIVERED:
                assert end.request_id in self.taken
                self.jobs[end.request_id].is_delivered = True
        for request_id, job in list(self.jobs.items()):
            is_over = job.is_delivered or job.is_aborted
            if is_over and job.prefill == prefill and worker.free_if_settled(request_id):
                del self.jobs[request_id]

    @rule(number=PICK)
    def abort(self, number: int) -> None:
        request_id = self.pick(number)
        if request_id is not None:
            self.jobs[request_id].is_aborted = True
            self.prefills[self.jobs[request_id].prefill].outbox.abort(request_id, "aborted")

    @rule(decode=DECODE, number=PICK)
    def cancel(self, decode: str, number: int) -> None:
        """The decode worker does not want one that is on its way; the prefill worker learns from receipts."""
        if self.prompts:
            self.decodes[decode].reception.cancel(sorted(self.prompts)[number % len(self.prompts)])

    @rule(number=PICK)
    def finish(self, number: int) -> None:
        if self.running:
            self.finish_request(sorted(self.running)[number % len(self.running)])

    def finish_request(self, request_id: str) -> None:
        worker = self.decodes[self.running.pop(request_id)]
        assert worker.holds(request_id, self.prompts[request_id])
        worker.cache.free(request_id)

    @rule(name=DECODE)
    def lose_decode(self, name: str) -> None:
        self.running = {request_id: at for request_id, at in self.running.items() if at != name}
        self.start_decode(name)
        for worker in self.prefills.values():
            worker.outbox.drop_receiver(name)

    @rule(name=PREFILL, are_told=st.booleans())
    def lose_prefill(self, name: str, are_told: bool) -> None:
        """It starts again, empty; decode workers may learn of it from its old offers first."""
        self.start_prefill(name)
        self.jobs = {request_id: job for request_id, job in self.jobs.items() if job.prefill != name}
        if are_told:
            self.suspect(name)

    @rule(name=PREFILL)
    def suspect(self, name: str) -> None:
        """Decode workers are told that it is gone, late or wrongly."""
        for worker in self.decodes.values():
            worker.reception.fail_sender(name)

    @invariant()
    def nothing_is_broken(self) -> None:
        for worker in (*self.prefills.values(), *self.decodes.values()):
            worker.check()

    def work_off(self) -> None:
        """Every request that is left is handed over, in at most so many rounds as there can be work."""
        for turn in range(100):
            for request_id, job in list(self.jobs.items()):
                worker = self.prefills[job.prefill]
                if not job.is_aborted and worker.cache.num_tokens(request_id) < len(job.token_ids):
                    worker.compute(request_id)
                if not job.is_aborted and request_id not in self.running:
                    self.reserve(request_id, DECODES[turn % 2])
            for name in DECODES:
                self.receive(name)
            for name in PREFILLS:
                self.take_receipts(name)
            for request_id in list(self.running):
                if request_id not in self.jobs:
                    self.finish_request(request_id)
            if not self.jobs and not self.running:
                return
        raise AssertionError(f"requests never ended: {self.jobs}, {self.running}")

    def teardown(self) -> None:
        for name in PREFILLS:
            self.suspect(name)
        self.work_off()
        for worker in (*self.prefills.values(), *self.decodes.values()):
            worker.check()
            worker.cache.clear_idle()
            blocks = worker.pools.groups[0].num_blocks
            assert [worker.cache.num_free_blocks(group) for group in (0, 1)] == [blocks, blocks]
        assert all(len(worker.reception) == 0 for worker in self.decodes.values())


TestHandoverMachine = HandoverMachine.TestCase
TestHandoverMachine.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)


class RecurrentHandoverMachine(HandoverMachine):
    """The same with recurrent states, which come with the last of the keys and values."""

    num_states = 12


TestRecurrentHandovers = RecurrentHandoverMachine.TestCase
TestRecurrentHandovers.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
