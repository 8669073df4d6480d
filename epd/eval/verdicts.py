"""Keeps the verdicts of an evaluation, line by line in a file, so that a stopped one can continue.

    {"record": "run", "data": "demo", "seed": 0, "model": "shapes-vl", ...}      first, once
    {"record": "verdict", "method": "full", "retention": 1.0, "item_id": ...}    a question and a setting
    {"record": "ttft", "method": "full", "retention": 1.0, "ttft_s": ...}        a cold request

Lines are appended whole; half a line at the end, of an evaluation that was killed, is cut off.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from epd.errors import RequestError, check_file
from epd.eval.items import EvalCase, EvalSetting, FactCounts

DEMO = "demo"


@dataclass(frozen=True, slots=True)
class RunInfo:
    """Identifies the run of all verdicts in a file.

    data: a question file's path, or DEMO.
    max_tokens: of an answer.
    seed, duration_s, num_per_kind: of a demo, where duration_s is 0 for one second a frame.
    placement: the type and device of the model.
    pixels: what images and frames were held to, where it was said.
    """

    data: str
    model: str
    max_tokens: int
    seed: int = 0
    duration_s: float = 0.0
    num_per_kind: int = 1
    placement: str = "float32 on cpu"
    pixels: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Records one question, answered with visual tokens reduced by one setting.

    num_frames: requested.
    visual_tokens: kept.
    kv_bytes: of the prefilled media.
    duration_group: of the video, "" if the data set has none.
    facts_found, facts_missed, facts_invented: of a description; 0 of other answers.
    """

    method: str
    retention: float
    num_frames: int
    video: str
    item_id: str
    kind: str
    truth: str
    answer: str
    is_right: bool
    visual_tokens: int
    kv_bytes: int
    duration_group: str = ""
    facts_found: int = 0
    facts_missed: int = 0
    facts_invented: int = 0

    @property
    def setting(self) -> EvalSetting:
        return EvalSetting(self.method, self.retention)

    @property
    def facts(self) -> FactCounts:
        return FactCounts(self.facts_found, self.facts_missed, self.facts_invented)


@dataclass(frozen=True, slots=True)
class TTFTSample:
    """Times one cold request: from the file to the first token, with nothing known of the video before.

    ttft_s: in all.
    prefill_s: its share in the language model.
    """

    method: str
    retention: float
    num_frames: int
    video: str
    ttft_s: float
    prefill_s: float

    @property
    def setting(self) -> EvalSetting:
        return EvalSetting(self.method, self.retention)


Record: TypeAlias = RunInfo | Verdict | TTFTSample
_KINDS: dict[str, type[RunInfo] | type[Verdict] | type[TTFTSample]] = {
    "run": RunInfo,
    "verdict": Verdict,
    "ttft": TTFTSample,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}
_Key: TypeAlias = tuple[EvalSetting, int, str]


class VerdictLog:
    """Keeps all records of an evaluation, in memory and, with a path, in a file. The last verdict counts."""

    def __init__(self, run: RunInfo, path: Path | None = None) -> None:
        """Continues the file at `path` if it exists.

        Raises RequestError for a file of another run, or of another kind.
        """
        self.run = run
        self._path = path
        self._verdicts: dict[_Key, Verdict] = {}
        self._samples: dict[_Key, TTFTSample] = {}
        if path is None:
            return
        check_file(path)
        if path.exists() and path.stat().st_size:
            self._go_on(path)
        else:
            self.append([run])

    @classmethod
    def read(cls, path: Path) -> VerdictLog:
        """Returns the records of a file without changing it. Raises RequestError for other files."""
        records = _read_records(path)
        if not records or not isinstance(records[0], RunInfo):
            raise RequestError(f"{str(path)!r} does not start with a run; give a file of epd eval --out")
        log = cls(records[0])
        log._take(records)
        return log

    @property
    def verdicts(self) -> list[Verdict]:
        return list(self._verdicts.values())

    @property
    def samples(self) -> list[TTFTSample]:
        return list(self._samples.values())

    def has_verdicts(self, case: EvalCase, setting: EvalSetting) -> bool:
        """Returns whether every question about the case's video has been judged with this setting."""
        return all((setting, case.num_frames, item.item_id) in self._verdicts for item in case.video.items)

    def has_sample(self, case: EvalCase, setting: EvalSetting) -> bool:
        """Returns whether a cold request about the case's video has been timed with this setting."""
        return (setting, case.num_frames, case.video.name) in self._samples

    def append(self, records: Sequence[Record]) -> None:
        """Adds records, and writes them out at once."""
        self._take(records)
        if self._path is not None:
            lines = (json.dumps({"record": _NAMES[type(each)], **asdict(each)}) for each in records)
            with self._path.open("a", encoding="utf-8") as file:
                file.write("".join(f"{line}\n" for line in lines))

    def _take(self, records: Sequence[Record]) -> None:
        for each in records:
            if isinstance(each, Verdict):
                self._verdicts[each.setting, each.num_frames, each.item_id] = each
            elif isinstance(each, TTFTSample):
                self._samples[each.setting, each.num_frames, each.video] = each

    def _go_on(self, path: Path) -> None:
        known = VerdictLog.read(path)
        if known.run != self.run:
            raise RequestError(
                f"{str(path)!r} holds verdicts of {known.run}, this is {self.run}; write to another file"
            )
        self._verdicts, self._samples = known._verdicts, known._samples
        _cut_half_line(path)


def _cut_half_line(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(file.read().rfind(b"\n") + 1)


def _read_records(path: Path) -> list[Record]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(
            f"the verdicts {str(path)!r} cannot be read: {error}; give a file of epd eval --out"
        ) from None
    *whole, _half = text.split("\n")
    return [_record(path, number, line) for number, line in enumerate(whole, start=1)]


def _record(path: Path, number: int, line: str) -> Record:
    try:
        fields: dict[str, Any] = json.loads(line)
        return _KINDS[fields.pop("record")](**fields)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RequestError(
            f"line {number} of {str(path)!r} is not a record of an evaluation ({error}); "
            "give a file of epd eval --out, or delete the line"
        ) from None
