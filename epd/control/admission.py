"""Queues requests that wait for room, within bounds and deadlines, and refuses the others.

    enter: full, or too late by measured waits -> OverloadedError
    waiting: by priority, retried ones first, then clients in turns; only the first few may look for room
    leave: placed, gone, or past its deadline -> OverloadedError

The lower a priority, the more important, as in vLLM: 0 where a user waits for the answer. Above it, batch
requests look for room only while nothing more important waits, and take no place in the queue from others.

Several queues may share the workers. Each then knows from the others how many wait there and since when: all
of them count as waiting, and a request lets an older one go first, for a short time on each turn.

Requests of one client come in their order, one of each client in a turn:

a: a1 a2 a3 a4    b: b1    c: c1 c2     ->     a1 b1 c1 | a2 c2 | a3 | a4

Of one with a weight of 2 there are two in a turn, so that a has twice as many as others while they wait:

a: a1 a2 a3 a4    b: b1    c: c1 c2     ->     a1 b1 c1 a2 | a3 c2 a4

Time is passed in, in seconds on any one clock, also what is known of other queues.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from epd.control.recent import DecayedMean
from epd.errors import OverloadedError

_WEIGHT_OF_NEW = 0.1  # weight of a first token's time in the running mean
# For which intervals are remembered, by time: requests find room in bursts, and none does for a while after a
# worker is lost. Such a pause counts by what found room before it, however many that were.
_MEMORY_S = 30.0
_MAX_OVERTAKEN = 32
_LEAST_RETRY_S, _MOST_RETRY_S = 1.0, 60.0
_YIELD_S = 0.25  # the longest that a turn is left to older requests of other queues
_MIN_OLDER_S = 0.5  # that must be older by this: what is known of others is not newer
_FEW = 8  # a client has few places if it has less than this part of all
_RESERVED = 4  # this part of all places is beyond them, for such clients


def has_place(num_taken: int, num_own: int, num_places: int) -> bool:
    """Returns whether a client may take one more place: one client may take all, and not those for others.

    num_taken: of all clients. num_own: of these, that this client has
    """
    has_few = num_own < num_places // _FEW
    return num_taken < num_places + (num_places // _RESERVED if has_few else 0)


@dataclass(frozen=True, slots=True)
class QueueSummary:
    """Describes the requests that wait in other queues.

    num_waiting: those with users, see priorities
    oldest_s: when the oldest of them came; None if none waits
    """

    num_waiting: int = 0
    oldest_s: float | None = None


@dataclass(order=True, slots=True)
class _Waiting:
    priority: int
    is_new: bool
    turn: float
    number: int
    request_id: str = field(compare=False)
    deadline_s: float = field(compare=False)
    entered_s: float = field(default=0.0, compare=False)
    num_overtaken: int = field(default=0, compare=False)  # by requests behind it that found room
    client: str = field(default="", compare=False)


class _Mean:
    """Keeps a running mean that decays; None before the first measurement."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, value: float) -> None:
        self.value = value if self.value is None else self.value + _WEIGHT_OF_NEW * (value - self.value)


class _Yield:
    """Leaves turns to older requests of other queues, each for a short time."""

    def __init__(self) -> None:
        self._since_s: float | None = None

    def lasts(self, first: _Waiting | None, others: QueueSummary | None, now_s: float) -> bool:
        """Returns whether this turn is left to others; one that has been left long enough is taken.

        first: of this queue, None if it is empty
        """
        oldest_s = None if others is None else others.oldest_s
        is_older = first is not None and oldest_s is not None and oldest_s + _MIN_OLDER_S < first.entered_s
        if first is None or not is_older or not first.is_new:
            self._since_s = None
            return False
        if self._since_s is None:
            self._since_s = now_s
        return now_s < self._since_s + _YIELD_S

    def end(self) -> None:
        """Notes that a turn was taken: the next one may be left to others again."""
        self._since_s = None


