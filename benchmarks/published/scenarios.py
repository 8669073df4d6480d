"""Runs the published tables by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from benchmarks.published.encoder_calls import encoder_calls
from benchmarks.published.figure5 import figure_5
from benchmarks.published.figure6 import figure_6
from benchmarks.published.figure6_each import figure_6_each
from benchmarks.published.figure6_study import figure_6_study
from benchmarks.published.memory import table_2, table_3, table_8, weights_by_role
from benchmarks.published.paper import overlap_rows, table_1, table_4, table_6
from benchmarks.published.table5 import table_5
from benchmarks.published.table5_study import study
from benchmarks.published.table7 import table_7
from benchmarks.published.table7_study import table_7_study
from benchmarks.published.tables import Row
from benchmarks.published.vllm_blog import vllm_blog
from epd.errors import RequestError

SCENARIOS: Mapping[str, Callable[[], Sequence[Row]]] = {
    "epd-table1": table_1,
    "epd-table2": table_2,
    "epd-table3": table_3,
    "epd-table4": table_4,
    "epd-table5": table_5,
    "epd-table5-study": study,
    "epd-table6": table_6,
    "epd-table7": table_7,
    "epd-table7-study": table_7_study,
    "epd-table8": table_8,
    "epd-fig5": figure_5,
    "epd-fig6": figure_6,
    "epd-fig6-study": figure_6_study,
    "epd-fig6-each": figure_6_each,
    "epd-weights": weights_by_role,
    "epd-encoder-calls": encoder_calls,
    "epd-overlap": overlap_rows,
    "vllm-blog": vllm_blog,
}


def run_scenario(name: str) -> Sequence[Row]:
    """Runs a table. Raises RequestError for an unknown name."""
    if name not in SCENARIOS:
        raise RequestError(f"scenario is {name!r}; there are {', '.join(SCENARIOS)}; name one of them")
    return SCENARIOS[name]()
