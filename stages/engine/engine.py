"""Implements the language-model engine of one worker: schedule, run, commit.

    waiting | admitted: blocks for the prompt | prefilled as media arrive | decoded | done
                          step: one packed pass over chunks and decodes of many requests

`epd/kv/scheduling.py` decides, `ModelRunner` computes, this class moves what they need between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from time import perf_counter, thread_time
from typing import Any

from torch import Tensor

from epd.errors import RequestError
from epd.kv.drafting import MOST_DRAFTS, Drafting
from epd.kv.kv_cache import KVCacheManager
from epd.kv.kv_room import KVCacheSpec
from epd.kv.pass_limits import SchedulerConfig
from epd.kv.scheduled_request import Chunk, ScheduledRequest, SchedulerOutput
from epd.kv.scheduling import Scheduler
from epd.stages.engine.block_moves import BlockMoves
from epd.stages.engine.generation import Admission, Extent, FaultCount, GenerateRequest, StepResult, run_apart
from epd.stages.engine.kv_store import KVStore
from epd.stages.engine.model_runner import ModelRunner
from epd.stages.engine.open_sequences import OpenSequences, SequenceMaker
from epd.stages.engine.run_ahead import AheadStep, RunAhead
from epd.stages.engine.sequence import ComputedChunk, TokenSequence, sample_chunks
from epd.stages.sampling.sampler import SampledToken
from epd.stages.visual_inputs import PlacedEmbeddings
from epd.store.piece_files import PieceFiles
from epd.store.pieces import PIECE_TOKENS
from epd.store.write_behind import ReadPaces


class LanguageEngine:
    """Takes requests and returns tokens, one `step` at a time. Not thread-safe."""

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: Any,
        eos_ids: frozenset[int],
        config: SchedulerConfig,
        *,
        enable_prefix_caching: bool = True,
        drafting: Drafting | None = None,
        runs_ahead: bool = False,
    ) -> None:
        """Takes what the requests of a worker share.

        runner: with the pools. Its followers, if it has any, repeat what is done to them.
        drafting: proposes tokens of decodes, to be checked in one pass; None to propose none.
        runs_ahead: launches passes before the tokens before them are read; without drafts and states.
        """
        self.pools = runner.pools
        self.kv = KVCacheManager(_spec(runner, config), enable_prefix_caching=enable_prefix_caching)
        self.scheduler = Scheduler(config, self.kv)
        self._runner = runner
        self._moves = BlockMoves(self.kv, runner.pools, runner.followers)
        self._sequences = OpenSequences(self.scheduler, self._moves)
        self.counts = self._sequences.counts
        self._drafting = drafting
        both_ways = runner.attends_both_ways
        self._maker = SequenceMaker(self.kv, tokenizer, eos_ids, drafting, attends_both_ways=both_ways)
        self.grammars = self._maker.grammars
        # What a pass costs: on a CPU the thread's own work, whatever other processes take of its time.
        is_alone = runner.followers is None and runner.pools.groups[0].storage.device.type == "cpu"
        self._now_s = thread_time if is_alone else perf_counter
        self._run_ahead = (
            RunAhead(runner, self.scheduler, self.kv)
            if runs_ahead and not drafting and runner.followers is None and not self.kv.spec.num_states
            else None
        )
        self._fault_counts = FaultCount()

    # Requests

    def add(self, request: GenerateRequest) -> None:
        """Queues a request. Raises InfeasibleError if it can never fit, RequestError for an id in use."""
        if request.request_id in self._sequences or self.scheduler.is_held(request.request_id):
            raise RequestError(f"request id '{request.request_id}' is in use; choose another")
        sequence = self._maker.first(request)
        self.scheduler.reservations.check_fits(sequence.scheduled)
        self._sequences[sequence.request_id] = sequence
        if self.store is None or not self.store.begin(sequence):
            self.scheduler.add(sequence.scheduled)

    def keep_in(
        self,
        files: PieceFiles,
        piece_tokens: int = PIECE_TOKENS,
        embedding_bytes: int = 0,
        paces: ReadPaces | None = None,
    ) -> None:
        """Keeps keys and values of media in files, from now on, and brings them back: see `KVStore`."""
        self._sequences.store = KVStore(files, self.kv, self.pools, piece_tokens, embedding_bytes, paces)

    @property
    def store(self) -> KVStore | None:
        """Returns what keeps keys and values of media in files, if anything does."""
        return self._sequences.store

    def close(self) -> None:
        """Ends what runs beside it."""
        if self.store is not None:
            self.store.close()

    def can_admit(self, request: GenerateRequest) -> bool:
        """Reports whether the request would get its blocks in the next step. Changes nothing."""
        return self.scheduler.can_admit(self._maker.first(request).scheduled)

    def add_embeddings(self, request_id: str, placed: PlacedEmbeddings) -> None:
        """Adds the next visual tokens of a request, in order; those that are cached may be left out.

        Embeddings for a request that is over are ignored.
        """
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            sequence.visual.add(placed)
            sequence.tokens.place(placed.indices, placed.positions, placed.is_key)
            sequence.scheduled.num_ready = max(sequence.scheduled.num_ready, sequence.visual.num_ready)
            if self.store is not None:
                self.store.arrived(sequence)

    def adopt(
        self,
        request: GenerateRequest,
        first: Sequence[SampledToken],
        later: Sequence[Sequence[int] | None] = (),
    ) -> None:
        """Continues a request whose tokens but the last are in this cache: blocks open under its id.

        first: the first token of each of its sequences, which another worker has sampled and sent on.
        later: of a request that is moved in its middle, what followed in each sequence; None where that is
            over. Of several sequences only the prompt is in the cache, which has room for the rest.
        Whatever it raises, the request and its blocks are forgotten.
        """
        try:
            self._adopt(request, first, later)
        except Exception:
            self.abort(request.request_id)
            if request.request_id in self.kv:
                self.kv.free(request.request_id)
            raise

    def _adopt(
        self,
        request: GenerateRequest,
        first: Sequence[SampledToken],
        later: Sequence[Sequence[int] | None],
    ) -> None:
        sequence = self._maker.first(request)
        sequence.visual.skip(request.num_prompt_tokens)
        sequence.scheduled.num_ready = sequence.scheduled.num_computed = sequence.scheduled.num_prompt_tokens
        self._sequences[sequence.request_id] = sequence
        self.scheduler.adopt(sequence.scheduled)
        family = [sequence, *self._maker.siblings(sequence)]
        for each, ids in zip(family, later, strict=False):
            each.finish_reason = "stop" if ids is None else None
        self._sequences.begin(family, first, StepResult())
        for each, ids in zip(family, later, strict=False):
            for token_id in ids or ():
                each.push(SampledToken(token_id))
            if ids is not None and len(family) > 1:
                num_held = each.scheduled.num_tokens + 1 - request.num_dropped
                if not self.kv.can_allocate(each.request_id, num_held):
                    self.scheduler.prompts.give_way()
                self.kv.allocate(each.request_id, num_held)
            elif ids is not None:  # drafts that held are known, and not in a recurrent state
                each.scheduled.num_computed = self.kv.num_tokens(each.request_id) + request.num_dropped
                each.scheduled.num_seen = each.scheduled.num_tokens - 1
        self._sequences.keep_prompt(family)

    def detach(self, request_id: str) -> list[TokenSequence]:
        """Takes a request that decodes out of the queues; its blocks are held until `attach` or `release`.

        Returns its sequences that are not over. Returns none, and changes nothing, where it cannot be moved:
        one waits for room, its layers differ in length, or the state that several begin with has given way.
        """
        sequences = self._sequences.of_request(request_id)
        groups = range(len(self.kv.spec.num_blocks))
        is_plain = all(
            each.scheduled.is_decoding
            and len({self.kv.num_tokens(each.request_id, group) for group in groups}) == 1
            for each in sequences
        )
        is_split = self.kv.spec.keeps_states and any(each.request.sampling.n > 1 for each in sequences)
        if not is_plain or (is_split and not self.scheduler.prompts.send(request_id)):
            return []
        for each in sequences:
            self._sequences.remove(each, hold=True)
        return sequences

    def attach(self, sequences: Sequence[TokenSequence]) -> None:
        """Continues a request that was detached."""
        for each in sequences:
            self._sequences[each.request_id] = each
            self.scheduler.take_back(each.scheduled)
            self.scheduler.prompts.take_back(each.request.request_id)

    def abort(self, request_id: str, *, hold: bool = False) -> None:
        """Forgets a request and all its sequences, whatever state they are in; unknown ids are ignored.

        hold: keep its blocks, if it has any, until `release`.
        """
        for sequence in self._sequences.of_request(request_id):
            self._sequences.remove(sequence, hold=hold)
        if self.scheduler.is_held(request_id) and not hold:
            self.scheduler.release(request_id)

    @property
    def has_graphs(self) -> bool:
        """Returns whether passes that were captured are replayed."""
        return self._runner.num_spare_blocks > 0

    def has_work(self) -> bool:
        """Reports whether any request is not over yet."""
        return bool(self._sequences)

    @property
    def request_ids(self) -> list[str]:
        """Lists all requests that are not over, in order of arrival."""
        return list(dict.fromkeys(sequence.request.request_id for sequence in self._sequences.values()))

    # One step

    def step(self) -> StepResult:
        """Computes one pass, as far as there is anything to compute, and returns its result.

        What raises for one request ends that request alone: see `StepResult.faults`. Raises AssertionError
        when it has left an inconsistent state, and its own error when many requests have failed in a row.
        """
        start_s = self._now_s()
        self._take_grammars()
        self._take_restored()
        result = StepResult() if self._run_ahead is None else self.admit_early()
        if self._run_ahead is not None and (ahead := self._run_ahead.step(self._sequences)):
            self._go_on(ahead, result)
            self._count(ahead.num_tokens, start_s, result)
            return self._checked(result)
        self._draft(result)
        output = self.scheduler.schedule()
        self._move(output)
        self._admit(output, result)
        if output.chunks:
            only_decodes = all(chunk.request.is_decoding for chunk in output.chunks)
            self._compute(output.chunks, result)
            self._count(output.num_tokens, start_s, result)
            if self._drafting and only_decodes:
                num_drafted = sum(chunk.num_drafts for chunk in output.chunks)
                self._drafting.record_pass(len(output.chunks), num_drafted, self._now_s() - start_s)
        return self._checked(result)

    def admit_early(self) -> StepResult:
        """Admits waiting requests that there is plenty of room for, before a step."""
        result = StepResult()
        if self.scheduler.waiting:
            output = self.scheduler.admit_early()
            self._move(output)
            self._admit(output, result)
        return self._checked(result)

    def _checked(self, result: StepResult) -> StepResult:
        if result.faults:
            self.check_integrity()
        return result

    def _take_grammars(self) -> None:
        """Lets the answers go on whose grammars have been built."""
        for sequence in self._sequences.values():
            if not sequence.scheduled.may_sample:
                sequence.scheduled.may_sample = sequence.may_sample

    def _take_restored(self) -> None:
        """Queues the requests whose keys and values have been brought back."""
        for sequence in self.store.step() if self.store is not None else ():
            self.scheduler.add(sequence.scheduled)

    def _fail(self, request: ScheduledRequest, cause: Exception, result: StepResult) -> None:
        """Forgets a request that raises, with all its sequences; blocks that go elsewhere stay held."""
        sequence = self._sequences.get(request.request_id)
        if sequence is None:  # it has failed before in this step
            return
        request_id = sequence.request.request_id
        result.faults.append(self._fault_counts.failed(request_id, cause))
        self.abort(request_id, hold=sequence.request.extent is Extent.FIRST_TOKEN)

    def _draft(self, result: StepResult) -> None:
        """Guesses the next tokens of the decodes."""
        if self._drafting is None:
            return
        decoding = [self._sequences[each.request_id] for each in self.scheduler.running if each.is_decoding]
        if self._runner.draft_head is not None:
            draft = partial(self._sequences.draft_by_head, self._runner, self._drafting.config.max_draft)
            run_apart(decoding, draft, lambda each, error: self._fail(each.scheduled, error, result))
            return
        for sequence in decoding:
            try:
                sequence.draft(len(decoding))
            except Exception as error:  # noqa: BLE001 - costs its request alone
                self._fail(sequence.scheduled, error, result)
        if not self._drafting.pays(len(decoding)):
            for sequence in decoding:
                sequence.drafts, sequence.scheduled.num_drafts = (), 0

    def _admit(self, output: SchedulerOutput, result: StepResult) -> None:
        for scheduled in output.admitted:
            try:
                self._admit_one(scheduled, result)
            except Exception as error:  # noqa: BLE001 - costs its request alone
                self._fail(scheduled, error, result)

    def _admit_one(self, scheduled: ScheduledRequest, result: StepResult) -> None:
        sequence = self._sequences[scheduled.request_id]
        sequence.forget_tables()
        sequence.visual.skip(scheduled.num_computed)
        scheduled.num_ready = max(scheduled.num_ready, sequence.visual.num_ready)
        if sequence.num_generated == 0:
            self.counts.num_cached_tokens += scheduled.num_computed
            reused = () if self.store is None else self.store.admitted(sequence)
            result.admissions.append(Admission(scheduled.request_id, scheduled.num_computed, reused))

    def _move(self, output: SchedulerOutput) -> None:
        """Moves blocks, in this order, before the pass."""
        for preemption in output.preemptions:
            self._moves.offload(preemption)
        self._moves.copy(output.copies)
        for restore in output.restores:
            self._moves.restore(restore)
            self.scheduler.advance(restore.request, restore.stop + restore.request.num_dropped)

    def _run(self, chunks: Sequence[Chunk]) -> tuple[Tensor, Tensor | None]:
        """Returns logits of each chunk's last rows, and the rows where a head drafts: see `run_with_head`."""
        segments = [
            self._guarded(chunk).segment(chunk.start, chunk.stop, self._sequences.num_rows(chunk), self.kv)
            for chunk in chunks
        ]
        has_head = self._runner.draft_head is not None
        return self._runner.run_with_head(segments) if has_head else (self._runner.run(segments), None)

    def _guarded(self, chunk: Chunk) -> TokenSequence:
        """Returns the chunk's sequence; a question that drops tokens is told those that it may not."""
        sequence = self._sequences.of_chunk(chunk)
        if sequence.view is not None and sequence.view.start == chunk.start:
            table = self.kv.block_table(chunk.request.request_id)
            sequence.view.guard(self._moves.guarded.read(table, chunk.start))
        return sequence

    def _compute(self, chunks: Sequence[Chunk], result: StepResult) -> None:
        """Runs and samples all chunks at once, or those apart that raise; then commits chunk by chunk."""
        computed: list[ComputedChunk] = []

        def run(some: Sequence[Chunk]) -> None:
            live = [chunk for chunk in some if chunk.request.request_id in self._sequences]
            if live:
                logits, hidden = self._run(live)
                parts = [(chunk, self._family(chunk), self._sequences.num_rows(chunk)) for chunk in live]
                computed.extend(sample_chunks(parts, logits, hidden))

        run_apart(chunks, run, lambda chunk, error: self._fail(chunk.request, error, result))
        for each in computed:
            num_before = each.family[0].num_generated
            self._record(each.chunk.request, result, self._sequences.record, each)
            each.keep_hidden(num_before)

    def _go_on(self, ahead: AheadStep, result: StepResult) -> None:
        """Commits the next tokens of sequences that decode, and chunks of prompts beside them."""
        for sequence, token in ahead.decoded:
            self._record(sequence.scheduled, result, self._sequences.go_on, sequence, token)
        for each in ahead.chunks:
            self._record(each.chunk.request, result, self._sequences.record, each)

    def _record(self, request: ScheduledRequest, result: StepResult, record: Any, *computed: Any) -> None:
        """Records what was computed of a request, unless it has failed before in this step."""
        if request.request_id not in self._sequences:
            return
        try:
            record(*computed, result)
            self._fault_counts.succeeded()
        except Exception as error:  # noqa: BLE001 - costs its request alone
            self._fail(request, error, result)

    def _family(self, chunk: Chunk) -> list[TokenSequence]:
        """Returns the sequences that the chunk's logits serve: at the end of a prompt, all of the request."""
        sequence = self._sequences.of_chunk(chunk)
        if sequence.num_generated or not self._sequences.num_rows(chunk):
            return [sequence]
        return [sequence, *self._maker.siblings(sequence)]

    def _count(self, num_tokens: int, start_s: float, result: StepResult) -> None:
        if self.store is not None:
            self.store.note_pass(num_tokens, self._now_s() - start_s, is_awaited=bool(result.outputs))
        result.num_tokens = num_tokens
        self.counts.num_steps += 1
        self.counts.num_computed_tokens += num_tokens
        self.counts.num_generated_tokens += len(result.outputs)

    def check_integrity(self) -> None:
        """Raises AssertionError unless scheduler, cache and requests agree."""
        self.scheduler.check_integrity()
        queued = {each.request_id for each in (*self.scheduler.waiting, *self.scheduler.running)}
        queued |= set() if self.store is None else self.store.restoring
        if queued != self._sequences.keys() or not self._moves.offloaded <= queued:
            raise AssertionError(f"sequences {set(self._sequences)} are not those queued, {queued}")


def _spec(runner: ModelRunner, config: SchedulerConfig) -> KVCacheSpec:
    shape = runner.pools.shape
    return KVCacheSpec(
        tuple(pool.num_blocks - runner.num_spare_blocks for pool in runner.pools.groups),
        runner.pools.block_size,
        0 if shape.states is None else shape.states.num_states,
        tuple(group.window for group in shape.groups),
        max(config.max_chunk_tokens, 1 + (1 if shape.states is None else 2) * MOST_DRAFTS),
    )
