"""One request over several encoders, in one process: shard, encode, transfer, merge in prompt order.

    groups -> cached? taken at once
           -> shards by patches -> encoders -> offers -> receiver's blocks -> groups in order

It is what a deployment does with workers in between, and what tests and benchmarks compare that with.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from benchmarks.published.sharding import plan_shards
from epd.encoders.adapter import Embeddings
from epd.encoders.groups import MediaGroup
from epd.errors import EncodeError
from epd.stages.encode.encoder import EncodeJob, EncodeStage
from epd.stages.encode.encoder_pool import EmbeddingReceiver
from epd.transfer.connectors import Ticket
from epd.transfer.transfers import Grant
from tests.stages.encode.group_frames import FramesOf


@dataclass(slots=True)
class _Request:
    groups: Sequence[MediaGroup]
    frames_of: FramesOf
    num_taken: int = 0
    error: str = ""


class ShardedEncoding:
    """Encoders and one receiver that work together. Not for several threads at once."""

    def __init__(
        self,
        encoders: Sequence[EncodeStage],
        receiver: EmbeddingReceiver,
        *,
        max_run_patches: int | None = None,
    ) -> None:
        """max_run_patches: see `plan_shards`."""
        self._encoders = encoders
        self._receiver = receiver
        self._max_run_patches = max_run_patches
        self._requests: dict[str, _Request] = {}

    def encode(
        self, request_id: str, groups: Sequence[MediaGroup], frames_of: FramesOf
    ) -> Generator[tuple[MediaGroup, Embeddings], None, None]:
        """Each group with what was encoded of it, in order, as soon as it is there.

        frames_of: gives a group's frames, uint8 [N, h, w, 3]; called once for each group that is not cached.
        A group may be dropped from the cache once the next one is asked for. Closing the generator cancels
        the rest. Raises EncodeError, InfeasibleError.
        """
        self._receiver.open(request_id, [group.spec for group in groups])
        request = self._requests[request_id] = _Request(groups, frames_of)
        try:
            while request.num_taken < len(groups):
                self._receiver.release(request_id, request.num_taken)
                has_moved = self._step()
                if request.error:
                    raise EncodeError(f"a group could not be encoded: {request.error}; send it again")
                taken = self._receiver.take(request_id)
                if not (taken or has_moved):
                    raise EncodeError("the encoder cache is full of what other requests hold; finish them")
                for index, embeddings, _ in taken:
                    request.num_taken = index + 1
                    yield groups[index], embeddings
        finally:
            del self._requests[request_id]
            self._cancel(self._receiver.close(request_id))

    def _step(self) -> bool:
        """Moves all requests on by one batch per encoder. Returns whether there was anything to do."""
        grants = self._receiver.grant()
        self._submit(grants)
        has_work = any(encoder.has_work() for encoder in self._encoders)
        for encoder in self._encoders:
            encoder.step()
        failed = self._receiver.poll()
        for key, error in failed.items():
            for request_id in self._receiver.reception.waiting_for(key):
                self._requests[request_id].error = error
        return bool(grants or has_work or failed)

    def _submit(self, grants: Sequence[Grant]) -> None:
        shards = plan_shards(
            [self._requests[grant.request_id].groups[grant.group].spec.num_patches for grant in grants],
            [encoder.outstanding_patches for encoder in self._encoders],
            max_run_patches=self._max_run_patches,
        )
        for shard in shards:
            for place in shard.groups:
                encoder = self._encoders[shard.encoder]
                encoder.submit(self._job(grants[place], encoder))

    def _job(self, grant: Grant, encoder: EncodeStage) -> EncodeJob:
        """A group's job, for which frames come at once unless the encoder has it."""
        request = self._requests[grant.request_id]
        group = request.groups[grant.group]
        has_frames = not encoder.has(group.spec.key, group.plan)
        return EncodeJob(grant.ticket, group.plan, lambda: request.frames_of(group), has_frames=has_frames)

    def _cancel(self, tickets: Sequence[Ticket]) -> None:
        for encoder in self._encoders:
            for ticket in tickets:
                encoder.cancel(ticket.transfer_id)

    def settle(self) -> None:
        """Lets encoders take the last receipts, so that nothing is held."""
        self._receiver.poll()
        for encoder in self._encoders:
            encoder.step()
