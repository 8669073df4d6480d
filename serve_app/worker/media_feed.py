"""Brings embeddings of requests to a prefill worker: grants room, receives groups, joins and passes them on.

    admitted, num_cached | needed groups: room -> Grant -> encoder -> received in order -> engine
                                                    |  encoder lost: Reissue -> another Grant
    computed             | room released group by group

A ticket is owned by the request it was granted to, although others may wait for the same group. When the
owner ends, the group is granted to one of the others, since the fetching of its frames may have ended too.

Encoders send only what is kept of items that drop tokens: their groups are asked for under the name of a
reading, which is of this request alone. One encoder gets all groups of a reading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from epd.encode.encoder_cache import GroupKey, GroupSpec
from epd.encoders import Adapter, MediaItem
from epd.encoders.groups import MediaGroup
from epd.encoders.reduction import begins_reading, is_cut_at_encoder, kept_spec
from epd.reduction import KeptCells
from epd.serve_app.messages import GroupFailed, GroupsArrived
from epd.serve_app.worker.worker_roles import ReportBuffer
from epd.stages.encode.encoder_pool import EmbeddingReceiver, EmbeddingSplicer
from epd.stages.engine.generation import GenerateRequest, RequestFault, logged_fault
from epd.stages.prefill import PrefillStage
from epd.transfer.connectors import Ticket
from epd.transfer.transfers import Grant, TransferIds

OnFault = Callable[[RequestFault], None]


@dataclass(slots=True)
class _Feed:
    """A request that waits for groups. numbers: of needed groups, among the request's groups, in order.

    specs: what it waits for of each needed group
    ends: of each needed group, the prompt tokens [0, end) that must be computed before it can be freed
    num_cached: prompt tokens that were computed before: groups of them are needed to choose from later ones
    """

    request: GenerateRequest
    groups: tuple[MediaGroup, ...]
    numbers: tuple[int, ...]
    specs: list[GroupSpec]
    ends: tuple[int, ...]
    splicer: EmbeddingSplicer
    num_cached: int
    num_taken: int = 0
    num_released: int = 0


class MediaFeeds:
    """Tracks all requests of a prefill worker that wait for embeddings."""

    def __init__(self, adapter: Adapter, stage: PrefillStage, receiver: EmbeddingReceiver) -> None:
        self.receiver = receiver
        self._adapter = adapter
        self._stage = stage
        self._feeds: dict[str, _Feed] = {}
        self._open: dict[str, Grant] = {}  # grants whose groups have not arrived, by transfer
        self._readings = TransferIds(receiver.name)

    def __len__(self) -> int:
        return len(self._feeds)

    def open(
        self,
        request: GenerateRequest,
        groups: tuple[MediaGroup, ...],
        num_cached: int,
        *,
        wants_kept: bool = False,
    ) -> None:
        """Starts waiting for groups that are not cached. Raises InfeasibleError if one can never fit.

        wants_kept: see `epd.serve_app.messages.Prefill`
        """
        numbers = needed_groups(request, groups, num_cached)
        if not numbers:
            return
        wholes = [groups[number] for number in numbers]
        specs = self._specs(request, wholes) if wants_kept else [group.spec for group in wholes]
        self.receiver.open(request.request_id, specs)
        ends = tuple(group_end(request, group) for group in wholes)
        splicer = EmbeddingSplicer(self._adapter, request.prompt)
        self._feeds[request.request_id] = _Feed(request, groups, numbers, specs, ends, splicer, num_cached)

    def _specs(self, request: GenerateRequest, wholes: Sequence[MediaGroup]) -> list[GroupSpec]:
        """Returns what to wait for: what is kept of an item, unless that is more than is missing of it."""
        cache, specs = self.receiver.reception.cache, list[GroupSpec]()
        for item, groups in groupby(wholes, key=attrgetter("item")):
            mine = list(groups)
            whole = [group.spec for group in mine]
            if is_cut_at_encoder(request.prompt, mine):
                kept = list(self._kept_specs(request.prompt.media[item], mine))
                missing = [spec for spec in whole if spec.key not in cache]
                specs += kept if _num_embeddings(kept) < _num_embeddings(missing) else whole
            else:
                specs += whole
        return specs

    def _kept_specs(self, item: MediaItem, groups: Sequence[MediaGroup]) -> Iterator[GroupSpec]:
        name = ""
        for group in groups:
            if begins_reading(item, group):
                name = self._readings.next()
            yield kept_spec(item, group, name)

    def step(self, reports: ReportBuffer, on_fault: OnFault) -> bool:
        """Takes what has arrived and grants what there is room for. Returns whether anything has moved.

        on_fault: called with each request whose embeddings could not be passed on; it must close it
        """
        num_events = len(reports.events)
        self._report_failed(self.receiver.poll(), reports)
        self._report_arrived(reports)
        has_fed = [self._guarded(feed, on_fault) for feed in list(self._feeds.values())]
        self.grant(reports)
        return any(has_fed) or len(reports.events) > num_events

    def _report_failed(self, failed: dict[GroupKey, str], reports: ReportBuffer) -> None:
        if failed:
            reports.events += [
                GroupFailed(grant.request_id, grant.group, transfer_id, failed[grant.ticket.key])
                for transfer_id, grant in self._open.items()
                if grant.ticket.key in failed
            ]

    def _report_arrived(self, reports: ReportBuffer) -> None:
        is_ready = self.receiver.reception.cache.is_ready
        arrived = tuple(i for i, grant in self._open.items() if is_ready(grant.ticket.key))
        for transfer_id in arrived:
            del self._open[transfer_id]
        if arrived:
            reports.events.append(GroupsArrived(arrived))

    def _guarded(self, feed: _Feed, on_fault: OnFault) -> bool:
        try:
            return self._feed(feed)
        except Exception as error:  # noqa: BLE001 - fails its request alone
            on_fault(logged_fault(feed.request.request_id, error))
            return True

    def _feed(self, feed: _Feed) -> bool:
        """Passes on the next groups. Returns whether there were any."""
        taken = self.receiver.take(feed.request.request_id)
        for index, embeddings, places in taken:
            feed.num_taken = index + 1
            group = feed.groups[feed.numbers[index]]
            is_kept = bool(feed.specs[index].key.reading)
            splicer = feed.splicer
            placed = splicer.place(group, embeddings, places) if is_kept else splicer.push(group, embeddings)
            if placed is not None:
                self._stage.engine.add_embeddings(feed.request.request_id, placed)
        if any(feed.groups[feed.numbers[each.number]].plan.is_joined_whole for each in taken):
            self._release(feed, feed.num_taken)  # it may be larger than the cache, so none is kept for long
        self.advance(feed.request.request_id, feed.num_cached)
        return bool(taken)

    def take_cells(self, request_id: str) -> list[tuple[int, KeptCells]]:
        """Returns which tokens of the request's videos were kept since the last call, with their items."""
        feed = self._feeds.get(request_id)
        return feed.splicer.take_cells() if feed is not None else []

    def grant(self, reports: ReportBuffer) -> None:
        """Grants what there is room for."""
        for grant in self.receiver.grant():
            feed = self._feeds[grant.request_id]
            self._issue(feed, grant.group, grant.ticket, reports)

    def _issue(self, feed: _Feed, index: int, ticket: Ticket, reports: ReportBuffer) -> None:
        grant = Grant(feed.request.request_id, feed.numbers[index], ticket)
        self._open[ticket.transfer_id] = grant
        reports.events.append(grant)

    def advance(self, request_id: str, num_computed: int) -> None:
        """Frees embeddings of prompt tokens [0, num_computed), which are computed."""
        feed = self._feeds.get(request_id)
        if feed is None:
            return
        stop = feed.num_released
        while stop < feed.num_taken and feed.ends[stop] <= num_computed:
            stop += 1
        self._release(feed, stop)
        if feed.num_released == len(feed.numbers):
            self._forget(request_id)

    def _release(self, feed: _Feed, stop: int) -> None:
        if stop > feed.num_released:
            feed.num_released = stop
            self.receiver.release(feed.request.request_id, stop)

    def close(self, request_id: str, reports: ReportBuffer) -> None:
        """Ends a request, even if it still waits for groups. Unknown ids are ignored."""
        if request_id not in self._feeds:
            return
        self._forget(request_id)
        orphans = [i for i, grant in self._open.items() if grant.request_id == request_id]
        self.reissue(orphans, reports)

    def _forget(self, request_id: str) -> None:
        del self._feeds[request_id]
        for ticket in self.receiver.close(request_id):
            self._open.pop(ticket.transfer_id, None)

    def reissue(self, transfer_ids: Sequence[str], reports: ReportBuffer) -> None:
        """Grants groups again, to requests that wait for them. Tickets that are not open are ignored."""
        for transfer_id in transfer_ids:
            grant = self._open.get(transfer_id)
            if grant is None or self.receiver.reception.cache.is_ready(grant.ticket.key):
                continue
            del self._open[transfer_id]
            ticket = self.receiver.reissue(grant.ticket.key)
            waiting = self.receiver.reception.waiting_for(ticket.key)
            feed = self._feeds[grant.request_id if grant.request_id in waiting else waiting[0]]
            self._issue(feed, _index_of(feed, ticket.key), ticket, reports)

    def check_integrity(self) -> None:
        """Raises AssertionError unless tickets and requests agree."""
        self.receiver.check_integrity()
        lost = [grant.request_id for grant in self._open.values() if grant.request_id not in self._feeds]
        if lost:
            raise AssertionError(f"open tickets of requests that are gone: {lost}")


def needed_groups(request: GenerateRequest, groups: Sequence[MediaGroup], num_cached: int) -> tuple[int, ...]:
    """Returns numbers of the groups whose tokens are not all among the first `num_cached` of the prompt.

    A reduced item needs none or all: the tokens kept of later groups depend on earlier ones.
    """
    items = request.prompt.media
    ends = [
        items[group.item].units[-1].stop if items[group.item].windows else group_end(request, group)
        for group in groups
    ]
    return tuple(number for number, end in enumerate(ends) if end > num_cached)


def group_end(request: GenerateRequest, group: MediaGroup) -> int:
    """Returns the end of prompt tokens [0, end), of which the last depends on the group."""
    return request.prompt.media[group.item].range_of(group.stop - 1).stop


def _index_of(feed: _Feed, key: GroupKey) -> int:
    return next(index for index, spec in enumerate(feed.specs) if spec.key == key)


def _num_embeddings(specs: Sequence[GroupSpec]) -> int:
    return sum(spec.num_embeddings for spec in specs)
