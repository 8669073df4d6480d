"""Reads workloads by name or from a file: validated at the edge, frozen and resolved inside.

A file is YAML or JSON with the fields of WorkloadConfig; sizes are distributions such as 32, 16..64 or 1|4.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml  # type: ignore[import-untyped]  # its stubs are another package
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from epd.errors import RequestError
from epd.workload.arrivals import (
    ArrivalKind,
    ArrivalTimes,
    BurstyArrivals,
    ClosedArrivals,
    ConstantArrivals,
    RampArrivals,
    poisson_arrivals,
)
from epd.workload.distributions import SizeDistribution
from epd.workload.requests import Mix, Resolution, ShapeClass, Workload
from epd.workload.trace import open_trace, trace_arrivals, trace_shapes
from epd.workload.trace_media import ModelSight, TraceMedia

# A spread in its notation; files may give plain numbers.
Size = Annotated[str, BeforeValidator(str)]


class MixPart(BaseModel):
    """One kind of requests. Sizes of frames may be lists, from which one is drawn for every medium."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    weight: float = 1.0
    text_tokens: Size = "16"
    output_tokens: Size = "32"
    images: Size = "0"
    image_size: str | tuple[str, ...] = "224x224"
    videos: Size = "0"
    video_s: Size = "30"
    video_fps: int = 24
    video_size: str | tuple[str, ...] = "640x360"
    audios: Size = "0"
    audio_s: Size = "10"

    def resolve(self) -> ShapeClass:
        return ShapeClass(
            SizeDistribution.parse(self.text_tokens),
            SizeDistribution.parse(self.output_tokens),
            SizeDistribution.parse(self.images),
            _sizes(self.image_size),
            SizeDistribution.parse(self.videos),
            SizeDistribution.parse(self.video_s),
            self.video_fps,
            _sizes(self.video_size),
            self.weight,
            SizeDistribution.parse(self.audios),
            SizeDistribution.parse(self.audio_s),
        )


def _sizes(texts: str | tuple[str, ...]) -> tuple[Resolution, ...]:
    return tuple(Resolution.parse(text) for text in ([texts] if isinstance(texts, str) else texts))


