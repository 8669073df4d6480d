"""Simulates a worker's language model: the live scheduler and KV cache, driven by costs.

Between two events a worker that only decodes repeats one step, so these steps are combined:

    step cost     A + c * context, all whole ticks; the context grows by one token per sequence
    k steps       k * A + c * (k * context + sequences * k * (k - 1) / 2)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from epd.control.elasticity.cluster import StageSample
from epd.errors import InfeasibleError
from epd.kv.block_pool import BlockPool
from epd.kv.kv_cache import KVCacheManager
from epd.kv.kv_room import KVCacheSpec
from epd.kv.pass_limits import SchedulerConfig
from epd.kv.scheduled_request import Chunk, ScheduledRequest, SchedulerOutput
from epd.kv.scheduling import Scheduler
from epd.profiles.profile import Profile
from epd.simulate.clock import WorkDone, seconds_of, ticks_of
from epd.simulate.drafting import DraftPlan, SimulatedDrafts
from epd.simulate.requests import Job, RequestState
from epd.simulate.stacked_blocks import StackedBlocks, StepRun
from epd.topology import Stage
from epd.types import ceil_div


class PassTicks:
    """Computes the ticks of a forward pass."""

    def __init__(self, profile: Profile, factor: float = 1.0, drafts: DraftPlan | None = None) -> None:
        """Multiplies the costs of passes, and not of what moves, by the factor."""
        self._draft_units = 1.0 if drafts is None else drafts.units
        self._prefill = profile.prefill.cost.times(factor)
        self._decode = profile.decode.cost.times(factor)
        self._restore = profile.transfer.cost
        self._memory = profile.memory
        self.per_context = ticks_of(self._decode.per_item_s)

    def decode_base(self, num_sequences: float) -> int:
        return ticks_of(self._decode.seconds(num_sequences))

    def mixed(self, output: SchedulerOutput) -> int:
        """Returns the cost of a pass with prefill chunks; decodes in it add their own tokens and context.

        A drafted token costs the model what another sequence does, without context of its own.
        """
        num_tokens = num_pairs = num_context = 0
        num_decodes = 0.0
        for chunk in output.chunks:
            length = chunk.stop - chunk.start
            if chunk.request.is_decoding:
                num_decodes += 1 + self._draft_units * chunk.num_drafts
                num_context += chunk.stop
            else:
                num_tokens += length
                num_pairs += length * chunk.start + length * (length + 1) // 2
        moved = [restore.stop - restore.start for restore in output.restores]
        moved += [preemption.num_tokens for preemption in output.preemptions]
        moved_bytes = sum(self._memory.sequence_bytes(each) for each in moved if each)
        extra = ticks_of(self._restore.seconds(moved_bytes)) if moved_bytes else 0
        if not num_tokens:
            return extra + self.decode_base(num_decodes) + self.per_context * num_context
        return extra + ticks_of(self._prefill.seconds(num_tokens, num_pairs)) + self.riding(output)

    def riding(self, output: SchedulerOutput) -> int:
        """Returns the cost that decodes add to a pass with prefill chunks."""
        decodes = [chunk for chunk in output.chunks if chunk.request.is_decoding]
        num_tokens = sum(1 + self._draft_units * chunk.num_drafts for chunk in decodes)
        context = sum(chunk.stop for chunk in decodes)
        return ticks_of(self._decode.added_s * num_tokens) + self.per_context * context


@dataclass(slots=True)
class PassResult:
    """Lists the results of a pass.

    first_tokens: requests whose prompt is computed
    finished: requests whose answer is complete
    prefilled: requests with computed prompt tokens
    sampled: requests that got a token, once for each, where steps are single
    """

    first_tokens: list[RequestState] = field(default_factory=list)
    finished: list[RequestState] = field(default_factory=list)
    prefilled: list[RequestState] = field(default_factory=list)
    sampled: list[RequestState] = field(default_factory=list)


class LanguageSide:
    """Simulates one worker's engine. Blocks of what is handed over stay held until `release`."""

    def __init__(
        self,
        profile: Profile,
        config: SchedulerConfig,
        spec: KVCacheSpec,
        *,
        enable_prefix_caching: bool,
        is_stepwise: bool,
        drafts: DraftPlan | None = None,
    ) -> None:
        make_pool = BlockPool if enable_prefix_caching else StackedBlocks
        self.kv = KVCacheManager(spec, enable_prefix_caching=enable_prefix_caching, make_pool=make_pool)
        self.scheduler = Scheduler(config, self.kv)
        self.num_arriving = 0
        self.num_held = 0
        self._alone, self._beside = (PassTicks(profile, factor, drafts) for factor in (1.0, profile.beside))
        self._cost = self._alone
        self._is_stepwise = is_stepwise or drafts is not None  # steps differ in what they draft
        self._drafts = None if drafts is None else SimulatedDrafts(drafts)
        self.num_drafts_held = 0  # tokens, so far
        self._states: dict[str, RequestState] = {}
        self._requests: dict[str, ScheduledRequest] = {}
        self._output: SchedulerOutput | None = None
        self._prefilled, self._decoded = WorkDone(), WorkDone()
        self._run: StepRun | None = None
        self._is_admission_stuck = False

    # Requests

    @property
    def num_requests(self) -> int:
        """Counts requests that run, wait or arrive."""
        return len(self._states) + self.num_arriving

    def has_work(self) -> bool:
        return bool(self._states or self.num_arriving or self.num_held)

    def check_fits(self, job: Job, num_output_tokens: int) -> None:
        """Raises InfeasibleError for a request with so much of its answer that could never run here."""
        needed = job.num_prompt_tokens + num_output_tokens
        capacity = min(self.kv.spec.num_blocks) * self.kv.block_size
        if needed > capacity:
            raise InfeasibleError(
                f"{needed} tokens of prompt and output do not fit into a KV cache of {capacity}; "
                "shorten them or give the worker more memory"
            )

    def add(self, state: RequestState) -> None:
        """Queues a request for prefill. Raises InfeasibleError if it can never fit."""
        job = state.job
        request = ScheduledRequest(
            state.request_id,
            state.identity,
            job.num_prompt_tokens,
            job.num_prompt_tokens + (job.output_tokens if state.placement.is_merged else 1),
            state.num_ready,
        )
        self.scheduler.add(request)
        self._states[state.request_id], self._requests[state.request_id] = state, request
        self._is_admission_stuck = False

    def set_ready(self, state: RequestState) -> None:
        """Records that more of the request's embeddings have come."""
        request = self._requests.get(state.request_id)
        if request is not None:
            request.num_ready = max(request.num_ready, state.num_ready)

    def reserve(self, state: RequestState) -> bool:
        """Reserves room for prefilled tokens from another worker, as `epd.transfer.handover` does."""
        if self.num_requests >= self.scheduler.config.max_num_seqs:
            return False
        num_tokens, size = state.num_sent, self.kv.block_size
        identity = state.identity
        whole = self.kv.num_cached(identity, num_tokens) // size * size
        self.kv.open(state.request_id, identity, max_cached=whole)
        if not self.kv.can_allocate(state.request_id, num_tokens + 1):
            self.kv.free(state.request_id)
            return False
        self.kv.allocate(state.request_id, num_tokens + 1)
        self.num_arriving += 1
        return True

    def cancel(self, state: RequestState) -> None:
        """Gives reserved room back."""
        self.num_arriving -= 1
        self.kv.free(state.request_id)

    def adopt(self, state: RequestState) -> None:
        """Continues a request whose keys and values have arrived; its first token is known."""
        job = state.job
        self.num_arriving -= 1
        self.kv.commit(state.request_id, state.identity, state.num_sent)
        request = ScheduledRequest(
            state.request_id,
            state.identity,
            job.num_prompt_tokens,
            job.num_prompt_tokens + job.output_tokens,
            job.num_prompt_tokens,
            num_tokens=state.num_sent + 1,
            num_computed=state.num_sent,
        )
        self.scheduler.adopt(request)
        self._states[state.request_id], self._requests[state.request_id] = state, request

    def tokens_of(self, request_id: str) -> int | None:
        """Returns the computed tokens of a decoding request; None if it is absent or not decoding."""
        request = self._requests.get(request_id)
        return request.num_computed if request is not None and request.is_decoding else None

    def withdraw(self, request_id: str) -> None:
        """Forgets a request that continues elsewhere. Only between two passes."""
        self.scheduler.remove(self._requests.pop(request_id))
        del self._states[request_id]
        self._is_admission_stuck = False

    def release(self, request_id: str) -> None:
        self.scheduler.release(request_id)
        self.num_held -= 1
        self._is_admission_stuck = False

    # One pass, or many

    def start(self, *, is_single: bool = False, is_beside: bool = False) -> int | None:
        """Reserves the next pass, or a run of decode steps; returns its ticks, None without work.

        is_single: others wait for their turn after one pass.
        is_beside: a batch of the tower runs meanwhile.
        """
        self._cost = self._beside if is_beside else self._alone
        run = None if is_single or self._is_stepwise else self._plan_run()
        if run is not None:
            self._run = run
            return run.ticks(run.num_steps)
        num_running = len(self.scheduler.running)
        if self._drafts is not None:
            self._drafts.propose([each for each in self.scheduler.running if each.is_decoding])
        output = self.scheduler.schedule()
        self.kv.copied(output.copies)
        left = num_running + len(output.admitted) - len(self.scheduler.running)
        self._is_admission_stuck = not output.admitted and not left
        if not output.chunks:
            return self.start(is_single=is_single, is_beside=is_beside) if output.admitted else None
        self._output = output
        ticks = self._cost.mixed(output)
        self._count(output, ticks)
        for restore in output.restores:
            self.scheduler.advance(restore.request, restore.stop)
        return ticks

    def _count(self, output: SchedulerOutput, ticks: int) -> None:
        """Counts a pass for both stages, each by its own share."""
        decodes = [chunk for chunk in output.chunks if chunk.request.is_decoding]
        num_decodes, num_drafted = len(decodes), sum(chunk.num_drafts for chunk in decodes)
        num_prompt = output.num_tokens - num_decodes - num_drafted
        if self._drafts is not None and num_decodes and not num_prompt:
            self._drafts.record_pass(num_decodes, num_drafted, seconds_of(ticks))
        riding = self._cost.riding(output) if num_prompt else ticks
        self._decoded.add(num_decodes, riding)
        self._prefilled.add(num_prompt, ticks - riding)

    def samples(self) -> Mapping[Stage, StageSample]:
        """Samples finished work, a pass from its beginning and a run at its end, and waiting work."""
        prompts = decodes = tokens = 0
        for request in self._requests.values():
            left = request.num_prompt_tokens - request.num_computed
            if request.num_tokens > request.num_prompt_tokens:
                decodes += 1
            elif left > 0 and request.num_computable > 0:
                prompts += 1
                tokens += min(left, request.num_computable)
        return {"prefill": self._prefilled.sample(prompts, tokens), "decode": self._decoded.sample(decodes)}

    def _plan_run(self) -> StepRun | None:
        """Returns the steps until the first answer ends, if only decoding can happen and there is room."""
        running = self.scheduler.running
        if not running or len(running) > self.scheduler.config.max_num_batched_tokens:
            return None
        if self.scheduler.waiting and (self.kv.enable_prefix_caching or not self._is_admission_stuck):
            return None
        decoding: list[ScheduledRequest] = []
        for request in running:
            if request.is_decoding:
                decoding.append(request)
            elif request.num_computable > 0:
                return None
        if not decoding:
            return None
        steps = self._fitting_steps(decoding, min(map(self._remaining, decoding)))
        if steps < 1:
            return None
        context = sum(request.num_computed for request in decoding) + len(decoding)
        base = self._cost.decode_base(len(decoding))
        return StepRun(decoding, steps, base, context, self._cost.per_context)

    @staticmethod
    def _remaining(request: ScheduledRequest) -> int:
        return request.max_total_tokens - request.num_tokens

    def _fitting_steps(self, running: Sequence[ScheduledRequest], steps: int) -> int:
        """Returns the most steps, up to `steps`, for which no request is preempted."""
        free = self.kv.num_free_blocks()
        if len(running) * (steps // self.kv.block_size + 1) <= free:
            return steps
        low, high = 0, steps
        while low < high:
            middle = (low + high + 1) // 2
            if self._blocks_for(running, middle) <= free:
                low = middle
            else:
                high = middle - 1
        return low

    def _blocks_for(self, running: Sequence[ScheduledRequest], steps: int) -> int:
        size = self.kv.block_size
        return sum(
            max(0, ceil_div(each.num_computed + steps, size) - len(self.kv.block_table(each.request_id)))
            for each in running
        )

    def cut(self, elapsed: int) -> int | None:
        """Ends a run with the step under way after `elapsed` ticks; returns its ticks or, at the last, None.

        The blocks of its steps are taken at once, as single steps would have taken them by now.
        """
        run = self._run
        if run is None:
            return None
        steps = run.steps_until(elapsed)
        self._allocate(run, steps)
        if steps == run.num_steps:
            return None
        run.num_steps = steps
        return run.ticks(steps)

    def _allocate(self, run: StepRun, num_steps: int) -> None:
        if num_steps <= run.num_allocated:
            return
        run.num_allocated, size = num_steps, self.kv.block_size
        for request in run.requests:
            if -request.num_computed % size < num_steps:  # beyond the block of the last token
                self.kv.allocate(request.request_id, request.num_computed + num_steps)

    def end(self) -> PassResult:
        """Records the results of `start`."""
        if self._run is not None:
            run, self._run = self._run, None
            return self._end_run(run)
        assert self._output is not None
        output, self._output = self._output, None
        result = PassResult()
        for chunk in output.chunks:
            self._end_chunk(chunk, result)
        return result

    def _end_run(self, run: StepRun) -> PassResult:
        result, steps = PassResult(), run.num_steps
        self._decoded.add(steps * len(run.requests), run.ticks(steps), steps)
        self._allocate(run, steps)
        for request in run.requests:
            request.num_tokens += steps
            if self.kv.enable_prefix_caching:
                self.scheduler.advance(request, request.num_computed + steps)
            else:  # nobody asks which slots of a block are written
                request.num_ready = request.num_computed = request.num_computed + steps
            if request.num_tokens == request.max_total_tokens:
                self._finish(request, result)
        return result

    def _end_chunk(self, chunk: Chunk, result: PassResult) -> None:
        request = chunk.request
        is_sampled, is_first = chunk.is_sampled, request.num_tokens == request.num_prompt_tokens
        if not request.is_decoding:
            prefilled = self._states[request.request_id]
            prefilled.num_prefilled = chunk.stop
            if prefilled.num_cached < 0:
                prefilled.num_cached = chunk.start
            result.prefilled.append(prefilled)
        num_held = 0
        if self._drafts is not None and chunk.num_drafts:
            num_held = self._drafts.num_held(request, chunk.num_drafts)
            self.num_drafts_held += num_held
        self.scheduler.advance(request, chunk.stop - chunk.num_drafts + num_held)
        if not is_sampled:
            return
        request.num_tokens += 1 + num_held
        state = self._states[request.request_id]
        result.sampled += [state] * (1 + num_held)
        if is_first:
            result.first_tokens.append(state)
        if is_first and not state.placement.is_merged:
            del self._states[request.request_id], self._requests[request.request_id]
            self.scheduler.remove(request, hold=True)
            self.num_held += 1
        elif not self._remaining(request):
            self._finish(request, result)

    def _finish(self, request: ScheduledRequest, result: PassResult) -> None:
        self.scheduler.remove(request)
        del self._requests[request.request_id]
        self._is_admission_stuck = False
        result.finished.append(self._states.pop(request.request_id))