class AdmissionQueue:
    """Queues requests that wait for workers."""

    def __init__(self, max_waiting: int) -> None:
        self.max_waiting = max_waiting
        self.num_refused = 0
        self.others: QueueSummary | None = None
        self._yield = _Yield()
        self._waiting: list[_Waiting] = []
        self._num_entered = 0
        self._turn = 0.0  # of the last request that found room
        self._placed_s: float | None = None  # last time that a request left while another waited
        self._interval_s = DecayedMean(_MEMORY_S)  # between two that find room while there is a queue
        self._first_token_s = _Mean()  # from room to first token

    def __len__(self) -> int:
        return len(self._waiting)

    def summary(self) -> QueueSummary:
        """Returns what other queues need to know of this one."""
        entered = [each.entered_s for each in self._waiting if each.priority <= 0]
        return QueueSummary(len(entered), min(entered, default=None))

    def check(
        self,
        now_s: float,
        deadline_s: float,
        *,
        num_coming: int = 0,
        priority: int = 0,
        client: str = "",
        weight: int = 1,
    ) -> None:
        """Raises OverloadedError if a request that came now would be refused.

        num_coming: requests that were not refused and have not entered yet.
        weight: how many requests of the client are in a turn.
        """
        rivals = [each.client for each in self._waiting if each.priority <= max(priority, 0)]
        num_rivals = len(rivals) + num_coming + (self.others.num_waiting if self.others is not None else 0)
        if not has_place(num_rivals, rivals.count(client), self.max_waiting):
            raise self._refusal(f"{num_rivals} requests wait; allowed {self.max_waiting}")
        place = (priority, True, self._turn_of(client, weight))
        num_ahead = sum((each.priority, each.is_new, each.turn) <= place for each in self._waiting)
        num_ahead += num_coming
        expected_s = self.expected_wait_s(num_ahead) + (self._first_token_s.value or 0.0)
        if num_ahead > num_coming and now_s + expected_s > deadline_s:
            left_s = deadline_s - now_s
            raise self._refusal(f"a first token takes {expected_s:.1f} s; the deadline is in {left_s:.1f} s")

    def enter(
        self,
        request_id: str,
        now_s: float,
        deadline_s: float,
        *,
        is_new: bool = True,
        priority: int = 0,
        client: str = "",
        weight: int = 1,
    ) -> None:
        """Queues a request for a turn of its client; a retried one before all new ones, and never refused.

        Raises OverloadedError as `check` does.
        """
        if is_new:
            self.check(now_s, deadline_s, priority=priority, client=client, weight=weight)
        if not self._waiting:
            self._placed_s = None
        order = priority, is_new, self._turn_of(client, weight), self._num_entered
        insort(self._waiting, _Waiting(*order, request_id, deadline_s, now_s, client=client))
        self._num_entered += 1

    def _turn_of(self, client: str, weight: int) -> float:
        """Returns the turn of a client's next request: behind its own, and now if it has none."""
        own = (each.turn + 1 / weight for each in self._waiting if each.client == client)
        return max([self._turn, *own])

    def first(self, num_first: int = 1) -> list[str]:
        """Returns the requests, up to a limit, that may look for room now: all of one priority.

        After too many have overtaken the first request, only that one may, so that none starves.
        """
        if self._waiting and self._waiting[0].num_overtaken >= _MAX_OVERTAKEN:
            num_first = 1
        first = self._waiting[:num_first]
        return [each.request_id for each in first if each.priority == first[0].priority]

    def is_turn(self, request_id: str, num_first: int = 1, now_s: float | None = None) -> bool:
        """Returns whether the request is one of those from `first`.

        now_s: the time, where older requests of other queues may go first
        """
        first = self._waiting[0] if self._waiting else None
        if now_s is not None and self._yield.lasts(first, self.others, now_s):
            return False
        return request_id in self.first(num_first)

    def check_deadline(self, request_id: str, now_s: float) -> None:
        """Raises OverloadedError for a request that has waited too long, or is expected to.

        A burst that comes before anything has been measured is let in, and is reduced here.
        """
        for num_ahead, waiting in enumerate(self._waiting):
            if waiting.request_id != request_id:
                continue
            if now_s > waiting.deadline_s:
                raise self._refusal("no worker had room before the deadline")
            expected_s = num_ahead * (self._interval_s.value or 0.0) + (self._first_token_s.value or 0.0)
            if num_ahead and waiting.is_new and now_s + expected_s > waiting.deadline_s:
                raise self._refusal(f"behind {num_ahead} others a first token takes {expected_s:.1f} s")

    def place(self, request_id: str, now_s: float) -> None:
        """Removes a request that has found room."""
        for waiting in self._waiting:
            if waiting.request_id == request_id:
                self._turn = max(self._turn, waiting.turn)
                break
            waiting.num_overtaken += 1
        self.leave(request_id)
        self._yield.end()
        if self._placed_s is not None:
            elapsed_s = now_s - self._placed_s
            self._interval_s.add(elapsed_s, 1.0, elapsed_s)
        self._placed_s = now_s if self._waiting else None

    def interrupt(self) -> None:
        """Notes a lost worker: the time until the next request finds room is no measure of the pace."""
        self._placed_s = None

    def leave(self, request_id: str) -> None:
        """Removes a request that no longer waits. Unknown ids are ignored."""
        self._waiting = [each for each in self._waiting if each.request_id != request_id]

    def record_first_token(self, seconds: float) -> None:
        """Records the time of a request from finding room to its first token."""
        self._first_token_s.add(seconds)

    def expected_wait_s(self, num_ahead: int) -> float:
        """Returns the seconds until a request at that place in the queue finds room; 0 while unknown."""
        return (num_ahead + 1) * (self._interval_s.value or 0.0)

    def _refusal(self, reason: str) -> OverloadedError:
        self.num_refused += 1
        retry_s = min(max(self.expected_wait_s(len(self._waiting)), _LEAST_RETRY_S), _MOST_RETRY_S)
        return OverloadedError(f"{reason}; try again in {retry_s:.0f} s", retry_s)