class WorkloadConfig(BaseModel):
    """A workload as it is written down.

    rate: requests per second; of a trace, its mean rate after scaling.
    burstiness: of bursty arrivals, see BurstyArrivals.
    ramp_from: the rate at the start of a ramp that reaches `rate` after ramp_s (by default at the end of the
        run).
    tokens_per_image: what an image took of a trace's ContextTokens.
    repeat_rate, repeat_skew, questions_per_media: see `Workload`.
    token_side, frames_per_s: of the model that a trace with tokens of media asked, see `ModelSight`.

    A trace takes sizes of media from the first part of the mix, and the token counts given there as caps.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = "custom"
    arrival: ArrivalKind = ArrivalKind.POISSON
    rate: float | None = None
    burstiness: float = 0.25
    ramp_from: float = 0.0
    ramp_s: float | None = None
    num_requests: int | None = None
    duration_s: float | None = None
    repeat_rate: float = 0.0
    repeat_skew: float = 0.0
    questions_per_media: int = 1
    trace: Path | None = None
    tokens_per_image: int = 256
    token_side: int = 28
    frames_per_s: float = 2.0
    mix: tuple[MixPart, ...] = (MixPart(),)

    def resolve(self) -> Workload:
        """Returns the workload. Raises RequestError for what makes no sense or would never end."""
        if self.arrival is ArrivalKind.TRACE or self.trace is not None:
            return self._resolve_trace()
        if self.num_requests is None and self.duration_s is None:
            raise RequestError("the workload has no end; give a number of requests or a duration")
        shapes = Mix(tuple(part.resolve() for part in self.mix))
        return self._workload(self._arrivals(), shapes)

    def _workload(self, arrivals: ArrivalTimes, shapes: Any) -> Workload:
        return Workload(
            self.name,
            arrivals,
            shapes,
            self.num_requests,
            self.duration_s,
            repeat_rate=self.repeat_rate,
            repeat_skew=self.repeat_skew,
            questions_per_media=self.questions_per_media,
        )

    def _arrivals(self) -> ArrivalTimes:
        rate = 1.0 if self.rate is None else self.rate
        match self.arrival:
            case ArrivalKind.CONSTANT:
                return ConstantArrivals(rate)
            case ArrivalKind.BURSTY:
                return BurstyArrivals(rate, self.burstiness)
            case ArrivalKind.RAMP:
                return RampArrivals(self.ramp_from, rate, self._ramp_s(rate))
            case ArrivalKind.CLOSED:
                if self.num_requests is None:
                    raise RequestError("a closed loop has no clock to end it; give a number of requests")
                return ClosedArrivals()
            case _:
                return poisson_arrivals(rate)

    def _ramp_s(self, rate: float) -> float:
        if self.ramp_s is not None:
            return self.ramp_s
        if self.duration_s is not None:
            return self.duration_s
        return 2 * (self.num_requests or 1) / max(self.ramp_from + rate, 1e-9)

    def _resolve_trace(self) -> Workload:
        if self.trace is None:
            raise RequestError("arrival is trace and no trace is given; name a CSV file")
        if self.arrival not in (ArrivalKind.TRACE, ArrivalKind.POISSON):
            raise RequestError(f"arrival is {self.arrival} and a trace is given too; leave one of them out")
        rows = open_trace(self.trace, self.num_requests)
        part = self.mix[0].resolve()
        given = self.mix[0].model_fields_set
        media = TraceMedia(
            image_size=part.image_size[0],
            tokens_per_image=self.tokens_per_image,
            video_fps=part.video_fps,
            video_size=part.video_size[0],
            max_text_tokens=round(part.text_tokens.mean) if "text_tokens" in given else None,
            max_output_tokens=round(part.output_tokens.mean) if "output_tokens" in given else None,
            sight=ModelSight(self.token_side, frames_per_s=self.frames_per_s),
        )
        return self._workload(trace_arrivals(rows, self.rate), trace_shapes(rows, media))


PRESETS: dict[str, dict[str, Any]] = {
    "text": {"rate": 4.0, "num_requests": 100, "mix": [{"text_tokens": "32..96"}]},
    "images": {"rate": 2.0, "num_requests": 60, "mix": [{"images": 1}]},
    "video": {"rate": 0.2, "num_requests": 10, "mix": [{"videos": 1}]},
    "mixed": {
        "rate": 1.0,
        "num_requests": 60,
        "mix": [
            {"weight": 5, "text_tokens": "32..96"},
            {"weight": 4, "images": "1*3|2..4*1"},
            {"weight": 1, "videos": 1, "video_s": "10..30"},
        ],
    },
}


def load_workload(
    source: str | None,
    overrides: Mapping[str, Any] | None = None,
    part_overrides: Mapping[str, Any] | None = None,
) -> WorkloadConfig:
    """Returns a preset or a file, with fields replaced. Raises RequestError for an unknown name, field or
    value.

    Without a source, all fields are at their defaults.
    part_overrides: fields of every part of the mix; how many images or videos only of parts that have some.
    """
    record = {**_source_record(source), **(overrides or {})}
    parts = record.get("mix") or [{}]
    if isinstance(parts, list) and all(isinstance(part, dict) for part in parts):
        record["mix"] = [_with_overrides(part, part_overrides or {}) for part in parts]
    try:
        return WorkloadConfig.model_validate(record)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise RequestError(f"workload {source!r}: {where} is {first['input']!r}: {first['msg']}") from None


def _source_record(source: str | None) -> dict[str, Any]:
    if source is None:
        return {}
    record = PRESETS[source] if source in PRESETS else _read(Path(source))
    return {"name": Path(source).stem, **record}


def _with_overrides(part: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    counts = {"images", "videos", "audios"}
    return {
        **part,
        **{name: value for name, value in overrides.items() if name not in counts or part.get(name)},
    }


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise RequestError(
            f"workload {str(path)!r} is neither a preset ({', '.join(PRESETS)}) nor a file that can be read"
        ) from None
    try:
        record = json.loads(text) if path.suffix == ".json" else _parse_yaml(text)
    except ValueError as error:
        raise RequestError(f"workload {str(path)!r} is not YAML or JSON: {error}") from None
    if not isinstance(record, dict):
        raise RequestError(f"workload {str(path)!r} must be a mapping of fields, see docs/bench.md")
    return record


def _parse_yaml(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
