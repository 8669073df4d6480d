"""Verdicts in numbers: one row for each method, share of tokens kept, and number of frames."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from epd.eval.items import FULL, EvalSetting
from epd.eval.statistics import Interval, mcnemar_p, wilson_interval
from epd.eval.verdicts import TTFTSample, Verdict, VerdictLog


@dataclass(frozen=True, slots=True)
class EvalRow:
    """How well one method does at one retention and number of frames.

    accuracy: of `num_questions`, with its 95 % interval. accuracy_of_full: of all tokens, on those of the
    questions that were also asked so; relative_accuracy: the share of that which is left.
    wins, losses: of these, right only here, right only with all tokens; p_value: of the two, exact McNemar.
    visual_tokens, kv_bytes: kept for a video, on average.
    ttft_s, prefill_s: medians over `num_cold` requests, None without any. kinds: accuracy by kind.
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
    wins: int
    losses: int
    p_value: float | None
    visual_tokens: int
    kv_bytes: int
    ttft_s: float | None
    prefill_s: float | None
    num_cold: int
    kinds: tuple[KindAccuracy, ...]

    def record(self) -> dict[str, Any]:
        """As `--json` prints it. Times in seconds, sizes in bytes."""
        fields = asdict(self)
        interval = fields.pop("interval")
        return {
            **fields,
            "accuracy_low": interval["low"],
            "accuracy_high": interval["high"],
            "kinds": {each.kind: each.accuracy for each in self.kinds},
        }


@dataclass(frozen=True, slots=True)
class KindAccuracy:
    """Accuracy on questions of one kind."""

    kind: str
    num_questions: int
    accuracy: float


@dataclass(frozen=True, slots=True)
class Asked:
    """What rows are wanted: every method at every retention and number of frames."""

    methods: tuple[str, ...]
    retentions: tuple[float, ...]
    num_frames: tuple[int, ...]

    @classmethod
    def of(cls, log: VerdictLog) -> Asked:
        """All that a log holds; where it holds only all tokens, that counts as a method."""
        settings = dict.fromkeys(verdict.setting for verdict in log.verdicts)
        methods = dict.fromkeys(setting.method for setting in settings if setting != FULL)
        retentions = sorted({setting.retention for setting in settings}, reverse=True)
        frames = sorted({verdict.num_frames for verdict in log.verdicts})
        return cls(tuple(methods) or (FULL.method,), tuple(retentions), tuple(frames))

    @property
    def settings(self) -> tuple[EvalSetting, ...]:
        """What has to be measured: all tokens, always, and each method at less."""
        pairs = (setting_of(method, kept) for method in self.methods for kept in self.retentions)
        return tuple(dict.fromkeys([FULL, *pairs]))


def setting_of(method: str, retention: float) -> EvalSetting:
    """FULL for all tokens, whatever the method."""
    return FULL if retention == 1.0 else EvalSetting(method, retention)


def eval_rows(log: VerdictLog, asked: Asked) -> list[EvalRow]:
    """Rows by frames, then method, then retention, as asked for; what has no verdicts has no row.

    With all tokens a method changes nothing: its row at retention 1.0 is that of all tokens.
    """
    verdicts = _by_setting(log.verdicts)
    samples = _by_setting(log.samples)
    rows = []
    for frames in asked.num_frames:
        full = verdicts.get((FULL, frames), [])
        for method in asked.methods:
            for retention in asked.retentions:
                key = (setting_of(method, retention), frames)
                if key in verdicts:
                    rows.append(_row(method, key, verdicts[key], full, samples.get(key, [])))
    return rows


def table_rows(log: VerdictLog, asked: Asked) -> list[EvalRow]:
    """Rows for people: at each number of frames all tokens once, then the methods at less."""
    less = tuple(kept for kept in asked.retentions if kept != 1.0)
    return [
        row
        for frames in asked.num_frames
        for part in (Asked((FULL.method,), (1.0,), (frames,)), Asked(asked.methods, less, (frames,)))
        for row in eval_rows(log, part)
    ]


def _by_setting(
    records: Iterable[Verdict] | Iterable[TTFTSample],
) -> dict[tuple[EvalSetting, int], list[Any]]:
    groups: dict[tuple[EvalSetting, int], list[Any]] = {}
    for each in records:
        groups.setdefault((each.setting, each.num_frames), []).append(each)
    return groups


def _row(
    method: str,
    key: tuple[EvalSetting, int],
    verdicts: Sequence[Verdict],
    full: Sequence[Verdict],
    samples: Sequence[TTFTSample],
) -> EvalRow:
    is_right_in_full = {verdict.item_id: verdict.is_right for verdict in full}
    pairs = [
        (each.is_right, is_right_in_full[each.item_id])
        for each in verdicts
        if each.item_id in is_right_in_full
    ]
    wins, losses = pairs.count((True, False)), pairs.count((False, True))
    num_full = sum(of_full for _, of_full in pairs)
    num_right = sum(verdict.is_right for verdict in verdicts)
    videos = {verdict.video: verdict for verdict in verdicts}.values()
    return EvalRow(
        method=method,
        retention=key[0].retention,
        num_frames=key[1],
        num_questions=len(verdicts),
        num_videos=len(videos),
        accuracy=num_right / len(verdicts),
        interval=wilson_interval(num_right, len(verdicts)),
        accuracy_of_full=num_full / len(pairs) if pairs else None,
        relative_accuracy=1 + (wins - losses) / num_full if num_full else None,
        wins=wins,
        losses=losses,
        p_value=mcnemar_p(wins, losses) if pairs else None,
        visual_tokens=round(fmean(verdict.visual_tokens for verdict in videos)),
        kv_bytes=round(fmean(verdict.kv_bytes for verdict in videos)),
        ttft_s=median(sample.ttft_s for sample in samples) if samples else None,
        prefill_s=median(sample.prefill_s for sample in samples) if samples else None,
        num_cold=len(samples),
        kinds=_kinds(verdicts),
    )


def _kinds(verdicts: Sequence[Verdict]) -> tuple[KindAccuracy, ...]:
    kinds: dict[str, list[bool]] = {}
    for verdict in verdicts:
        if verdict.kind:
            kinds.setdefault(verdict.kind, []).append(verdict.is_right)
    return tuple(KindAccuracy(kind, len(each), fmean(each)) for kind, each in sorted(kinds.items()))
