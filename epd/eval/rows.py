"""Turns verdicts into numbers and intervals: a row for each method, tokens kept, and number of frames."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from math import comb, sqrt
from statistics import fmean, median
from typing import Any

from epd.eval.items import DURATION_NAMES, FULL, EvalSetting, FactCounts
from epd.eval.verdicts import TTFTSample, Verdict, VerdictLog

# The normal distribution's 97.5 % quantile: intervals hold the truth 95 % of the time.
_Z95 = 1.959963984540054


@dataclass(frozen=True, slots=True)
class Interval:
    """Bounds a share by a 95 % confidence interval [low, high]."""

    low: float
    high: float


def wilson_interval(num_right: int, num_all: int) -> Interval:
    """Returns the interval of the share `num_right` of `num_all` (Wilson 1927). Raises ValueError for 0."""
    if not 0 <= num_right <= num_all or num_all < 1:
        raise ValueError(
            f"a share needs 0 <= right <= all and something at all, got {num_right} of {num_all}"
        )
    share, z2 = num_right / num_all, _Z95**2
    centre = (share + z2 / (2 * num_all)) / (1 + z2 / num_all)
    half = _Z95 * sqrt(share * (1 - share) / num_all + z2 / (4 * num_all**2)) / (1 + z2 / num_all)
    # Rounding must not push a bound past the share itself where the two are equal.
    return Interval(min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half)))


def mcnemar_p(wins: int, losses: int) -> float:
    """Returns the two-sided exact p-value of a paired comparison (McNemar 1947), 1.0 without differences.

    wins, losses: questions that only the one, or only the other of the two, answered right. If neither were
        better, each would fall to either side like a coin.
    """
    num_differing = wins + losses
    tail = sum(comb(num_differing, successes) for successes in range(min(wins, losses) + 1))
    return min(1.0, 2 * tail / (1 << num_differing))


@dataclass(frozen=True, slots=True)
class EvalRow:
    """Summarises one method at one retention and number of frames.

    accuracy: of `num_questions`, with its 95 % interval.
    accuracy_of_full: of all tokens, on those of the questions that were also asked so.
    relative_accuracy: the share of that which is left.
    wins, losses: right only here, right only with `against`, which is all tokens ("full") or a method at the
        same retention.
    p_value: of the two, exact McNemar, None without questions asked both ways.
    visual_tokens, kv_bytes: kept for a video, on average.
    ttft_s, prefill_s: medians over `num_cold` requests, None without any.
    kinds, duration_groups: accuracy of the questions of each, by name.
    """

    method: str
    retention: float
    num_frames: int
    num_questions: int
    num_videos: int
    accuracy: float
    interval: Interval
    accuracy_of_full: float | None
    relative_accuracy: float | None
    against: str
    wins: int
    losses: int
    p_value: float | None
    visual_tokens: int
    kv_bytes: int
    ttft_s: float | None
    prefill_s: float | None
    num_cold: int
    kinds: tuple[PartAccuracy, ...]
    duration_groups: tuple[PartAccuracy, ...]

    def record(self) -> dict[str, Any]:
        """Returns the row as `--json` prints it. Times in seconds, sizes in bytes."""
        fields = asdict(self)
        interval = fields.pop("interval")
        return {
            **fields,
            "accuracy_low": interval["low"],
            "accuracy_high": interval["high"],
            "kinds": {each.name: each.record() for each in self.kinds},
            "duration_groups": {each.name: each.record() for each in self.duration_groups},
        }


@dataclass(frozen=True, slots=True)
class PartAccuracy:
    """Measures accuracy, with its 95 % interval, on a part of the questions: of a kind, or a duration.

    facts_f1: of the facts that descriptions state; None where there are none.
    """

    name: str
    num_questions: int
    accuracy: float
    interval: Interval
    facts_f1: float | None

    @classmethod
    def of(cls, name: str, verdicts: Sequence[Verdict]) -> PartAccuracy:
        num_right = sum(verdict.is_right for verdict in verdicts)
        facts = sum((verdict.facts for verdict in verdicts), FactCounts())
        return cls(
            name,
            len(verdicts),
            num_right / len(verdicts),
            wilson_interval(num_right, len(verdicts)),
            None if facts == FactCounts() else facts.f1,
        )

    def record(self) -> dict[str, Any]:
        """Returns the part as `--json` prints it."""
        return {
            "num_questions": self.num_questions,
            "accuracy": self.accuracy,
            "accuracy_low": self.interval.low,
            "accuracy_high": self.interval.high,
            "facts_f1": self.facts_f1,
        }


@dataclass(frozen=True, slots=True)
class RowSelection:
    """Selects rows: every method at every retention and number of frames.

    against: baseline of each test, all tokens or another method at the same retention.
    """

    methods: tuple[str, ...]
    retentions: tuple[float, ...]
    num_frames: tuple[int, ...]
    against: str = FULL.method

    @classmethod
    def of(cls, log: VerdictLog, against: str = FULL.method) -> RowSelection:
        """Returns all that a log holds; where it holds only all tokens, that counts as a method."""
        settings = dict.fromkeys(verdict.setting for verdict in log.verdicts)
        methods = dict.fromkeys(setting.method for setting in settings if setting != FULL)
        retentions = sorted({setting.retention for setting in settings}, reverse=True)
        frames = sorted({verdict.num_frames for verdict in log.verdicts})
        return cls(tuple(methods) or (FULL.method,), tuple(retentions), tuple(frames), against)

    @property
    def settings(self) -> tuple[EvalSetting, ...]:
        """Returns the settings to measure: all tokens, always, and each method at less."""
        methods = dict.fromkeys([*self.methods, self.against])
        pairs = [setting_of(method, kept) for method in methods for kept in self.retentions]
        return tuple(dict.fromkeys([FULL, *pairs]))


def setting_of(method: str, retention: float) -> EvalSetting:
    """Returns a method's setting; FULL for all tokens, whatever the method."""
    return FULL if retention == 1.0 or method == FULL.method else EvalSetting(method, retention)


