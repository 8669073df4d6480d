"""Lists figures that papers and projects have published, and rows that compare simulated ones with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

# What is published may be the least or the most that a figure can be.
Bound = Literal["least", "most"]

# Mean TTFT in seconds. EPD (arXiv 2501.05460v4), tables 4 and 1: by images, by frames.
TABLE_4 = {
    "sharding on": {2: 0.92, 4: 1.02, 6: 1.14, 8: 1.74},
    "sharding off": {2: 1.46, 4: 2.47, 6: 3.37, 8: 4.27},
}
TABLE_1 = {
    "EPD": {8: 0.24, 16: 0.30, 32: 0.49, 64: 1.00},
    "DistServe": {8: 0.42, 16: 0.81, 32: 1.54, 64: 3.08},
    "vLLM": {8: 0.42, 16: 0.82, 32: 1.59, 64: 3.11},
}
# Table 6: means in seconds, without and with role switching.
TABLE_6 = {
    "switching off": {"TTFT mean s": 1.33, "TPOT mean s": 0.12, "E2E mean s": 61.1},
    "switching on": {"TTFT mean s": 1.42, "TPOT mean s": 0.05, "E2E mean s": 28.0},
}
# Table 5: requests per second that keep the objectives of table 9.
TABLE_5 = {"optimum": 1.25, "mean of 10 random": 0.56}
TABLE_5_AT_OPTIMUM = {"TTFT mean s": 2.12, "TPOT mean s": 0.031}  # at 1.25 requests/s
# Table 7: share of requests within TTFT 2.0 s and TPOT .025 s, by requests per second; goodput, requests/s.
TABLE_7 = {
    "vLLM": {0.1: 0.99, 0.25: 1.0, 0.5: 0.99, 1.0: 0.91, 1.1: 0.87, 1.15: 0.87},
    "DistServe": {0.1: 0.99, 0.25: 0.94, 0.5: 0.89, 1.0: 0.72, 1.1: 0.69, 1.15: 0.68},
    "EPD": {0.1: 0.99, 0.25: 0.99, 0.5: 1.0, 1.0: 0.96, 1.1: 0.93, 1.15: 0.93},
}
TABLE_7_GOODPUT = {"vLLM": 1.01, "DistServe": 0.45, "EPD": 1.16}
# Images per request; largest batch by tiles of an image, 0 for out of memory; % of free memory that is left
# for keys and values by images, 0 for out of memory or past the context; % of weights a role saves (4.3).
TABLE_2 = {
    "minicpm-v-2.6": {
        "313x234": {"DistServe": 77, "EPD": 490},
        "787x444": {"DistServe": 26, "EPD": 165},
        "4032x3024": {"DistServe": 7, "EPD": 49},
    },
    "internvl2-8b": {
        "313x234": {"DistServe": 19, "EPD": 19},
        "787x444": {"DistServe": 19, "EPD": 19},
        "4032x3024": {"DistServe": 19, "EPD": 19},
    },
    "internvl2-26b": {
        "313x234": {"DistServe": 1, "EPD": 10},
        "787x444": {"DistServe": 11, "EPD": 45},
        "4032x3024": {"DistServe": 1, "EPD": 10},
    },
}
TABLE_3 = {
    "minicpm-v-2.6": {
        1: {"DistServe E+P": 7, "EPD E": 49, "EPD P": 86},
        3: {"DistServe E+P": 2, "EPD E": 16, "EPD P": 29},
        10: {"DistServe E+P": 0, "EPD E": 4, "EPD P": 9},
    },
    "internvl2-8b": {
        13: {"DistServe E+P": 2, "EPD E": 15, "EPD P": 2},
        3: {"DistServe E+P": 9, "EPD E": 67, "EPD P": 10},
    },
    "internvl2-26b": {
        13: {"DistServe E+P": 0, "EPD E": 6, "EPD P": 1},
        3: {"DistServe E+P": 1, "EPD E": 22, "EPD P": 4},
    },
}
TABLE_8 = {
    "minicpm-v-2.6": {
        "DistServe": {5: 86, 10: 74, 20: 49, 40: 0, 80: 0},
        "EPD": {5: 99, 10: 97, 20: 95, 40: 92, 80: 0},
    },
    "internvl2-8b": {"DistServe": {5: 94, 10: 89, 20: 0}, "EPD": {5: 95, 10: 91, 20: 0}},
    "internvl2-26b": {
        "DistServe": {5: 67, 10: 36, 20: 0, 40: 0},
        "EPD": {5: 89, 10: 80, 20: 63, 40: 0},
    },
}
WEIGHTS_SAVED = {
    "minicpm-v-2.6": {"EPD E": 95.0, "EPD P": 5.0},
    "internvl2-8b": {"EPD E": 96.2, "EPD P": 3.7},
    "internvl2-26b": {"EPD E": 78.3, "EPD P": 21.6},
}
# Figure 6: the largest cut of the mean TTFT against DistServe, %.
FIGURE_6 = {"minicpm-v-2.6": 71.9, "internvl2-8b": 32.8, "internvl2-26b": 44.9}
# With figure 12, InternVL2-8B with eight images on GPUs: the cut, encode's share beside prefill.
FIGURE_12 = {"TTFT cut %": 24.4, "encode % of encode and prefill": 25.0}
# Table 9: TTFT objectives in seconds, by images in a request.
TABLE_9_TTFT = {
    "minicpm-v-2.6": {2: 1.40, 4: 2.60, 6: 3.90, 8: 5.10},
    "internvl2-8b": {2: 1.20, 4: 2.40, 6: 3.55, 8: 5.00},
    "internvl2-26b": {2: 3.50, 4: 7.05, 6: 11.00, 8: 15.00},
}
# The same table's TPOT objectives; .95 as it is printed, the others suggest .095.
TABLE_9_TPOT = {
    "minicpm-v-2.6": {2: 0.04, 4: 0.04, 6: 0.06, 8: 0.06},
    "internvl2-8b": {2: 0.05, 4: 0.06, 6: 0.09, 8: 0.18},
    "internvl2-26b": {2: 0.07, 4: 0.08, 6: 0.95, 8: 0.15},
}
# Figures 5 and 11, curves: % of requests within both objectives at low rates, at least or "often" at most.
FIGURE_5: Mapping[str, tuple[float, Bound]] = {
    "EPD": (90.0, "least"),
    "DistServe": (10.0, "most"),
    "vLLM": (10.0, "most"),
}
# vLLM's encoder disaggregation, 4 x A100, Qwen3-VL-4B: requests per second by images in a request.
VLLM_BLOG = {"1E3PD": {1: 24.0, 4: 12.0}, "DP4": {1: 23.0, 4: 6.0}}


@dataclass(frozen=True, slots=True)
class Row:
    """Compares one figure.

    is_fitted: the profile was fitted to it, so that it proves nothing
    bound: published is a bound, None for a figure
    """

    system: str
    case: str
    metric: str
    simulated: float
    published: float
    is_fitted: bool = False
    bound: Bound | None = None

    @property
    def is_within(self) -> bool:
        """Returns whether a published bound is kept."""
        if self.bound == "least":
            return self.simulated > self.published
        return self.bound == "most" and self.simulated < self.published

    @property
    def error(self) -> float:
        """Returns the relative error of the simulated figure.

        1 where it is not the 0 that was published; 0 within a published bound.
        """
        if self.is_within:
            return 0.0
        if not self.published:
            return float(self.simulated != 0)
        return self.simulated / self.published - 1

    @property
    def published_text(self) -> str:
        """Returns the published figure or bound."""
        signs = {None: "", "least": "> ", "most": "< "}
        return f"{signs[self.bound]}{self.published:.3g}"

    def record(self) -> dict[str, str | float | bool]:
        """Returns the record that `--json` prints."""
        bound: dict[str, str | float | bool] = {"bound": self.bound} if self.bound else {}
        return bound | {
            "system": self.system,
            "case": self.case,
            "metric": self.metric,
            "simulated": round(self.simulated, 4),
            "published": self.published,
            "fitted": self.is_fitted,
        }


def worst(rows: Sequence[Row]) -> Row:
    """Returns the row with the largest error among those that were not fitted."""
    return max((row for row in rows if not row.is_fitted), key=lambda row: abs(row.error))
