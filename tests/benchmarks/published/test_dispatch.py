"""Copies of media in the process that drives decoding: who waits for which, and for how long."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.published.dispatch import Calls, stalled_tpot_s
from benchmarks.published.table7 import POSITIONS, audio_profile
from epd.profiles.cost import StageCost
from epd.simulate.clock import TICKS_PER_S
from epd.simulate.records import ROW, SimulationResult, WorkSpan


def result_of(*times_s: tuple[float, float], tokens: int = 11) -> SimulationResult:
    """Requests with a first token and an end, whose prompts took .25 s to prefill and .5 s to encode."""
    rows = np.zeros(len(times_s), ROW)
    for row, (first_s, end_s) in zip(rows, times_s, strict=True):
        row["first_token"], row["end"] = first_s * TICKS_PER_S, end_s * TICKS_PER_S
        row["prefill_ticks"], row["encode_ticks"] = 0.25 * TICKS_PER_S, 0.5 * TICKS_PER_S
        row["output_tokens"] = tokens
    return SimulationResult(rows, 0, 0)


def calls(*starts_s: float, num_media: int = 1) -> Calls:
    return Calls(np.array(starts_s), np.full(len(starts_s), num_media))


@pytest.mark.parametrize(
    ("starts_s", "waits"),
    [((), 0), ((0.5,), 0), ((1.0,), 1), ((1.5,), 1), ((1.5, 1.75), 2), ((2.0,), 0), ((1.5, 2.0625), 2)],
)
def test_an_answer_waits_for_copies_between_its_first_token_and_its_end(
    starts_s: tuple[float, ...], waits: int
) -> None:
    """From second 1 to second 2; the last copy begins while the answer still waits for the one before."""
    (found,) = stalled_tpot_s(result_of((1.0, 2.0)), calls(*starts_s), 0.125)
    assert found == pytest.approx(0.1 + waits * 0.0125)


def test_a_call_of_several_media_takes_longer() -> None:
    found = stalled_tpot_s(result_of((1.0, 2.0), (4.0, 5.0)), calls(1.5, num_media=4), 0.125)
    assert found.tolist() == pytest.approx([0.15, 0.1])


def test_an_answer_of_one_token_has_no_gap_to_wait_in() -> None:
    assert stalled_tpot_s(result_of((1.0, 1.0), tokens=1), calls(1.0), 0.125).tolist() == [0.0]


def test_workers_that_prefill_get_all_media_when_they_begin() -> None:
    found = Calls.of_requests(result_of((3.0, 4.0), (1.0, 2.0)), media_of_request=24)
    assert found.starts_s.tolist() == [0.25, 2.25]
    assert found.num_media.tolist() == [24, 24]


def test_encoders_get_the_media_of_each_batch() -> None:
    """As many as its time tells; passes of the language model have none."""
    profile = audio_profile()
    assert profile.encode.cost == StageCost(per_unit_s=0.042 / POSITIONS)
    second = TICKS_PER_S
    spans = (
        WorkSpan("e1", "encode", 5 * second, round(0.042 * second)),
        WorkSpan("e0", "encode", 2 * second, round(0.126 * second)),
        WorkSpan("p0", "language", second, second),
    )
    found = Calls.of_encoders(SimulationResult(np.zeros(0, ROW), 0, 0, spans=spans), profile, POSITIONS)
    assert found.starts_s.tolist() == [2.0, 5.0]
    assert found.num_media.tolist() == [3, 1]
