"""Sums up a run."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from epd.batch.progress import Done
from epd.batch.result_files import Reason, Tally
from epd.batch.tasks import BackendCounts
from epd.console import counted

_NUM_REASONS = 3
_MAX_EXAMPLE = 200


@dataclass(frozen=True, slots=True)
class Hardware:
    """Says what is known of the hardware of a run. None where it is not.

    hourly_price: of all of it, in any currency.
    num_devices: that it has.
    engine_tokens_per_s: output tokens a second of the engine alone, on requests of the same shape.
    """

    hourly_price: float | None = None
    num_devices: int | None = None
    engine_tokens_per_s: float | None = None

    def price_of(self, seconds: float) -> float | None:
        return None if self.hourly_price is None else self.hourly_price * seconds / 3600

    def efficiency(self, tokens_per_s: float) -> float | None:
        """Returns a rate over that of the engine alone; None where that is not known, or there is none."""
        alone = self.engine_tokens_per_s
        return tokens_per_s / alone if alone and tokens_per_s else None


@dataclass(frozen=True, slots=True)
class Summary:
    """Summarises a run.

    num_lines: of the input.
    num_done_before: by earlier runs.
    tally: of the contents of the files in the end.
    num_groups: groups of lines with the same media before their questions, of this run.
    wall_s: of this run, from when the model was loaded.
    utilisation: lines at work in each stage, the mean from the first answer on.
    peak_bytes: of this process's memory.
    done: by this run.
    """

    num_lines: int
    num_done_before: int
    num_groups: int
    tally: Tally
    wall_s: float
    counts: BackendCounts = field(default_factory=BackendCounts)
    utilisation: Mapping[str, float] = field(default_factory=dict)
    peak_bytes: int = 0
    done: Done = field(default_factory=Done)
    hardware: Hardware = field(default_factory=Hardware)

    @property
    def num_now(self) -> int:
        """Counts the lines answered or explained by this run."""
        return self.tally.num_answered + self.tally.num_failed - self.num_done_before

    @property
    def lines_per_s(self) -> float:
        return self.num_now / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def answer_tokens_per_s(self) -> float:
        return self.done.answer_tokens / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def efficiency(self) -> float | None:
        return self.hardware.efficiency(self.answer_tokens_per_s)

    @property
    def video_hours_per_hour(self) -> float | None:
        """Returns the hours of video in an hour of one device, or of the run where no number is known.

        None where no video was looked at.
        """
        if not self.done.video_s or self.wall_s <= 0:
            return None
        return self.done.video_s / self.wall_s / (self.hardware.num_devices or 1)

    @property
    def price_per_1000(self) -> float | None:
        """Returns what 1,000 lines of this run have cost, None without a price or a line."""
        price = self.hardware.price_of(self.wall_s)
        return None if price is None or not self.num_now else price / self.num_now * 1000

    @property
    def accuracy(self) -> float | None:
        """Returns the share of right answers, where lines include the right one."""
        return self.tally.num_right / self.tally.num_checked if self.tally.num_checked else None

    @property
    def main_reasons(self) -> list[tuple[str, Reason]]:
        """Returns the reasons that most lines failed for, the most frequent first."""
        return sorted(self.tally.reasons.items(), key=lambda each: -each[1].num_lines)[:_NUM_REASONS]

    def failure_lines(self, errors: Path | str) -> list[str]:
        """Returns what failed and why, for people; nothing if no line failed. errors: where they are."""
        if not self.tally.num_failed:
            return []
        reasons = [
            f"  {reason.num_lines} {kind}, such as: {reason.example[:_MAX_EXAMPLE]}"
            for kind, reason in self.main_reasons
        ]
        first = f"{counted(self.tally.num_failed, 'line')} failed, see '{errors}'; --retry-failed asks again"
        return [first, *reasons]

    def record(self) -> dict[str, Any]:
        """Returns the summary for `--json`."""
        return {
            "num_lines": self.num_lines,
            "num_done_before": self.num_done_before,
            **asdict(self.tally),
            "accuracy": self.accuracy,
            "num_groups": self.num_groups,
            **asdict(self.counts),
            "wall_s": round(self.wall_s, 3),
            "lines_per_s": round(self.lines_per_s, 3),
            "answer_tokens": self.done.answer_tokens,
            "answer_tokens_per_s": round(self.answer_tokens_per_s, 3),
            "efficiency": self.efficiency,
            "video_hours": round(self.done.video_s / 3600, 4),
            "video_hours_per_hour": self.video_hours_per_hour,
            "num_devices": self.hardware.num_devices,
            "price_per_1000": self.price_per_1000,
            "utilisation": {name: round(share, 3) for name, share in self.utilisation.items()},
            "peak_bytes": self.peak_bytes,
        }

    def lines(self) -> list[str]:
        """Returns the summary for people."""
        tally, counts = self.tally, self.counts
        before = f", {self.num_done_before} of them before" if self.num_done_before else ""
        lines = [
            f"{tally.num_answered} of {counted(self.num_lines, 'line')} answered, {tally.num_failed} failed"
            + before,
            f"{counted(self.num_now, 'line')} about {_media(self.num_groups)} in {self.wall_s:.1f} s, "
            f"{self.lines_per_s:.2f} a second",
        ]
        lines += self._work_lines()
        if self.price_per_1000 is not None:
            price = self.hardware.hourly_price
            lines.append(f"1,000 lines cost {self.price_per_1000:.4g} at {price:g} an hour")
        if self.accuracy is not None:
            lines.append(
                f"{tally.num_right} of {counted(tally.num_checked, 'answer')} right ({self.accuracy:.1%})"
            )
        if counts.num_encoded:
            lines.append(
                f"media were encoded for {counted(counts.num_encoded, 'line')}, the others found them encoded"
            )
        if counts.num_units_skipped:
            lines.append(
                f"units of videos that did not change and were not encoded: {counts.num_units_skipped}"
            )
        if self.utilisation:
            at_work = ", ".join(f"{name} {number:.2f}" for name, number in self.utilisation.items())
            lines.append(f"lines at work since the first answer: {at_work}")
        return lines

    def _work_lines(self) -> list[str]:
        """Returns tokens and hours of video for people, where there are any."""
        lines, done = [], self.done
        if done.answer_tokens:
            share = "" if self.efficiency is None else f", {self.efficiency:.0%} of the engine alone"
            lines.append(
                f"{counted(done.answer_tokens, 'token')} of answers, {self.answer_tokens_per_s:.1f} a second"
                + share
            )
        if self.video_hours_per_hour is not None:
            which = "of each device" if self.hardware.num_devices else "of the run"
            rate = f"{self.video_hours_per_hour:.4g} in an hour {which}"
            lines.append(f"{done.video_s / 3600:.2f} hours of video, {rate}")
        return lines


def _media(number: int) -> str:
    """Returns how many sets of media lines are about, or the one."""
    return "one medium" if number == 1 else f"{number} media"


def peak_bytes() -> int:
    """Returns the most memory this process has held."""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024
