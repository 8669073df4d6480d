"""Describes a request to the scheduler and reserves its blocks, and what is decided for one step."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

from epd.errors import InfeasibleError
from epd.kv.block_pool import BlockCopy
from epd.kv.kv_cache import KVCacheManager
from epd.kv.kv_room import Shortage
from epd.kv.prefix_cache import TokenIdentity
from epd.types import ceil_div


@dataclass(frozen=True, slots=True)
class PrunedRange:
    """Marks prompt tokens [start, stop) that stay in the cache out of `num_inputs` that are computed at once.

    computed   | ... kept so far | num_inputs ............. |        written behind the kept tokens
    committed  | ... kept so far | start .. stop |
    """

    start: int
    stop: int
    num_inputs: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop <= self.start + self.num_inputs:
            raise ValueError(f"a pruned range keeps 1 to all of its inputs, got {self}")


@dataclass(slots=True, eq=False)
class ScheduledRequest:
    """Describes a request to the scheduler.

    priority: the lower, the more important, as in vLLM.
    max_total_tokens: prompt and longest output.
    num_copies: answers to one prompt; room to split the last block is reserved for each.
    parent: a held request whose tokens are the first of this one's.
    pruned: ascending, of the prompt.
    num_to_drop: prompt tokens that leave the cache once the whole prompt is computed.
    num_dropped: prompt tokens that have left it; 0 or `num_to_drop`.
    num_seen: tokens up to the last draft that held, where the recurrent state is to take these yet.
    may_sample: whether a token may be chosen now; until then its last known token is not computed.
    state_stops: ascending, prompt tokens after which a chunk ends, and its recurrent state is kept.
    """

    request_id: str
    identity: TokenIdentity
    num_prompt_tokens: int
    max_total_tokens: int
    num_ready: int
    num_copies: int = 1
    parent: str | None = None
    pruned: tuple[PrunedRange, ...] = ()
    num_to_drop: int = 0
    num_dropped: int = 0
    num_tokens: int = 0
    num_computed: int = 0
    num_drafts: int = 0
    num_seen: int = 0
    num_offloaded: int = 0
    arrival: int = -1
    priority: int = 0
    may_sample: bool = True
    state_stops: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.num_tokens = self.num_tokens or self.num_prompt_tokens

    @property
    def num_held(self) -> int:
        """Returns how many of the computed tokens are in the cache."""
        return self.num_computed - self.num_dropped

    @property
    def num_seqs(self) -> int:
        """Returns how many answers it counts for: before its prompt is computed, all that it will have."""
        return self.num_copies if self.num_tokens == self.num_prompt_tokens else 1

    @property
    def is_decoding(self) -> bool:
        """Returns whether only the token sampled last is left to compute, and drafts are to be repeated."""
        num_seen = max(self.num_computed, self.num_seen)
        return self.num_tokens > self.num_prompt_tokens and num_seen == self.num_tokens - 1

    @property
    def num_computable(self) -> int:
        """Returns the known tokens with their inputs ready that have not been computed."""
        limit = self.num_ready if self.num_ready < self.num_prompt_tokens else self.num_tokens
        return min(limit, self.num_tokens - (not self.may_sample)) - self.num_computed

    def next_state_stop(self, num_tokens: int) -> int:
        """Returns the first of `state_stops` past `num_tokens`; past the last, all known tokens."""
        return next((stop for stop in self.state_stops if stop > num_tokens), self.num_tokens)

    def pruned_range(self, num_tokens: int) -> PrunedRange | None:
        """Returns the range that token `num_tokens` is in, or the next; None past the last."""
        at = bisect_right(self.pruned, num_tokens, key=lambda pruned: pruned.stop)
        return self.pruned[at] if at < len(self.pruned) else None

    def uncut(self, num_tokens: int) -> int:
        """Returns the most of the first `num_tokens` tokens that do not end inside a pruned range."""
        pruned = self.pruned_range(num_tokens)
        return num_tokens if pruned is None else min(num_tokens, pruned.start)

    @property
    def longest_range(self) -> int:
        """Returns the most tokens that are computed at once whatever the limits: 0 without any."""
        return max((pruned.num_inputs for pruned in self.pruned), default=0)

    def num_written(self, num_computed: int) -> int:
        """Returns how many tokens need room while the pruned ranges past `num_computed` are computed."""
        return max((p.start + p.num_inputs for p in self.pruned if p.stop > num_computed), default=0)


class KeptPrompts:
    """Keeps prompts of several answers as they were, with the states and windows that answers leave behind.

    So they can be sent to another worker. Those that are not being sent go first where room lacks.
    """

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._idle: set[str] = set()
        self._sent: set[str] = set()

    @property
    def ids(self) -> set[str]:
        """Lists the ids under which they are in the cache."""
        return {self.id_of(request_id) for request_id in self._idle | self._sent}

    @staticmethod
    def id_of(request_id: str) -> str:
        return f"{request_id}#prompt"

    def keep(self, request_id: str, answer_id: str) -> list[BlockCopy]:
        """Keeps the prompt of a request, one of whose answers is about to begin, where there is room."""
        if not self._kv.can_fork(answer_id):
            return []
        self._idle.add(request_id)
        return self._kv.fork(answer_id, self.id_of(request_id))

    def send(self, request_id: str) -> bool:
        """Holds a prompt until it is taken back or forgotten. Returns False where it is not kept."""
        is_kept = request_id in self._idle
        if is_kept:
            self._idle.remove(request_id)
            self._sent.add(request_id)
        return is_kept

    def take_back(self, request_id: str) -> None:
        """Lets a prompt go again where room lacks. Unknown ones are ignored."""
        if request_id in self._sent:
            self._sent.remove(request_id)
            self._idle.add(request_id)

    def forget(self, request_id: str) -> None:
        """Frees the blocks of a prompt. Unknown ones are ignored."""
        if request_id in self._idle | self._sent:
            self._kv.free(self.id_of(request_id))
            self._idle.discard(request_id)
            self._sent.discard(request_id)

    def give_way(self) -> bool:
        """Forgets all that are not being sent. Returns whether there were any."""
        idle = sorted(self._idle)
        for request_id in idle:
            self.forget(request_id)
        return bool(idle)


class Reservations:
    """Opens block tables of the requests of one scheduler."""

    def __init__(self, kv: KVCacheManager, *, recomputes: bool) -> None:
        """recomputes: whether the tokens of preempted requests are computed again, and not kept elsewhere."""
        self._kv = kv
        self._recomputes = recomputes
        # Why the head of the queue did not fit when its whole prompt was last looked up in the cache.
        self._refused: tuple[ScheduledRequest, Shortage] | None = None

    def check_fits(self, request: ScheduledRequest) -> None:
        """Raises InfeasibleError for a request that could never run to its end."""
        spec = self._kv.spec
        needed = max(self.num_tokens(request), self._most_held(request))
        for group, num_blocks in enumerate(spec.num_blocks):
            if spec.most_blocks(group, needed, self.num_ahead(request)) > num_blocks:
                raise InfeasibleError(
                    f"a request of {request.num_prompt_tokens} prompt tokens and up to "
                    f"{request.max_total_tokens} in all does not fit into a KV cache of "
                    f"{num_blocks * spec.block_size} tokens "
                    f"(layer group {group}); ask for fewer frames or a shorter answer, or enlarge the cache"
                )

    def _most_held(self, request: ScheduledRequest) -> int:
        """Returns for how many tokens it needs room at its end."""
        at_end = request.max_total_tokens - max(request.num_dropped, request.num_to_drop)
        is_repeated = request.num_to_drop and self._recomputes
        return at_end + self._prompt_room(request) if is_repeated else at_end

    def _prompt_room(self, request: ScheduledRequest) -> int:
        """Returns the room of the prompt in blocks of its own."""
        return ceil_div(request.num_prompt_tokens, self._kv.block_size) * self._kv.block_size

    def num_tokens(self, request: ScheduledRequest, num_computed: int = 0) -> int:
        """Returns the known tokens, the next one, and a block for each further answer that is to begin.

        Or the tokens that pruned ranges past `num_computed` need while they are computed, if that is more.
        What is kept of a prompt that is to drop tokens needs blocks of its own, behind the whole prompt's.
        """
        known = request.num_tokens + 1 + (request.num_seqs - 1) * self._kv.block_size
        if request.num_dropped:
            return known - request.num_dropped
        if request.num_to_drop:
            known += self._prompt_room(request) - request.num_to_drop
        return max(known, request.num_written(num_computed))

    def num_blocks(self, request: ScheduledRequest) -> list[int]:
        """Returns the blocks of each layer group that a request needs to run."""
        spec, needed, ahead = self._kv.spec, self.num_tokens(request), self.num_ahead(request)
        return [spec.most_blocks(group, needed, ahead) for group in range(len(spec.num_blocks))]

    def num_ahead(self, request: ScheduledRequest) -> int:
        """Returns for how many tokens windows have room: a chunk, and what the end of a prompt needs more."""
        at_once = max(self._kv.spec.num_ahead, request.longest_range)
        return at_once + 1 + (request.num_seqs - 1) * self._kv.block_size

    def may_fit(self, request: ScheduledRequest) -> bool:
        """Returns False while the last lookup still shows that the request cannot fit: a cheap check."""
        return self._refused is None or self._refused[0] is not request or self._kv.may_fit(self._refused[1])

    def open(self, request: ScheduledRequest) -> list[BlockCopy] | None:
        """Starts a block table with the cached tokens and room for the rest; changes nothing if None."""
        kv, request_id = self._kv, request.request_id
        if request.num_dropped:  # what it held comes back, and nobody else has that
            kv.open(request_id, request.identity, max_cached=0, is_shareable=False)
            copies, needed = list[BlockCopy](), self.num_tokens(request)
        elif request.parent is not None:
            num_computed = max(kv.num_tokens(request.parent), request.num_offloaded)
            needed = self.num_tokens(request, num_computed)
            if not kv.can_fork(request.parent, needed):
                return None
            copies = kv.fork(request.parent, request_id)
        else:
            copies = self._open_cached(request)
            num_computed = max(kv.num_tokens(request_id), request.num_offloaded)
            needed = self.num_tokens(request, num_computed)
        self._refused = None
        arriving = request.num_offloaded - request.num_dropped
        if not kv.can_allocate(request_id, needed, arriving=arriving):
            least = self.num_tokens(request, request.num_tokens)  # if pruned ranges were cached by then
            self._refused = request, kv.shortage(request_id, least)
            kv.free(request_id)
            return None
        kv.allocate(request_id, needed, arriving=arriving)
        request.num_computed = kv.num_tokens(request_id) + request.num_dropped
        return copies

    def _open_cached(self, request: ScheduledRequest) -> list[BlockCopy]:
        """Starts with the cached tokens, but never inside a pruned range: that is computed at once."""
        at_most = request.num_offloaded or request.num_tokens - 1
        while True:
            copies = self._kv.open(
                request.request_id,
                request.identity,
                max_cached=at_most,
                num_ahead=self.num_ahead(request),
            )
            found = self._kv.num_tokens(request.request_id)
            at_most = request.uncut(found)
            if at_most == found or request.num_offloaded > found:
                return copies
            self._kv.free(request.request_id)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Covers tokens [start, stop) of a request; the last `num_drafts` of them are drafts.

    num_pruned: tokens that are computed besides these, and do not stay.
    """

    request: ScheduledRequest
    start: int
    stop: int
    num_drafts: int = 0
    num_pruned: int = 0

    @property
    def num_inputs(self) -> int:
        """Returns the number of tokens to compute."""
        return self.stop - self.start + self.num_pruned

    @property
    def is_sampled(self) -> bool:
        """Returns whether the chunk ends with the last known token, so that the next can be sampled."""
        return self.stop - self.num_drafts == self.request.num_tokens


@dataclass(frozen=True, slots=True)
class Preemption:
    """Records a preempted request.

    block_tables: of each layer group, where the `num_tokens` tokens that the cache held still are.
    state: the slot where their recurrent state still is; None without any.
    """

    request: ScheduledRequest
    num_tokens: int
    block_tables: tuple[tuple[int, ...], ...]
    state: int | None = None


@dataclass(frozen=True, slots=True)
class Restore:
    """Covers held tokens [start, stop) of a request that come back from host memory into its new blocks."""

    request: ScheduledRequest
    start: int
    stop: int


@dataclass(slots=True)
class SchedulerOutput:
    """Describes one step; its fields are carried out in order. admitted: requests that got their blocks."""

    preemptions: list[Preemption] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    restores: list[Restore] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    admitted: list[ScheduledRequest] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_inputs for chunk in self.chunks)
