"""Repeats figure 6 of the EPD paper: how far the mean TTFT is cut against DistServe, over 2 to 8 images.

MiniCPM-V runs on the costs of the tables (`benchmarks.published.paper`). For InternVL2 the paper has no TTFT:
its prefill is the analytic one, and an image's encode is what the objectives of table 9 leave. These grow by
the same factor of a colocated worker's time for an image as MiniCPM's do; none of figure 6 is fitted.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from benchmarks.published.paper import (
    FOUR_K,
    Experiment,
    PaperFit,
    assumed_profile,
    images,
    paper_deployment,
    paper_profile,
)
from benchmarks.published.tables import FIGURE_6, TABLE_9_TTFT, Row
from epd.kv.pass_limits import SchedulerConfig
from epd.profiles.cost import StageCost
from epd.profiles.profile import Profile

RATES = {"minicpm-v-2.6": 0.25, "internvl2-8b": 0.08, "internvl2-26b": 0.08}
_CONTEXT_TOKENS = SchedulerConfig(max_num_batched_tokens=49_152, max_num_seqs=1, max_chunk_tokens=49_152)
LAYOUTS = {
    "EPD": replace(paper_deployment("5e2p1d"), language=_CONTEXT_TOKENS),
    "DistServe": replace(paper_deployment("7ep1d", "local"), language=_CONTEXT_TOKENS),
}
NUM_REQUESTS = 100
_MINICPM = "minicpm-v-2.6"


def _objective_s_per_image(model: str) -> float:
    """Returns the slope of the TTFT objectives over the number of images."""
    counts, limits_s = zip(*TABLE_9_TTFT[model].items(), strict=True)
    return float(np.polyfit(counts, limits_s, 1)[0])


def _slack() -> float:
    """Returns the objectives' slope over a colocated worker's seconds for an image, of MiniCPM-V."""
    fit, tiles = PaperFit(), 10
    return _objective_s_per_image(_MINICPM) / (tiles * (fit.encode_tile_s + fit.prefill_tile_s))


def figure_profile(model: str) -> Profile:
    """Returns the costs of a model in the paper's system."""
    if model == _MINICPM:
        return paper_profile()
    fitted, base = paper_profile(), assumed_profile(model)
    image = base.media.image(FOUR_K)
    prefill = replace(base.prefill.cost, fixed_s=fitted.prefill.cost.fixed_s, floor_s=0.0)
    image_s = _objective_s_per_image(model) / _slack() - prefill.per_unit_s * image.num_tokens
    return replace(
        base,
        name=f"{model}@epd-paper",
        encode=replace(base.encode, cost=StageCost(per_unit_s=image_s / image.num_patches)),
        prefill=replace(base.prefill, cost=prefill),
        images=fitted.images,
    )


def colocated_profile(model: str, factor: float) -> Profile:
    """Returns the costs of workers that take so many times as long to encode and to prefill."""
    profile = figure_profile(model)
    return replace(profile, encode=profile.encode.times(factor), prefill=profile.prefill.times(factor))


def ttft_cut(model: str, count: int, colocated_factor: float = 1.0) -> float:
    """Returns the cut of the mean TTFT in percent.

    count: images in a request
    colocated_factor: how many times as long DistServe's workers take to encode and prefill
    """
    ours_s = _mean_ttft_s("EPD", model, count, 1.0)
    return 100 * (1 - ours_s / _mean_ttft_s("DistServe", model, count, colocated_factor))


@cache
def _mean_ttft_s(system: str, model: str, count: int, factor: float) -> float:
    experiment = Experiment(LAYOUTS[system], RATES[model], [images(count)] * NUM_REQUESTS)
    return experiment.means(colocated_profile(model, factor))["TTFT mean s"]


def largest_cut(model: str, colocated_factor: float = 1.0) -> tuple[float, int]:
    """Returns a model's largest cut in percent, and the images of a request that has it."""
    cuts = {count: ttft_cut(model, count, colocated_factor) for count in TABLE_9_TTFT[model]}
    count = max(cuts, key=lambda each: cuts[each])
    return cuts[count], count


def figure_6(colocated_factor: float = 1.0) -> list[Row]:
    """Returns the largest cut of each model, as the paper states it."""
    rows = []
    for model, published in FIGURE_6.items():
        cut, count = largest_cut(model, colocated_factor)
        rows.append(Row("EPD against DistServe", f"{model}, {count} images", "TTFT cut %", cut, published))
    return rows
