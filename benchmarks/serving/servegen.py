"""Draws a day of requests from the clients that ServeGen describes, a folder of two files for each.

    chunk-7-trace.csv       0,0.17,8.3,Gamma,0.014,320.3     from second 0 on: 0.17 requests a second, with
                                                             gaps of this family, shape and scale
    chunk-7-dataset.json    {"0": {"text_tokens": "{50: 0.8, 61: 0.2}", "image_count": ..., ...}, ...}

As in ServeGen a client's gaps within a window are scaled to its number of requests there. Other than there,
the sizes of a request are drawn independently, and a client that sends before it has sizes takes those of
its next window that has some. Always the same day. Source: Xiang et al. 2025, "ServeGen: Workload
Characterization and Generation of Large Language Model Serving in Production".
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from epd.errors import RequestError
from epd.types import Float64Array, Int64Array
from epd.workload.requests import RequestShape
from epd.workload.trace_media import TraceMedia

_SEED = 0
_NUMBERS = ("text_tokens", "output_tokens", "image_count", "image_tokens")
_OTHER_MEDIA = ("audio_count", "video_count")
_PAIR = re.compile(r"(\d+): ([0-9.e+-]+)")


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """One request. image_tokens: of each image."""

    time_s: float
    text_tokens: int
    output_tokens: int
    image_tokens: tuple[int, ...]

    def shape(self, media: TraceMedia) -> RequestShape:
        """Returns a request of its size, with images that become as many tokens."""
        return RequestShape(
            media.text_tokens(self.text_tokens),
            media.output_tokens(self.output_tokens),
            tuple(media.sight.size(number) for number in self.image_tokens),
        )


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Whole numbers and how likely they are. values: int64 [V]. until: float64 [V], up to 1."""

    values: Int64Array
    until: Float64Array

    @classmethod
    def parse(cls, text: str) -> Self:
        pairs = [(int(value), float(share)) for value, share in _PAIR.findall(text)]
        until = np.cumsum([share for _, share in pairs])
        if not pairs or not 0 < until[-1] < np.inf or min(share for _, share in pairs) < 0:
            raise ValueError(f"{text[:40]!r} is no distribution")
        return cls(np.array([value for value, _ in pairs]), until / until[-1])

    def draw(self, rng: np.random.Generator, number: int) -> Int64Array:
        drawn: Int64Array = self.values[np.searchsorted(self.until, rng.random(number), side="right")]
        return drawn


_Sizes = Mapping[str, _Numbers]


@dataclass(frozen=True, slots=True)
class _Window:
    """What a client sends from a time on. family: of its gaps, with the shape; empty where it is silent."""

    start_s: float
    rate_per_s: float
    family: str
    shape: float

    def times_s(self, rng: np.random.Generator, window_s: float) -> Float64Array:
        """Draws the times of the requests, float64 [N]."""
        number = round(self.rate_per_s * window_s)
        draw = rng.gamma if self.family == "Gamma" else rng.weibull
        ends = np.cumsum(draw(self.shape, size=number + 1))
        times: Float64Array = self.start_s + ends[:-1] / ends[-1] * window_s
        return times


@dataclass(frozen=True, slots=True)
class _Client:
    """windows: by the seconds at which they begin. sizes: from such a time on."""

    windows: Mapping[float, _Window]
    sizes: Mapping[float, _Sizes]

    def sizes_at(self, time_s: float) -> _Sizes | None:
        """Returns those of the latest window that has some, else of the next; None if there are none."""
        before = [start_s for start_s in self.sizes if start_s <= time_s]
        return self.sizes[max(before) if before else min(self.sizes)] if self.sizes else None


def draw_day(folder: Path, max_requests: int | None = None) -> list[ClientRequest]:
    """Returns the first requests of a day, in order of time. Raises RequestError for other folders."""
    clients = [_open(path) for path in sorted(folder.glob("chunk-*-trace.csv"))]
    starts = sorted({start_s for client in clients for start_s in client.windows})
    if len(starts) < 2:
        raise RequestError(
            f"the folder {str(folder)!r} has no clients of ServeGen; allowed: files chunk-N-trace.csv and "
            "chunk-N-dataset.json; give the folder mm-image of its data, or a file"
        )
    rng, day = np.random.default_rng(_SEED), list[ClientRequest]()
    for start_s, window_s in zip(starts, np.diff([*starts, 2 * starts[-1] - starts[-2]]), strict=True):
        drawn = [one for client in clients for one in _drawn(client, start_s, float(window_s), rng)]
        day += sorted(drawn, key=lambda one: one.time_s)
        if max_requests is not None and len(day) >= max_requests:
            break
    if not day:
        raise RequestError(f"the clients in {str(folder)!r} send no request; at least 1 is needed")
    return day[:max_requests]


def _drawn(client: _Client, start_s: float, window_s: float, rng: np.random.Generator) -> list[ClientRequest]:
    window, sizes = client.windows.get(start_s), client.sizes_at(start_s)
    if window is None or sizes is None or not window.family:
        return []
    times_s = window.times_s(rng, window_s)
    text, output, counts = (sizes[name].draw(rng, len(times_s)).tolist() for name in _NUMBERS[:3])
    images = iter(sizes["image_tokens"].draw(rng, sum(counts)).tolist())
    return [
        ClientRequest(time_s, num_text, num_output, tuple(next(images) for _ in range(count)))
        for time_s, num_text, num_output, count in zip(times_s.tolist(), text, output, counts, strict=True)
    ]


def _open(path: Path) -> _Client:
    dataset = path.with_name(path.name.replace("-trace.csv", "-dataset.json"))
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            windows = [_window(row) for row in csv.reader(lines)]
        records: dict[str, dict[str, str]] = json.loads(dataset.read_text(encoding="utf-8"))
        sizes = {float(start_s): _sizes(fields) for start_s, fields in records.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RequestError(
            f"the client {path.name} of ServeGen cannot be read: {error}; its two files must be as published"
        ) from None
    return _Client(
        {window.start_s: window for window in windows},
        {start_s: one for start_s, one in sizes.items() if one["output_tokens"].values.any()},
    )


def _window(row: list[Any]) -> _Window:
    start_s, rate_per_s, _, family, shape, _ = row
    window = _Window(float(start_s), float(rate_per_s), family, float(shape))
    is_silent = not family or not window.rate_per_s
    if not is_silent and (family not in ("Gamma", "Weibull") or window.rate_per_s < 0 or window.shape <= 0):
        raise ValueError(f"{','.join(row)!r} is no window of Gamma or Weibull gaps")
    return _Window(window.start_s, 0.0, "", 0.0) if is_silent else window


def _sizes(fields: Mapping[str, str]) -> _Sizes:
    for name in _OTHER_MEDIA:
        if _Numbers.parse(fields.get(name, "{0: 1.0}")).values.any():
            raise ValueError(f"{name} is above 0, and only images are drawn")
    return {name: _Numbers.parse(fields[name]) for name in _NUMBERS}
