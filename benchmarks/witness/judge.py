"""Judges frames by three times that must agree: what was asked for, what the plan says, what is read.

asked for     the middle of a frame, as the family's rule chooses it from what is really shown
planned       the same, from what the file seemed to be; the prompt says when this frame begins
read          when the frame that was handed over begins: it must be the one on screen when planned
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.witness.clips import Clip
from benchmarks.witness.handed import Handed
from epd.encoders import MediaPlan

# Containers round times: to a millisecond in Matroska and FLV. So near its edges either frame is right.
_ROUNDING_S = 0.0011
_STAMP_ROUNDING_S = {"qwen3_vl": 0.05, "smolvlm": 0.5}
_MAX_REASONS = 3


@dataclass(slots=True)
class Verdict:
    """Counts the frames of some clips. reasons: of the first wrong ones, for people."""

    num_read: int = 0
    num_wrong: int = 0
    num_unreadable: int = 0
    reasons: list[str] = field(default_factory=list)

    def add(self, other: Verdict) -> None:
        self.num_read += other.num_read
        self.num_wrong += other.num_wrong
        self.num_unreadable += other.num_unreadable
        self.reasons += other.reasons[:_MAX_REASONS]


def refused(wanted: MediaPlan, error: Exception) -> Verdict:
    """Judges a video that was not read at all: every frame is wrong."""
    return Verdict(0, wanted.num_frames, 0, [f"refused: {error}"])


def judged(
    clip: Clip, wanted: MediaPlan, handed: Handed, read_ms: Sequence[int | None], family: str
) -> Verdict:
    """Judges the frames that a model got of a clip.

    wanted: planned from what is really shown.
    read_ms: from each frame, None where nothing can be read.
    """
    wrong = dict(_wrong_frames(clip, wanted, handed, read_ms, family))
    missing = abs(wanted.num_frames - len(read_ms))
    reasons = [f"{handed.plan.num_frames} frames instead of {wanted.num_frames}"] if missing else []
    if handed.num_substituted:
        reasons.append(f"{handed.num_substituted} frames show a neighbour")
    num_unreadable = sum(time_ms is None for time_ms in read_ms)
    num_wrong = max(len(wrong), missing, handed.num_substituted)
    return Verdict(len(read_ms) - num_unreadable, num_wrong, num_unreadable, reasons + list(wrong.values()))


def _wrong_frames(
    clip: Clip, wanted: MediaPlan, handed: Handed, read_ms: Sequence[int | None], family: str
) -> Iterator[tuple[int, str]]:
    """Yields places of wrong frames, each once, with what is wrong."""
    plan = handed.plan
    half_s = float(max(clip.gaps_s)) / 2
    for place, (planned_s, asked_s, time_ms) in enumerate(
        zip(plan.times_s, wanted.times_s, read_ms, strict=False)
    ):
        if time_ms is None:
            continue
        if time_ms not in _on_screen_ms(clip, planned_s):
            expected = clip.shown_ms[clip.on_screen(planned_s)] / 1000
            yield place, f"frame {place}: {time_ms / 1000:.3f} s is read, {expected:.3f} s is on screen"
        elif abs(planned_s - asked_s) > half_s:
            yield place, f"frame {place}: taken at {planned_s:.3f} s, asked for at {asked_s:.3f} s"
        elif not clip.is_variable and abs(_said_s(plan, place) - time_ms / 1000) > half_s:
            yield (
                place,
                f"frame {place}: {time_ms / 1000:.3f} s is read, the plan says {_said_s(plan, place):.3f} s",
            )
        elif handed.stamps_s and not _fits_stamp(
            clip, handed, read_ms, place, half_s + _STAMP_ROUNDING_S[family]
        ):
            stamp_s = handed.stamps_s[place // plan.frames_per_unit]
            yield place, f"frame {place}: {time_ms / 1000:.3f} s is read, the prompt says {stamp_s:.1f} s"


def _on_screen_ms(clip: Clip, time_s: float) -> set[int]:
    """Returns what the frame on screen at a time has drawn into it; two just where one follows the other."""
    return {
        clip.shown_ms[clip.on_screen(time_s + rounding_s)] for rounding_s in (-_ROUNDING_S, 0, _ROUNDING_S)
    }


def _said_s(plan: MediaPlan, place: int) -> float:
    return plan.frame_indices[place] / plan.source_fps


def _fits_stamp(
    clip: Clip, handed: Handed, read_ms: Sequence[int | None], place: int, tolerance_s: float
) -> bool:
    """Returns whether the stamp of a frame's unit is the middle of its first and its last frame."""
    unit = handed.plan.frames_per_unit
    first = place // unit * unit
    times = [time_ms for time_ms in read_ms[first : first + unit] if time_ms is not None]
    if clip.is_variable:
        tolerance_s *= 2
    return abs(handed.stamps_s[place // unit] - (times[0] + times[-1]) / 2000) <= tolerance_s
