"""Tracks the recurrent states of sequences: which slot holds whose state, and where the next one goes.

Layers with a recurrent state keep no tokens: all tokens before one are in a state of fixed size. A slot holds
the states of all such layers after some tokens of a sequence. What is written never changes. A pass reads one
slot and writes another, which is the current one once the pass is committed:

    slots of a sequence   | 4, current | 9, next |    commit ->    | 9, current |    allocate ->    | 9 | 4 |

So a pass can be repeated, and forks and cached prefixes hold a slot together: nothing is copied in a pool.
"""

from __future__ import annotations

from epd.kv.block_pool import BlockPool

# A sequence that grows reads one slot and writes another.
SLOTS_PER_SEQUENCE = 2


class StateSlots:
    """Holds the slots of one sequence. current: None before the first commit. following: None until taken."""

    __slots__ = ("current", "following", "pool")

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.current: int | None = None
        self.following: int | None = None

    @property
    def num_missing(self) -> int:
        """Returns how many slots the next pass needs."""
        return int(self.following is None)

    @property
    def held(self) -> list[int]:
        """Lists the slots that it holds."""
        return [slot for slot in (self.current, self.following) if slot is not None]

    def take(self) -> None:
        """Takes a fresh slot for the next pass, unless it has one. Raises ValueError when none is free."""
        if self.following is None:
            (self.following,) = self.pool.take(1, self.current)

    def share(self, slot: int) -> None:
        """Begins with a state that has other holders."""
        self.pool.share(slot)
        self.current = slot

    def advance(self) -> None:
        """Makes the state that was written the current one."""
        if self.current is not None:
            self.pool.release(self.current)
        self.current, self.following = self.following, None

    def release(self) -> None:
        """Lets go of all slots."""
        self.pool.release(*self.held)
        self.current = self.following = None
