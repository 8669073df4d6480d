"""Repeats the shape of figures 5 and 11 of the EPD paper: attainment of its objectives at a low rate.

The figures are curves without numbers. The text says that at low rates EPD keeps the objectives of more than
90 % of the requests where DistServe and vLLM often keep fewer than 10 %. Costs, layouts and rates are those
of figure 6; nothing is fitted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from benchmarks.published.figure6 import LAYOUTS, NUM_REQUESTS, RATES, colocated_profile, figure_profile
from benchmarks.published.paper import Experiment, images, paper_deployment
from benchmarks.published.tables import FIGURE_5, TABLE_9_TPOT, TABLE_9_TTFT, Row
from epd.kv.pass_limits import SchedulerConfig
from epd.simulate.deployment import Deployment
from epd.workload.metrics import SLO

_VLLM = replace(
    paper_deployment("8epd", "local"),
    language=SchedulerConfig(max_num_batched_tokens=49_152, max_num_seqs=128, max_chunk_tokens=49_152),
)
_SYSTEMS: Mapping[str, Deployment] = {**LAYOUTS, "vLLM": _VLLM}


def figure_5(colocated_factor: float = 1.0) -> list[Row]:
    """Returns the share of requests that keep both objectives, by system, model and number of images.

    colocated_factor: how many times as long workers that encode and prefill take for both
    """
    return [row for model in TABLE_9_TTFT for row in _rows(model, colocated_factor)]


def _rows(model: str, colocated_factor: float) -> Iterator[Row]:
    apart, colocated = figure_profile(model), colocated_profile(model, colocated_factor)
    for count, ttft_s in TABLE_9_TTFT[model].items():
        slo = SLO(ttft_s=ttft_s, tpot_s=TABLE_9_TPOT[model][count])
        for system, (published, bound) in FIGURE_5.items():
            shapes = [images(count)] * NUM_REQUESTS
            profile = apart if system == "EPD" else colocated
            kept = 100 * Experiment(_SYSTEMS[system], RATES[model], shapes).run(profile).attainment(slo)
            case = f"{model}, {count} images"
            yield Row(system, case, "% within objectives", kept, published, bound=bound)


def num_shown(rows: list[Row]) -> int:
    """Counts the models and numbers of images where all three systems are within their bounds."""
    cases = {row.case for row in rows}
    return sum(all(row.is_within for row in rows if row.case == case) for case in cases)
