"""States the question of a buyer, requests about videos and their rate, and what they ask of machines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from epd.errors import RequestError
from epd.simulate.clock import TICKS_PER_S
from epd.simulate.frame_choice import VideoWishes
from epd.simulate.requests import Job
from epd.workload.requests import Resolution

# Of H.264 as cameras and platforms send it: an assumption. 1080p of 30 frames a second is 5 Mbit/s.
_BITS_PER_PIXEL = 0.08
_WISHES = {
    "fps": "{:g} frames of a second read",
    "num_frames": "{:g} frames of a video read",
    "max_visual_tokens": "at most {:g} visual tokens of a request",
}


@dataclass(frozen=True, slots=True)
class Films:
    """Describes requests about one video each, as a buyer counts them.

    per_minute: requests; minutes: of each video
    """

    per_minute: float
    minutes: float = 10.0
    size: str = "1920x1080"
    fps: int = 30
    answer_tokens: int = 200

    @property
    def workload(self) -> dict[str, Any]:
        """Returns the fields of a workload."""
        part = {
            "videos": 1,
            "video_s": f"{60 * self.minutes:g}",
            "video_size": self.size,
            "video_fps": self.fps,
            "output_tokens": self.answer_tokens,
        }
        return {"name": "videos", "mix": [part]}

    @property
    def rate_per_s(self) -> float:
        return self.per_minute / 60

    def __str__(self) -> str:
        return (
            f"{self.per_minute:g} videos a minute of {self.minutes:g} min, {self.size} at {self.fps} "
            f"frames/s ({self.gbit_per_s:.2g} Gbit/s at {_BITS_PER_PIXEL} bit a pixel), answers of "
            f"{self.answer_tokens} tokens"
        )

    @property
    def gbit_per_s(self) -> float:
        """Returns what enters by the network."""
        size = Resolution.parse(self.size)
        pixels = 60 * self.minutes * self.fps * size.width * size.height
        return pixels * _BITS_PER_PIXEL * self.rate_per_s / 1e9


def demands(jobs: Sequence[Job], rate_per_s: float) -> list[str]:
    """Returns what a request is, and what a rate of them asks of threads and of the network."""
    frames = fmean(sum(group.media.num_frames for group in job.groups) for job in jobs)
    visual, prompt = (
        fmean(job.num_visual_tokens for job in jobs),
        fmean(job.num_prompt_tokens for job in jobs),
    )
    read_s = fmean(sum(group.decode_ticks for group in job.groups) for job in jobs) / TICKS_PER_S
    lines = [f"a request has {frames:,.0f} frames, {visual:,.0f} visual and {prompt:,.0f} prompt tokens"]
    if read_s:
        lines.append(
            f"{rate_per_s * read_s:,.1f} CPU threads read media all the time, {read_s:.3g} s for a request"
        )
    return lines


_SECONDS = {
    "s": 1,
    "sec": 1,
    "min": 60,
    "minute": 60,
    "h": 3600,
    "hour": 3600,
    "day": 86_400,
    "month": 2_628_000,
}


def rate_of(text: str | float) -> float:
    """Returns a rate per second of 20, 20/s, 20/min, 1000/h or 5000/day.

    Raises RequestError for anything but a number above 0 and a unit of time.
    """
    number, _, unit = str(text).partition("/")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    seconds = _SECONDS.get(unit.strip() or "s")
    if not 0 < value < math.inf or seconds is None:
        raise RequestError(
            f"received the rate {text!r}; allowed: a number above 0, alone for each second, or with one of "
            f"{', '.join(f'/{name}' for name in _SECONDS)}; try 20/min"
        )
    return value / seconds


def wished(wishes: VideoWishes) -> list[str]:
    """Returns what is wished of frames, for people."""
    return [_WISHES[name].format(value) for name, value in asdict(wishes).items() if value is not None]
