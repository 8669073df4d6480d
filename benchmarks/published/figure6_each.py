"""Fits how much slower DistServe's workers are to one cut of figure 6 at a time, and looks at the others.

`figure6_study` has a factor that was chosen in view of all three cuts. Here each of them is fitted alone, by
halving until it is met, and says what the two others would be, and the cut that the paper states beside
figure 12. That one number serves three models is what is tested; what makes the workers slower is not known.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.published.figure6 import figure_6, ttft_cut
from benchmarks.published.tables import FIGURE_12, Row

# How many times as long workers of DistServe take, by the model whose cut it is fitted to.
FACTORS = {"minicpm-v-2.6": 1.550, "internvl2-8b": 1.289, "internvl2-26b": 1.402}
_MODEL_12, _COUNT_12 = "internvl2-8b", 8


def figure_6_each() -> list[Row]:
    """Returns four cuts for each factor, the fitted one among them."""
    return [row for model, factor in FACTORS.items() for row in _rows(model, factor)]


def _rows(fitted: str, factor: float) -> Iterator[Row]:
    system = f"colocated workers take {factor:.3f} times as long"
    for row in figure_6(factor):
        is_fitted = row.case.startswith(f"{fitted},")
        yield Row(system, row.case, row.metric, row.simulated, row.published, is_fitted)
    found, metric = ttft_cut(_MODEL_12, _COUNT_12, factor), "TTFT cut %"
    yield Row(system, f"figure 12, {_MODEL_12}, {_COUNT_12} images", metric, found, FIGURE_12[metric])
