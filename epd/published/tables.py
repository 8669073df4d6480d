"""Lists figures that papers and projects have published, and rows that compare simulated ones with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
# vLLM's encoder disaggregation, 4 x A100, Qwen3-VL-4B: requests per second by images in a request.
VLLM_BLOG = {"1E3PD": {1: 24.0, 4: 12.0}, "DP4": {1: 23.0, 4: 6.0}}


@dataclass(frozen=True, slots=True)
class Row:
    """Compares one figure. is_fitted: the profile was fitted to it, so that it proves nothing."""

    system: str
    case: str
    metric: str
    simulated: float
    published: float
    is_fitted: bool = False

    @property
    def error(self) -> float:
        """Returns the relative error of the simulated figure."""
        return self.simulated / self.published - 1

    def record(self) -> dict[str, str | float | bool]:
        """Returns the record that `--json` prints."""
        return {
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