@dataclass(frozen=True, slots=True)
class Pairs:
    """Counts questions that were asked both ways.

    num_there: those that the other way got right.
    wins, losses: right only here, right only there.
    """

    num_questions: int
    num_there: int
    wins: int
    losses: int

    @classmethod
    def of(cls, here: Sequence[Verdict], there: Sequence[Verdict]) -> Pairs:
        is_right_there = {verdict.item_id: verdict.is_right for verdict in there}
        pairs = [
            (each.is_right, is_right_there[each.item_id]) for each in here if each.item_id in is_right_there
        ]
        wins, losses = pairs.count((True, False)), pairs.count((False, True))
        return cls(len(pairs), sum(right for _, right in pairs), wins, losses)

    @property
    def accuracy_there(self) -> float | None:
        return self.num_there / self.num_questions if self.num_questions else None

    @property
    def relative_accuracy(self) -> float | None:
        """Returns the accuracy here as a share of that there."""
        return 1 + (self.wins - self.losses) / self.num_there if self.num_there else None


def eval_rows(log: VerdictLog, asked: RowSelection) -> list[EvalRow]:
    """Returns rows by frames, then method, then retention, as selected; none without verdicts.

    With all tokens a method changes nothing: its row at retention 1.0 is that of all tokens.
    """
    verdicts, samples = by_setting(log.verdicts), by_setting(log.samples)
    rows = []
    for frames, method, retention in product(asked.num_frames, asked.methods, asked.retentions):
        here = verdicts.get((setting_of(method, retention), frames), [])
        full = verdicts.get((FULL, frames), [])
        there = verdicts.get((setting_of(asked.against, retention), frames), [])
        cold = samples.get((setting_of(method, retention), frames), [])
        if here:
            rows.append(_row(method, here, Pairs.of(here, full), asked.against, Pairs.of(here, there), cold))
    return rows


def table_rows(log: VerdictLog, asked: RowSelection) -> list[EvalRow]:
    """Returns rows for people: at each number of frames all tokens once, then the methods at less."""
    less = tuple(kept for kept in asked.retentions if kept != 1.0)
    return [
        row
        for frames in asked.num_frames
        for row in (
            *eval_rows(log, RowSelection((FULL.method,), (1.0,), (frames,))),
            *eval_rows(log, RowSelection(asked.methods, less, (frames,), asked.against)),
        )
    ]


def by_setting(
    records: Iterable[Verdict] | Iterable[TTFTSample],
) -> dict[tuple[EvalSetting, int], list[Any]]:
    """Groups records by setting and number of frames."""
    groups: dict[tuple[EvalSetting, int], list[Any]] = {}
    for each in records:
        groups.setdefault((each.setting, each.num_frames), []).append(each)
    return groups


def _row(
    method: str,
    verdicts: Sequence[Verdict],
    with_full: Pairs,
    against: str,
    with_other: Pairs,
    samples: Sequence[TTFTSample],
) -> EvalRow:
    """Computes a row. verdicts: at least one, all of one retention and number of frames."""
    num_right = sum(verdict.is_right for verdict in verdicts)
    videos = {verdict.video: verdict for verdict in verdicts}.values()
    return EvalRow(
        method=method,
        retention=verdicts[0].retention,
        num_frames=verdicts[0].num_frames,
        num_questions=len(verdicts),
        num_videos=len(videos),
        accuracy=num_right / len(verdicts),
        interval=wilson_interval(num_right, len(verdicts)),
        accuracy_of_full=with_full.accuracy_there,
        relative_accuracy=with_full.relative_accuracy,
        against=against,
        wins=with_other.wins,
        losses=with_other.losses,
        p_value=mcnemar_p(with_other.wins, with_other.losses) if with_other.num_questions else None,
        visual_tokens=round(fmean(verdict.visual_tokens for verdict in videos)),
        kv_bytes=round(fmean(verdict.kv_bytes for verdict in videos)),
        ttft_s=median(sample.ttft_s for sample in samples) if samples else None,
        prefill_s=median(sample.prefill_s for sample in samples) if samples else None,
        num_cold=len(samples),
        kinds=_parts(verdicts, lambda verdict: verdict.kind),
        duration_groups=_parts(verdicts, lambda verdict: verdict.duration_group),
    )


def _parts(verdicts: Sequence[Verdict], name_of: Callable[[Verdict], str]) -> tuple[PartAccuracy, ...]:
    parts: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        if name_of(verdict):
            parts.setdefault(name_of(verdict), []).append(verdict)
    return tuple(PartAccuracy.of(*part) for part in sorted(parts.items(), key=lambda part: _place(part[0])))


def _place(name: str) -> tuple[int, float, str]:
    """Sorts durations from short to long, whether named or in seconds, and other names by their letters."""
    if name in DURATION_NAMES:
        return 0, DURATION_NAMES.index(name), ""
    return (1, float(name), "") if name.isdecimal() else (2, 0.0, name)
