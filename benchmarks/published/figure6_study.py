"""Asks what would have to be true for figure 6's cuts, two of which are simulated at half of the published.

One number is fitted, to one row that figure 6 does not have: InternVL2-8B with eight images, whose cut on
GPUs the paper states beside figure 12. It is how many times as long a worker of its DistServe takes to encode
and prefill as workers of EPD. A second factor is chosen in view of figure 6; `figure_5` takes either, and is
in no fit.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.published.figure6 import figure_6, figure_profile, ttft_cut
from benchmarks.published.paper import FOUR_K
from benchmarks.published.tables import FIGURE_12, Row

_MODEL, _COUNT = "internvl2-8b", 8
# (table, system, case, metric)
FITTED_ROWS = frozenset({("epd-fig12", "EPD against DistServe", f"{_MODEL}, {_COUNT} images", "TTFT cut %")})
FITTED_FACTOR, SEEN_FACTOR = 1.136, 1.25


def encode_share() -> float:
    """Returns encode's percentage of encode and prefill, for the model and images of FIGURE_12."""
    profile = figure_profile(_MODEL)
    image = profile.media.image(FOUR_K)
    num_tokens = _COUNT * image.num_tokens
    encode_s = _COUNT * profile.encode.cost.seconds(image.num_patches)
    prefill_s = profile.prefill.cost.seconds(num_tokens, num_tokens * (num_tokens + 1) / 2)
    return 100 * encode_s / (encode_s + prefill_s)


def figure_6_study() -> list[Row]:
    """Returns the fitted row, what the model says of encode's share, and figure 6 with both factors."""
    case = f"{_MODEL}, {_COUNT} images"
    cut, share = ttft_cut(_MODEL, _COUNT, FITTED_FACTOR), "encode % of encode and prefill"
    is_fitted = ("epd-fig12", "EPD against DistServe", case, "TTFT cut %") in FITTED_ROWS
    rows = [
        Row(_name(FITTED_FACTOR), case, "TTFT cut %", cut, FIGURE_12["TTFT cut %"], is_fitted),
        Row("EPD", case, share, encode_share(), FIGURE_12[share]),
    ]
    for factor in (FITTED_FACTOR, SEEN_FACTOR):
        is_seen = factor == SEEN_FACTOR
        rows += [replace(row, system=_name(factor), is_fitted=is_seen) for row in figure_6(factor)]
    return rows


def _name(factor: float) -> str:
    return f"colocated workers take {factor} times as long"
