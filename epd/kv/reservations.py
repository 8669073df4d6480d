"""Reserves blocks for requests: how many each needs, whether they are there, and its table opened on them."""

from __future__ import annotations

from epd.errors import InfeasibleError
from epd.kv.kv_cache import BlockCopy, KVCacheManager
from epd.kv.kv_room import Shortage
from epd.kv.scheduled_request import ScheduledRequest
from epd.types import ceil_div


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
