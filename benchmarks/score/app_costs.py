"""Defines the questions that measure the application, and figures that need no simulation.

one by one         a short and a long text: tokens of a prompt; several answers at once: one more in a step
at random times    texts, images, videos, of one worker and of three: see `benchmarks/score/calibrating.py`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from epd.profiles.media import MediaRule
from epd.profiles.profile import PromptRule
from epd.types import Float64Array

SHORT_TEXT, LONG_TEXT, NUM_STEPS, NUM_AT_ONCE = 32, 96, 32, 4
ALONE: Mapping[str, object] = {"text_tokens": SHORT_TEXT, "output_tokens": NUM_STEPS + 1}
LONG: Mapping[str, object] = {"text_tokens": LONG_TEXT, "output_tokens": 1}
_MEDIA = {"text_tokens": SHORT_TEXT, "output_tokens": 9}
# One image and three show the cost of a request and of an image; the video has two groups of frames.
KINDS: tuple[Mapping[str, object], ...] = (
    {"text_tokens": SHORT_TEXT, "output_tokens": 17},
    {**_MEDIA, "images": 1},
    {**_MEDIA, "images": 3},
    {**_MEDIA, "videos": 1, "video_s": 6, "video_size": "320x192"},
)
# The same of a model that hears.
HEARD_KINDS: tuple[Mapping[str, object], ...] = (
    KINDS[0],
    {**_MEDIA, "audios": 1, "audio_s": 4},
    {**_MEDIA, "audios": 3, "audio_s": 4},
)
LAYOUTS = ("1epd", "1e1p1d")


def kinds_of(rule: MediaRule) -> tuple[Mapping[str, object], ...]:
    """Returns the kinds of questions at random times for a model that cuts media so."""
    return HEARD_KINDS if rule.kind == "clips" else KINDS


@dataclass(frozen=True, slots=True)
class Figures:
    """Holds medians over the requests of one run, seconds; 0 without such a request.

    encode_s, prefill_s: work of these stages for one request, as the application reports it
    cpu_s: of all processes, for one request, on average and less their idle time
    """

    ttft_s: float
    tpot_s: float
    encode_s: float
    prefill_s: float
    cpu_s: float
    prompt_tokens: float
    cached_tokens: float

    @property
    def new_tokens(self) -> float:
        return self.prompt_tokens - self.cached_tokens


def median(values: Sequence[float] | Float64Array) -> float:
    """Returns the median, 0 without values."""
    return float(np.median(values)) if len(values) else 0.0


def prompt_rule(short: Figures, long: Figures) -> PromptRule:
    """Returns the rule of prompt tokens. short, long: of texts with SHORT_TEXT and LONG_TEXT tokens."""
    per_token = (long.new_tokens - short.new_tokens) / (LONG_TEXT - SHORT_TEXT)
    return PromptRule(short.new_tokens - per_token * SHORT_TEXT, per_token)


def sequence_s(alone: Figures, at_once: Figures) -> float:
    """Returns the time that one more sequence adds to a step.

    alone, at_once: of ALONE, with one and NUM_AT_ONCE in flight. While one decodes, the others are prefilled.
    """
    share = at_once.tpot_s * NUM_STEPS / (at_once.ttft_s + at_once.tpot_s * NUM_STEPS)
    num_others = NUM_AT_ONCE * share - 1
    stalled_s = alone.prefill_s * (NUM_AT_ONCE - 1) / NUM_STEPS
    more_s = at_once.tpot_s - stalled_s - alone.tpot_s
    return max(0.0, more_s / num_others) if num_others > 0 else 0.0
