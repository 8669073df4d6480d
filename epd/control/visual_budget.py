"""Chooses how many frames of the videos of a prompt are taken, and how much of each is kept.

    room for     | what is chosen                             | measured (docs/reduction.md)
    all          | all wanted frames, all of their tokens     | as without a budget
    enough       | fewer frames, all of their tokens          | 32 of 128, 52 of 512: as good as all, thinner
    fewer        | all, at the thickest level that has room   | 128 at a tenth: 2.0 points above 14 whole ones
    less         | as many as have room at the thinnest level |

Arithmetic only. A wanted frame is one that the model's own rule, or the request, would take.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from epd.control.retention import LEVELS
from epd.errors import RequestBudgetError
from epd.reduction import VisualBudget

# Whole frames are enough if they are at least this many, and this share of those wanted.
ENOUGH_FRAMES = 32
ENOUGH_SHARE = 0.1
# Of all videos together, unless they have fewer.
LEAST_FRAMES = 4
# What text and answer take of a context is rounded up to this many parts of it, so that questions of
# different length about one video get the same frames, and share what is cached.
_CONTEXT_PARTS = 8


def allowed_levels(budget: VisualBudget, retention: float, *, can_thin: bool = True) -> tuple[float, ...]:
    """Returns the shares that may be kept, thickest first.

    retention: the share that is kept where there is room. can_thin: whether fewer can be.
    """
    if budget.keeps_retention or not can_thin:
        return (retention,)
    return (retention, *(each for each in LEVELS if budget.retention_min <= each < retention))


# Whether so many frames, of whose tokens this share is kept, have room. Fewer of either have room, too.
Fits = Callable[[int, float], bool]


@dataclass(frozen=True, slots=True)
class FrameChoice:
    """Holds the number of frames of all videos together, and the share of their tokens that is kept."""

    num_frames: int
    retention: float


def choose_frames(
    num_wanted: int, levels: tuple[float, ...], fits: Fits, *, may_choose: bool = True
) -> FrameChoice | None:
    """Returns what has room, by the table above; None if not even LEAST_FRAMES have at the thinnest level.

    levels: shares that may be kept, thickest first; the first is kept where there is room.
    may_choose: False for frames that were asked for, of which the thickest level with room is found.
    """
    if not may_choose:
        found = next((level for level in levels if fits(num_wanted, level)), None)
        return None if found is None else FrameChoice(num_wanted, found)
    whole = levels[0]
    num_whole = _most_frames(num_wanted, whole, fits)
    if num_whole >= min(num_wanted, max(ENOUGH_FRAMES, ENOUGH_SHARE * num_wanted)):
        return FrameChoice(num_whole, whole)
    for level in levels[1:]:
        if fits(num_wanted, level):
            return FrameChoice(num_wanted, level)
    num_thin = _most_frames(num_wanted, levels[-1], fits)
    return FrameChoice(num_thin, levels[-1]) if num_thin else None


def _most_frames(num_wanted: int, retention: float, fits: Fits) -> int:
    """Returns the most frames that have room, found by bisection; 0 if not even the least number has."""
    if fits(num_wanted, retention):
        return num_wanted
    low, high = min(LEAST_FRAMES, num_wanted), num_wanted
    if low == high or not fits(low, retention):
        return 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle, retention) else (low, middle)
    return low


def room_for_media(context_tokens: int, num_text_tokens: int) -> int:
    """Returns the tokens of a context that are left to media where not all of them have room.

    num_text_tokens: behind the media, with those expected of the answer.
    """
    part = max(1, context_tokens // _CONTEXT_PARTS)
    return context_tokens - -(-max(1, num_text_tokens) // part) * part


def share_frames(num_frames: int, wanted: tuple[int, ...]) -> tuple[int, ...]:
    """Returns how many frames each video gets, in proportion to those wanted of it, at least one."""
    total = max(1, sum(wanted))
    return tuple(max(1, num_frames * each // total) for each in wanted)


def no_room(num_tokens: int, max_tokens: int | None, context_tokens: int | None) -> RequestBudgetError:
    """Returns the error of media that have no room at any choice that is allowed.

    num_tokens: visual tokens at the least choice. max_tokens: those allowed, None for the context's room.
    """
    if max_tokens is not None and num_tokens > max_tokens:
        return RequestBudgetError(
            f"received a budget of {max_tokens:,} visual tokens for media that have {num_tokens:,} at least; "
            "allowed: as many as they have; raise max_visual_tokens, or lower num_frames, fps or retention"
        )
    return RequestBudgetError(
        f"received media of {num_tokens:,} visual tokens at least, beside the text; allowed: fewer than the "
        f"{context_tokens or 0:,} tokens of the model's context; shorten the text, or send fewer media"
    )
