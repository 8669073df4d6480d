"""How many visual tokens are kept, known before a frame is decoded; which ones, others decide.

    units      | 0  1  2  3 | 4  5  6  7 | 8  9 |       whole units of a video, in order
    windows    [            )[           )[     )       what is chosen among at one time
    kept       [ 15         )[ 15        )[ 8   )       tokens, fixed by the retention alone

The tokens of a window are chosen from its own and from what came before it, so that a video can be reduced
while it is still being decoded, and blocks for keys and values can be reserved before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from epd.errors import RequestError

DEFAULT_METHOD = "balanced"
# Chosen before the language model sees any: encoders/reduction/selection.py.
SELECTION_METHODS = ("balanced", "evs", "vidcom2", "novelty", "random", "uniform")
# Chosen by the language model, of what it has computed: stages/pruning.py.
PREFILL_METHODS = ("quickprefill",)
METHODS = SELECTION_METHODS + PREFILL_METHODS
LEAST_RETENTION = 0.05
# Large enough for moving things to be told from the background, small enough for the first token not to wait.
WINDOW_TOKENS = 256


@dataclass(frozen=True, slots=True)
class ReductionPolicy:
    """Which share of the visual tokens of every video and image is kept, and by which method.

    retention: LEAST_RETENTION to 1; 1 keeps all, and then nothing else is done either.
    Raises RequestError for an unknown method or a retention out of range.
    """

    method: str = DEFAULT_METHOD
    retention: float = 1.0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise RequestError(
                f"received the reduction method {self.method[:50]!r}; allowed: {', '.join(METHODS)}; use one"
            )
        if not LEAST_RETENTION <= self.retention <= 1:
            raise RequestError(
                f"received a retention of {self.retention:g}; allowed: {LEAST_RETENTION} to 1; "
                "1 keeps all visual tokens"
            )

    @property
    def is_on(self) -> bool:
        return self.retention < 1

    @property
    def is_in_prefill(self) -> bool:
        """Whether the language model computes all visual tokens, and the cache keeps only some."""
        return self.is_on and self.method in PREFILL_METHODS

    @property
    def key(self) -> str:
        """Names all that decides which tokens are kept, for caches; empty when all are."""
        return f"{self.method}:{self.retention!r}:{WINDOW_TOKENS}" if self.is_on else ""


KEEP_ALL = ReductionPolicy()


@dataclass(frozen=True, slots=True)
class Window:
    """Units [start, stop) of an item: `num_tokens` visual tokens, of which `num_kept` are kept.

    is_in_prefill: the language model computes all of them and keeps some; else it is given those kept.
    num_extra: tokens at the end of the last window that show no part of a picture, and are kept in any case.
    """

    start: int
    stop: int
    num_tokens: int
    num_kept: int
    is_in_prefill: bool = False
    num_extra: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.start < self.stop and 1 <= self.num_kept <= self.num_tokens):
            raise ValueError(f"a window keeps 1 to all of the tokens of at least one unit, got {self}")


def plan_windows(
    runs: Sequence[tuple[int, int]], tokens_per_unit: int, retention: float, *, is_in_prefill: bool = False
) -> tuple[Window, ...]:
    """Windows over runs of units, in order, that keep retention * all tokens together, to the nearest whole.

    A share is carried from window to window, so that no rounding adds up. Every window keeps at least one.
    """
    windows: list[Window] = []
    num_kept = num_before = 0
    for start, stop in runs:
        num_tokens = (stop - start) * tokens_per_unit
        num_before += num_tokens
        here = min(max(1, round(retention * num_before) - num_kept), num_tokens)
        windows.append(Window(start, stop, num_tokens, here, is_in_prefill))
        num_kept += here
    return tuple(windows)
