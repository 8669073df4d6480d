"""Repeats table 7 of the EPD paper: clips of sound, ultravox-v0_3 on 4 x A100, 24 clips a request.

A clip is a tile: 1,500 positions of Whisper-small's encoder, eight of which make a token of the language
model, Llama 3.1 8B, so 188 tokens. The paper says neither how long clips are nor how long prompt and answer:
clips are taken to fill their 30 s, the rest to be as in its other experiments, 22 and 10 tokens. The costs of
the language model are computed (`epd.profiles.analytic`), those of a clip and of a prefill pass are fitted.

The rows of FITTED_ROWS were named before anything was simulated, one for each system; two numbers are fitted
to them, by least squares of the shares' errors on a grid, and all other rows were looked at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.published.paper import Experiment, assumed_profile, limits, paper_deployment
from benchmarks.published.tables import TABLE_7, TABLE_7_GOODPUT, Row
from epd.planning.goodput import Demand, goodput
from epd.profiles.cost import StageCost
from epd.profiles.profile import Profile
from epd.simulate.deployment import Deployment
from epd.simulate.requests import JobMaker
from epd.workload.arrivals import poisson_arrivals
from epd.workload.metrics import SLO
from epd.workload.requests import RequestShape, Resolution, TraceShapes, Workload

TTFT_S, TPOT_S = 2.0, 0.025
OBJECTIVES = SLO(ttft_s=TTFT_S, tpot_s=TPOT_S)
ATTAINMENT = 0.9  # that goodput is read at
NUM_ROUNDS = 4
NUM_CLIPS, _NUM_REQUESTS = 24, 100
_PROMPT_TOKENS, _OUTPUT_TOKENS = 22, 10
POSITIONS = 1500
_CLIP = Resolution(32, 32)  # one tile, whatever its size

SHAPES = (RequestShape(_PROMPT_TOKENS, _OUTPUT_TOKENS, (_CLIP,) * NUM_CLIPS),) * _NUM_REQUESTS

# (system, requests per second)
FITTED_ROWS = frozenset({("vLLM", 1.15), ("DistServe", 0.5), ("EPD", 1.15)})


@dataclass(frozen=True, slots=True)
class AudioFit:
    """Holds the fitted seconds: of a clip at its encoder, features included, and of a prefill pass."""

    encode_clip_s: float = 0.042
    prefill_pass_s: float = 0.05


def audio_profile(fit: AudioFit | None = None) -> Profile:
    """Returns the analytic profile with the fitted numbers in it."""
    fit = fit or AudioFit()
    base = assumed_profile("ultravox-v0.3")
    assert base.images is not None
    prefill = replace(base.prefill.cost, fixed_s=fit.prefill_pass_s, floor_s=0.0)
    return replace(
        base,
        name="ultravox-v0.3@epd-paper",
        encode=replace(base.encode, cost=StageCost(per_unit_s=fit.encode_clip_s / POSITIONS)),
        prefill=replace(base.prefill, cost=prefill),
        images=replace(base.images, cost=StageCost()),
        assumptions=(*base.assumptions, "encode and a prefill pass fitted to the EPD paper's table 7"),
    )


LAYOUTS: Mapping[str, Deployment] = {
    "EPD": paper_deployment("2e1p1d"),
    "DistServe": paper_deployment("3ep1d", "local"),
    "vLLM": replace(paper_deployment("4epd", "local"), language=limits(128)),
}


def attainment(profile: Profile, system: str, rate_per_s: float) -> float:
    """Returns the share of requests within both objectives, the mean of rounds of a hundred."""
    experiment = Experiment(LAYOUTS[system], rate_per_s, SHAPES)
    shares = [experiment.run(profile, each).attainment(OBJECTIVES) for each in range(NUM_ROUNDS)]
    return float(np.mean(shares))


def table_7(profile: Profile | None = None) -> list[Row]:
    """Returns attainment by system and rate, and goodput: the highest rate with `ATTAINMENT`."""
    profile = profile or audio_profile()
    return [row for system in TABLE_7 for row in _rows(profile, system)]


def _rows(profile: Profile, system: str) -> Iterator[Row]:
    for rate, published in TABLE_7[system].items():
        found, is_fitted = attainment(profile, system, rate), (system, rate) in FITTED_ROWS
        yield Row(system, f"{rate:g} requests/s", "share in SLO", found, published, is_fitted)
    found = goodput(profile, LAYOUTS[system], _demand(profile))
    yield Row(system, f"{ATTAINMENT:.0%} in SLO", "goodput 1/s", found, TABLE_7_GOODPUT[system])


def _demand(profile: Profile) -> Demand:
    workload = Workload("clips", poisson_arrivals(1.0), TraceShapes(SHAPES), len(SHAPES))
    jobs = list(JobMaker(profile, "frames").jobs(workload.requests(0)))
    return Demand.of(jobs, OBJECTIVES, ATTAINMENT)
