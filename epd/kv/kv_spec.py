"""Sizes a KV cache: layer groups that keep all tokens, groups with a sliding window, and recurrent states."""

from __future__ import annotations

from dataclasses import dataclass

from epd.kv.states import SLOTS_PER_SEQUENCE
from epd.types import ceil_div

# Of a head of a token whose values have 8 bits: float32.
SCALE_BYTES = 4
# States and windows that are kept beside those of answers, for prompts that begin alike.
_NUM_KEPT = 8


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Sizes the cache.

    num_blocks: of each layer group with attention. block_size: tokens.
    num_states: slots of recurrent states; 0 for a model without them.
    windows: of each layer group, tokens that one attends; None for all. Groups with a window come last.
    num_ahead: tokens of a request that are computed at once, for which its windows have room.
    """

    num_blocks: tuple[int, ...]
    block_size: int
    num_states: int = 0
    windows: tuple[int | None, ...] = ()
    num_ahead: int = 1

    def __post_init__(self) -> None:
        if not self.num_blocks or min(self.num_blocks) < 1 or self.block_size < 1:
            raise ValueError(f"a KV cache needs at least 1 layer group of 1 block of 1 token, got {self}")
        if self.num_states and self.num_states < SLOTS_PER_SEQUENCE:
            raise ValueError(f"a sequence needs {SLOTS_PER_SEQUENCE} slots for its state, got {self}")
        has_window = [window is not None for window in self.windows]
        if self.windows and (len(has_window) != len(self.num_blocks) or has_window != sorted(has_window)):
            raise ValueError(
                f"each layer group needs a window or None, groups of all tokens first, got {self}"
            )
        if all(has_window) and has_window:
            raise ValueError(f"a KV cache needs a layer group of all tokens, got {self}")

    @property
    def num_windows(self) -> int:
        """Returns the number of layer groups with a window, the last ones."""
        return sum(window is not None for window in self.windows)

    @property
    def num_full(self) -> int:
        """Returns the number of layer groups that keep all tokens, the first ones."""
        return len(self.num_blocks) - self.num_windows

    @property
    def keeps_states(self) -> bool:
        """Returns whether a prompt begins only where a state, or the blocks of a window, were kept."""
        return self.num_states > 0 or self.num_windows > 0

    def first_attended(self, layer_group: int, num_tokens: int) -> int:
        """Returns the first token that one after `num_tokens` tokens attends."""
        window = self.windows[layer_group] if self.windows else None
        return 0 if window is None else max(num_tokens - window + 1, 0)

    def most_blocks(self, layer_group: int, num_tokens: int, num_ahead: int = 0) -> int:
        """Returns the blocks that a request of `num_tokens` tokens may hold in a layer group at a time.

        num_ahead: tokens of it that are computed at once, if they are more than of others.
        """
        num_blocks = ceil_div(num_tokens, self.block_size)
        window = self.windows[layer_group] if self.windows else None
        if window is None:
            return num_blocks
        reach = window - 1 + max(self.num_ahead, num_ahead)
        return min(num_blocks, ceil_div(reach, self.block_size) + 1)


def window_blocks(window: int, block_size: int, max_num_seqs: int, max_chunk_tokens: int) -> int:
    """Returns the blocks for so many windows, those of kept prompts, and a chunk: no more are ever needed."""
    each = ceil_div(window, block_size) + 1
    return (max_num_seqs + _NUM_KEPT) * each + ceil_div(max_chunk_tokens, block_size)


def state_slots(max_num_seqs: int) -> int:
    """Returns the slots for the recurrent states of so many answers, and of kept prompts."""
    return SLOTS_PER_SEQUENCE * max_num_seqs + _NUM_KEPT
