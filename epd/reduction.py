"""Plans how many visual tokens are kept, before a frame is decoded; selection decides later which ones.

    units      | 0  1  2  3 | 4  5  6  7 | 8  9 |       whole units of a video, in order
    windows    [            )[           )[     )       what is chosen among at one time
    readings   [                         )[     )       what a method remembers while it chooses
    kept       [ 15         )[ 15        )[ 8   )       tokens, fixed by the retention alone

The tokens of a window are chosen from the window and those of its reading before it, so that a video can be
reduced while it is still being decoded, by several encoders at once, and blocks for keys and values can be
reserved before.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from epd.errors import RequestError

DEFAULT_METHOD = "balanced"
# Chosen before the language model sees any: encoders/reduction/selection.py.
SELECTION_METHODS = ("balanced", "evs", "random", "uniform")
# Chosen by the language model, of what it has computed: `stages/reduction/`.
PREFILL_METHODS = ("quickprefill", "fastkv")
# Those of them where the later layers compute only what the earlier ones have chosen.
PROPAGATING_METHODS = ("fastkv",)
# Chosen by each question for itself, from a cache that serves all: stages/reduction/question_views.py.
QUESTION_METHODS = ("funnel", "mustdrop")
# Those that merge inside of the vision tower too.
TOWER_METHODS = ("mustdrop",)
METHODS = SELECTION_METHODS + PREFILL_METHODS + QUESTION_METHODS
# What they keep of a window before the language model depends on that window alone.
WINDOW_METHODS = ("uniform", "mustdrop")
# Of how many windows the others remember what they have kept, before they begin anew: of one reading.
READING_WINDOWS = 4
# MustDrop: what is left after neighbours are merged, and after how many of 32 layers text drops more.
_MERGED_SHARE = 0.76
_MERGED_PER_READ = 3
_DROPPING_LAYERS = tuple(layer / 32 for layer in (2, 6, 10, 14))
LEAST_RETENTION = 0.05
# Blocks of 3 x 3 leave a ninth, and the key set stays.
LEAST_TOWER_SHARE = 0.2
# "An early layer" of MustDrop.
DEFAULT_MERGE_DEPTH = 0.25
# Large enough to separate moving things from the background, small enough not to delay the first token.
WINDOW_TOKENS = 256


@dataclass(frozen=True, slots=True)
class ReductionPolicy:
    """Sets the share of the visual tokens of every video and image that is kept, and the method.

    retention: LEAST_RETENTION to 1; 1 keeps all, and then nothing is reduced.
    compute_share: of PROPAGATING_METHODS, the share that the later layers compute, from which each chooses
        what it keeps: retention to 1; None for the retention.
    Raises RequestError for an unknown method or a share out of range.
    """

    method: str = DEFAULT_METHOD
    retention: float = 1.0
    compute_share: float | None = None

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
        if self.compute_share is not None:
            self._check_compute_share(self.compute_share)

    def _check_compute_share(self, share: float) -> None:
        if self.method not in PROPAGATING_METHODS:
            raise RequestError(
                f"received a compute_share of {share:g} with the reduction method {self.method}; allowed: "
                f"with {', '.join(PROPAGATING_METHODS)}; leave it out"
            )
        if not self.retention <= share <= 1:
            raise RequestError(
                f"received a compute_share of {share:g}; allowed: {self.retention:g}, the retention, to 1; "
                "layers keep some of what they compute, so raise it or lower the retention"
            )

    @property
    def is_on(self) -> bool:
        return self.retention < 1

    @property
    def is_in_prefill(self) -> bool:
        """Returns whether the language model is given all visual tokens, and the cache keeps only some."""
        return self.is_on and self.method in PREFILL_METHODS

    def with_retention(self, retention: float) -> ReductionPolicy:
        """Returns the policy with another retention; later layers compute at least as much."""
        share = self.compute_share
        return replace(self, retention=retention, compute_share=share and max(share, retention))

    def clamped(self, level: float, floor: float) -> ReductionPolicy:
        """Returns the policy with a retention of at most the level, but at least the floor."""
        return self.with_retention(max(floor, min(self.retention, level)))

    @property
    def later_share(self) -> float | None:
        """Returns the share of the visual tokens that later layers compute; None where they compute all."""
        if not self.is_on or self.method not in PROPAGATING_METHODS:
            return None
        return self.retention if self.compute_share is None else self.compute_share

    @property
    def is_by_question(self) -> bool:
        """Returns whether every question reads a different choice of the cached tokens."""
        return self.is_on and self.method in QUESTION_METHODS

    @property
    def reading_windows(self) -> int:
        """Returns of how many windows a method remembers what it has kept, before it begins anew."""
        return 1 if self.method in WINDOW_METHODS else READING_WINDOWS

    @property
    def cached_retention(self) -> float:
        """Returns the share of visual tokens in the cache: those kept or those that questions choose from."""
        if not self.is_by_question:
            return self.retention
        return max(self.retention, min(_MERGED_SHARE, _MERGED_PER_READ * self.retention))

    @property
    def tower_share(self) -> float | None:
        """Returns the share of tokens that later layers of the tower are asked to compute; None for all."""
        is_merging = self.is_on and self.method in TOWER_METHODS
        return max(_MERGED_SHARE, self.retention) if is_merging else None

    @property
    def surviving_share(self) -> float:
        """Returns the share of the cached visual tokens that is left once a question is computed."""
        return self.retention / self.cached_retention

    @property
    def key(self) -> str:
        """Names all inputs that decide which tokens are kept, for caches; empty when all are."""
        if not self.is_on:
            return ""
        computed = "" if self.later_share in (None, self.retention) else f":{self.later_share!r}"
        return f"{self.method}:{self.retention!r}:{WINDOW_TOKENS}x{self.reading_windows}{computed}"


KEEP_ALL = ReductionPolicy()


@dataclass(frozen=True, slots=True)
class VisualBudget:
    """Sets what the visual tokens of a prompt are held to, beside the model's context.

    max_tokens: visual tokens that are kept, None for what the context has room for.
    keeps_retention: whether the share of them was asked for; then only frames are chosen.
    retention_min: the least share that may be chosen.
    Raises RequestError for a budget below 1.
    """

    max_tokens: int | None = None
    keeps_retention: bool = False
    retention_min: float = 0.0

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise RequestError(
                f"received max_visual_tokens={self.max_tokens}; allowed: at least 1; raise it or leave it out"
            )


NO_BUDGET = VisualBudget()


@dataclass(frozen=True, slots=True)
class Window:
    """Covers units [start, stop) of an item: `num_tokens` visual tokens, of which `num_kept` are kept.

    is_in_prefill: the language model computes all of them and keeps some; else it receives only those kept.
    num_later: those that its later layers compute; None for all that it receives.
    num_extra: tokens at the end of the last window that show no part of a picture, and are always kept.
    begins_reading: whether the method remembers nothing of the windows before it.
    """

    start: int
    stop: int
    num_tokens: int
    num_kept: int
    is_in_prefill: bool = False
    num_extra: int = 0
    num_later: int | None = None
    begins_reading: bool = False

    def __post_init__(self) -> None:
        if not (0 <= self.start < self.stop and 1 <= self.num_kept <= self.num_tokens):
            raise ValueError(f"a window keeps 1 to all of the tokens of at least one unit, got {self}")
        if self.num_later is not None and not self.num_kept <= self.num_later <= self.num_tokens:
            raise ValueError(
                f"later layers compute all that is kept of a window, and none beside it, got {self}"
            )


def plan_windows(
    runs: Sequence[tuple[int, int]],
    tokens_per_unit: int,
    retention: float,
    *,
    is_in_prefill: bool = False,
    later_share: float | None = None,
    reading_starts: Collection[int] = (),
) -> tuple[Window, ...]:
    """Returns windows over runs of units, in order; together they keep retention * all tokens, rounded.

    later_share: likewise of what later layers compute, at least what is kept of each; None for all.
    reading_starts: first units of readings, beside that of the first run.
    A share is carried from window to window, so that no rounding adds up. Every window keeps at least one.
    """
    windows: list[Window] = []
    num_kept = num_later = num_before = 0
    for start, stop in runs:
        num_tokens = (stop - start) * tokens_per_unit
        num_before += num_tokens
        here = min(max(1, round(retention * num_before) - num_kept), num_tokens)
        num_kept += here
        later = None
        if later_share is not None:
            later = min(max(here, round(later_share * num_before) - num_later), num_tokens)
            num_later += later
        begins = not windows or start in reading_starts
        windows.append(
            Window(start, stop, num_tokens, here, is_in_prefill, num_later=later, begins_reading=begins)
        )
    return tuple(windows)


def num_survivors(num_cached: int, num_wanted: float) -> int:
    """Returns how many of the cached visual tokens a question keeps: those wanted, at least one."""
    return min(num_cached, max(1, round(num_wanted)))


def layer_counts(num_cached: int, num_wanted: float, num_layers: int) -> tuple[int, ...]:
    """Returns the number of cached visual tokens that each layer of a question reads.

    Fewer from prune to prune, by one ratio, at the depths of MustDrop; after the last prune `num_survivors`.
    A model of one layer reads all.
    """
    prunes = sorted({max(1, round(share * num_layers)) for share in _DROPPING_LAYERS if num_layers > 1})
    prunes_before = [sum(prune <= layer for prune in prunes) for layer in range(num_layers)]
    if not prunes:
        return (num_cached,) * num_layers
    num_last = num_survivors(num_cached, num_wanted)
    shares = [(num_last / num_cached) ** (before / len(prunes)) for before in prunes_before]
    return tuple(max(num_last, round(num_cached * share)) for share in shares)


@dataclass(frozen=True, slots=True)
class TowerMerge:
    """Sets how many tokens of each unit the later layers of a vision tower compute.

    share: of a unit's tokens, LEAST_TOWER_SHARE to 1; 1 merges none.
    layer: layers that compute all tokens, before neighbours are merged; None for DEFAULT_MERGE_DEPTH of them.
    Raises RequestError for a value out of range.
    """

    share: float
    layer: int | None = None

    def __post_init__(self) -> None:
        if not LEAST_TOWER_SHARE <= self.share <= 1:
            raise RequestError(
                f"received a tower_share of {self.share:g}; allowed: {LEAST_TOWER_SHARE} to 1; 1 merges none"
            )
        if self.layer is not None and self.layer < 1:
            raise RequestError(
                f"received a tower_merge_layer of {self.layer}; allowed: at least 1; raise it or leave it out"
            )

    def layer_of(self, num_layers: int) -> int:
        """Returns how many of a tower's layers compute all tokens. Raises RequestError if all would."""
        layer = self.layer or max(1, round(DEFAULT_MERGE_DEPTH * num_layers))
        if layer >= num_layers:
            raise RequestError(
                f"received a tower_merge_layer of {layer}; allowed: 1 to {num_layers - 1}, below the layers "
                "of this model's tower; lower it"
            )
        return layer


def tower_merge(share: float | None, layer: int | None) -> TowerMerge | None:
    """Returns what two options ask for; None to merge as requests ask. Raises RequestError for bad values."""
    if share is None and layer is not None:
        raise RequestError(
            f"received a tower_merge_layer of {layer} alone; allowed: with tower_share; give both"
        )
    return None if share is None else TowerMerge(share, layer)


def check_tolerance(tolerance: float | None) -> None:
    """Raises RequestError for an invalid tolerance of skipping static frames."""
    if tolerance is not None and not 0 <= tolerance < float("inf"):
        raise RequestError(
            f"received a skip_static of {tolerance:g}; allowed: 0 or more, in preprocessed values, where one "
            "grey level is about 0.015; give 0 to skip only what is exactly equal"
        )


@dataclass(frozen=True, slots=True)
class KeptCells:
    """Says which tokens of a medium's units are kept.

    units: [start, stop).
    frames_per_unit: the last unit may have fewer.
    grid: tokens of a unit, (height, width).
    bits: one for each token, by unit, row and column, from the high end of each byte; 1 is kept.
    """

    units: tuple[int, int]
    frames_per_unit: int
    grid: tuple[int, int]
    bits: bytes
