"""Runs prefill in a worker: takes requests and embeddings, hands over keys and values, returns tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from epd.control.elasticity.cluster import StageSample
from epd.control.routing import InFlight
from epd.encoders.groups import MediaGroup
from epd.errors import InfeasibleError, UnavailableError
from epd.reduction import KeptCells
from epd.serve_app.messages import Admitted, Prefill, RequestFailed, SpanDone, WorkerLoad, endpoint, owner_of
from epd.serve_app.role_messages import RemainingWork
from epd.serve_app.service import StageSpan
from epd.serve_app.worker.media_feed import MediaFeeds, group_end
from epd.serve_app.worker.worker_roles import Clock, ReportBuffer, Role, Rounds, store_counters
from epd.serve_app.worker.worker_stages import drafting_counters
from epd.stages.engine.generation import GenerateRequest, RequestFault, StepResult
from epd.stages.prefill import PrefillStage
from epd.topology import Stage
from epd.transfer.connectors import KVTicket, TransferOutcome
from epd.types import ceil_div


@dataclass(slots=True)
class _Progress:
    """A prompt in the engine.

    ends: of each group, the index after its last token
    submitted_s: Unix time
    cells: (item, kept tokens of a video), not reported yet
    num_spanned: leading groups that were cached, or whose span has been reported
    queued_s: until it was admitted
    service_s: of the steps since the last span
    """

    message: Prefill
    ends: tuple[int, ...]
    submitted_s: float
    cells: list[tuple[int, KeptCells]] = field(default_factory=list)
    is_admitted: bool = False
    num_spanned: int = 0
    queued_s: float = 0.0
    service_s: float = 0.0


class PrefillRole(Role):
    """Runs one prefill worker, or one with merged roles."""

    def __init__(
        self,
        worker: str,
        stage: PrefillStage,
        feeds: MediaFeeds,
        clock: Clock,
        tell: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts without requests. tell: sends what is to be reported by now, before the step is over."""
        self.stage: PrefillStage = stage
        self._tell = tell
        self.feeds = feeds
        self._worker = worker
        self._clock = clock
        self._prompts: dict[str, _Progress] = {}
        self._prefills, self._decodes = Rounds(), Rounds()

    def submit(self, message: Prefill) -> bool:
        """Submits a request, see `Prefill`. Raises InfeasibleError, RequestError."""
        is_split = message.ticket is not None or message.awaits_ticket
        if not self._has_room(message.request, 1 if is_split else message.request.sampling.n):
            return False
        self.stage.submit(message.request, message.ticket, awaits_ticket=message.awaits_ticket)
        ends = tuple(group_end(message.request, group) for group in message.groups)
        self._prompts[message.request.request_id] = _Progress(message, ends, self._clock())
        return True

    def _has_room(self, request: GenerateRequest, num_seqs: int) -> bool:
        """Returns whether blocks for the prompt are free, beside those that wait; True if it can never fit.

        num_seqs: answers to it that will grow here
        """
        engine = self.stage.engine
        scheduler, size = engine.scheduler, engine.kv.block_size
        if request.num_prompt_tokens >= min(engine.kv.spec.num_blocks[: engine.kv.spec.num_full]) * size:
            return True
        taken = sum(each.num_seqs for each in (*scheduler.waiting, *scheduler.running))
        if taken and taken + num_seqs > scheduler.config.max_num_seqs:
            return False
        if not engine.has_work():
            return True
        waiting = sum(ceil_div(each.num_tokens, size) + 1 for each in scheduler.waiting)
        new_tokens = request.num_prompt_tokens - engine.kv.num_cached(request.identity)
        num_dropped = request.prompt.num_dropped  # what is kept gets blocks of its own
        kept = ceil_div(request.num_prompt_tokens - num_dropped, size) if num_dropped else 0
        return waiting + ceil_div(new_tokens, size) + kept + 1 <= engine.kv.num_free_blocks()

    def redirect(self, request_id: str, ticket: KVTicket) -> bool:
        """Redirects a request, see `Redirect`."""
        try:
            self.stage.redirect(request_id, ticket)
        except KeyError:
            return False
        return True

    def step(self, reports: ReportBuffer) -> bool:
        has_fed = self.feeds.step(reports, lambda fault: self._take_faults([fault], reports))
        has_fed |= self._admit(reports)
        self._tell()
        start_s = self._clock()
        result = self.stage.step()
        self._count(result, self._clock() - start_s)
        self._take_faults(result.faults, reports)
        reports.outputs += result.outputs
        self._take_admitted(result, reports)
        self._take_progress(result, start_s, reports)
        self._take_handovers(result, reports)
        return has_fed or bool(result.num_tokens or result.admissions or result.handovers)

    def _admit(self, reports: ReportBuffer) -> bool:
        """Admits what there is plenty of room for, and grants its groups. Returns whether there was any."""
        result = self.stage.engine.admit_early()
        self._take_faults(result.faults, reports)
        self._take_admitted(result, reports)
        return bool(result.admissions or result.faults)

    def _take_admitted(self, result: StepResult, reports: ReportBuffer) -> None:
        """Reports admissions, and grants the groups of what was admitted."""
        self._take_admissions(result, reports)
        if result.admissions:
            self.feeds.grant(reports)

    def _count(self, result: StepResult, seconds: float) -> None:
        """Counts a pass; one with any prompt counts for prefill."""
        num_decoded = sum(request_id not in self._prompts for request_id in result.computed)
        if num_decoded < len(result.computed):
            self._prefills.add(result.num_tokens - num_decoded, seconds)
        else:
            self._decodes.add(result.num_tokens, seconds)

    def _take_faults(self, faults: Sequence[RequestFault], reports: ReportBuffer) -> None:
        """Handles requests that raised errors while others did not."""
        for fault in faults:
            self.abort([fault.request_id], reports)
            reports.events.append(RequestFailed(fault.request_id, fault.error, is_final=True))

    def _take_admissions(self, result: StepResult, reports: ReportBuffer) -> None:
        for admission in result.admissions:
            prompt = self._prompts.get(admission.request_id)
            if prompt is None or prompt.is_admitted:  # one that decodes, or returns from host memory
                continue
            prompt.is_admitted = True
            prompt.queued_s = self._clock() - prompt.submitted_s
            prompt.num_spanned = sum(end <= admission.num_cached for end in prompt.ends)
            reports.events.append(Admitted(admission.request_id, admission.num_cached, admission.reused))
            try:
                message = prompt.message
                self.feeds.open(
                    message.request, message.groups, admission.num_cached, wants_kept=message.wants_kept
                )
            except InfeasibleError as error:
                self.abort([admission.request_id], reports)
                reports.events.append(RequestFailed(admission.request_id, error, is_final=True))

    def _take_progress(self, result: StepResult, start_s: float, reports: ReportBuffer) -> None:
        begun = {output.request_id for output in result.outputs}
        for request_id in dict.fromkeys(result.computed):
            prompt = self._prompts.get(request_id)
            if prompt is None:
                continue
            num_tokens = prompt.message.request.num_prompt_tokens
            num_computed = num_tokens if request_id in begun else self.stage.engine.kv.num_tokens(request_id)
            prompt.cells += self.feeds.take_cells(request_id)
            self.feeds.advance(request_id, num_computed)
            self._report_spans(prompt, start_s, num_computed, reports)
            if num_computed >= num_tokens:
                del self._prompts[request_id]

    def _report_spans(
        self, prompt: _Progress, start_s: float, num_computed: int, reports: ReportBuffer
    ) -> None:
        """Reports a span for each group that the step ended, and one for a question that ends after them."""
        request = prompt.message.request
        done = [n for n in range(prompt.num_spanned, len(prompt.ends)) if prompt.ends[n] <= num_computed]
        prompt.num_spanned += len(done)
        now_s = self._clock()
        prompt.service_s += now_s - start_s
        is_over = num_computed >= request.num_prompt_tokens
        places: list[tuple[int | None, int | None]] = [_place(prompt.message.groups, each) for each in done]
        for item, group in places or ([(None, None)] if is_over else []):
            cells = tuple(kept for of, kept in prompt.cells if of == item)
            prompt.cells = [each for each in prompt.cells if each[0] != item]
            span = StageSpan("prefill", self._worker, start_s, now_s, item=item, group=group, kept=cells)
            reports.events.append(SpanDone(request.request_id, span, prompt.service_s, prompt.queued_s))
            prompt.service_s = prompt.queued_s = 0.0

    def _take_handovers(self, result: StepResult, reports: ReportBuffer) -> None:
        """Reports hand-overs; a request is retried if its decode worker did not take it despite room."""
        for end in result.handovers:
            if end.outcome is not TransferOutcome.DELIVERED:
                self._lose(end.request_id, f"the hand-over ended as {end.outcome}: {end.error}", reports)

    def _lose(self, request_id: str, reason: str, reports: ReportBuffer) -> None:
        self.abort([request_id], reports)
        error = UnavailableError(f"{reason}; retry")
        reports.events.append(RequestFailed(request_id, error, is_final=False))

    def abort(self, request_ids: Sequence[str], reports: ReportBuffer) -> None:
        for request_id in request_ids:
            self._prompts.pop(request_id, None)
            self.feeds.close(request_id, reports)
            self.stage.abort(request_id)

    def drop_owner(self, owner: str, reports: ReportBuffer) -> None:
        ids = self.stage.request_ids | self._prompts.keys()
        self.abort(sorted(each for each in ids if owner_of(each) == owner), reports)

    def drop_peer(self, worker: str) -> tuple[str, ...]:
        """Returns the requests in transit to a lost decode worker: redirect or abort them."""
        return tuple(self.stage.drop_receiver(endpoint(worker, "decode")))

    def drop_stages(self, worker: str, stages: frozenset[Stage], reports: ReportBuffer) -> None:
        """Fails requests whose hand-over had failed at a closed stage: no step learns of that any more."""
        for request_id in self.drop_peer(worker) if "decode" in stages else ():
            self._lose(request_id, f"worker '{worker}' has closed its stage", reports)

    def remaining(self) -> RemainingWork:
        waiting = {each.request_id for each in self.stage.engine.scheduler.waiting if not each.num_offloaded}
        unbegun = waiting & self._prompts.keys()
        running = self.stage.request_ids - unbegun
        return RemainingWork(not self.has_work(), tuple(sorted(unbegun)), running=tuple(sorted(running)))

    def _waiting_sample(self) -> StageSample:
        """Samples prompts with tokens computable now: those with missing media wait for other workers."""
        scheduler = self.stage.engine.scheduler
        left = [
            min(each.num_computable, each.num_prompt_tokens - each.num_computed)
            for each in (*scheduler.running, *scheduler.waiting)
            if each.request_id in self._prompts
        ]
        num_tokens = [num for num in left if num > 0]
        return self._prefills.sample(len(num_tokens), sum(num_tokens))

    def load(self) -> WorkerLoad:
        engine = self.stage.engine
        cache = self.feeds.receiver.reception.cache
        return WorkerLoad(
            num_waiting=len(engine.scheduler.waiting),
            num_running=len(engine.scheduler.running),
            kv_usage=engine.kv.usage,
            encoder_cache_usage=1 - cache.num_free_blocks / cache.num_blocks,
            work=self._work(),
            counters={
                "computed_tokens": engine.counts.num_computed_tokens,
                "prefix_cached_tokens": engine.counts.num_cached_tokens,
                "generated_tokens": engine.counts.num_generated_tokens,
                "preemptions": engine.scheduler.num_preempted,
                **drafting_counters(engine.counts),
                **({} if engine.store is None else store_counters(engine.store.counts, "store_read_tokens")),
                "encoder_cache_hits": cache.counts.hits,
                "encoder_cache_misses": cache.counts.misses,
            },
        )

    def _work(self) -> InFlight:
        """Counts prompts that are not computed, whole, and the answers that are completed here."""
        tokens = [each.message.request.num_prompt_tokens for each in self._prompts.values()]
        return InFlight(sum(tokens), len(tokens), num_decodes=self.stage.num_merged)

    def samples(self) -> dict[Stage, StageSample]:
        """Returns load samples, also of decode if this worker completes answers."""
        num_decodes = sum(each.is_decoding for each in self.stage.engine.scheduler.running)
        samples: dict[Stage, StageSample] = {"prefill": self._waiting_sample()}
        if num_decodes or self._decodes.num_rounds:
            samples["decode"] = self._decodes.sample(num_decodes)
        return samples

    def close(self) -> None:
        self.stage.engine.close()

    def check_integrity(self) -> None:
        super().check_integrity()
        self.feeds.check_integrity()


def _place(groups: Sequence[MediaGroup], number: int) -> tuple[int, int]:
    """Returns the item of a group, and its index in the item."""
    item = groups[number].item
    return item, sum(group.item == item for group in groups[:number])
