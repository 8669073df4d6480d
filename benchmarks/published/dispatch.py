"""Asks what follows if the process that dispatches media drives decoding too, as in the paper's public code.

There EPD and DistServe are one event loop each: it copies the media of a call into the message to the worker,
and it starts every decode step. While it copies, no step starts:

    calls           copy 1          copy 2
    decode steps  | step | .... | step | step | .... | step |      . waits, which count in the answer's TPOT

EPD sends an image or a clip with each call, DistServe all of a request. vLLM's replicas are processes of
their own, in which nobody else's media are copied.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from epd.profiles.profile import Profile
from epd.simulate.clock import TICKS_PER_S
from epd.simulate.records import SimulationResult

_Seconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Calls:
    """Lists the calls that were sent with media, in order: when each began, and how many media it had."""

    starts_s: _Seconds
    num_media: NDArray[np.int64]

    @classmethod
    def of_encoders(cls, result: SimulationResult, profile: Profile, patches_of_one: int) -> Calls:
        """Returns the calls of workers that only encode. result: with spans. patches_of_one: of a medium."""
        cost = profile.encode.cost
        one_s = cost.per_unit_s * patches_of_one
        spans = sorted((span.start, span.ticks) for span in result.spans if span.name == "encode")
        starts, ticks = np.array(spans, np.float64).reshape(-1, 2).T / TICKS_PER_S
        return cls(starts, np.rint((ticks - cost.fixed_s) / one_s).astype(np.int64))

    @classmethod
    def of_requests(cls, result: SimulationResult, media_of_request: int) -> Calls:
        """Returns the calls of workers that encode and prefill: one of all media for each request."""
        begun = np.sort(
            result.rows["first_token"] - result.rows["prefill_ticks"] - result.rows["encode_ticks"]
        )
        return cls(begun / TICKS_PER_S, np.full(len(begun), media_of_request))


def stalled_tpot_s(result: SimulationResult, calls: Calls, copy_s: float) -> _Seconds:
    """Returns the TPOT of each request whose decoding stands still while media are copied.

    copy_s: of one image or clip. What is copied while an answer waits makes it wait longer.
    """
    rows = result.rows
    first_s, end_s = (rows[name] / TICKS_PER_S for name in ("first_token", "end"))
    copied_s = np.concatenate([[0.0], np.cumsum(calls.num_media * copy_s)])

    def copied_until(times_s: _Seconds) -> _Seconds:
        found: _Seconds = copied_s[np.searchsorted(calls.starts_s, times_s)]
        return found

    before_s, stalled_s = copied_until(first_s), end_s
    while not np.array_equal(longer_s := end_s + copied_until(stalled_s) - before_s, stalled_s):
        stalled_s = longer_s
    tpot_s: _Seconds = (stalled_s - first_s) / np.maximum(rows["output_tokens"] - 1, 1)
    return tpot_s
