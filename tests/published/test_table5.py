"""The planner in the paper's own space finds what Table 5 reports."""

from __future__ import annotations

import numpy as np

from epd.published.table5 import random_goodputs, table_5


def test_table_5() -> None:
    """The plan in the paper's own space is the paper's optimum, and 2.2 times what chance finds."""
    rows = {row.system: row for row in table_5()}
    assert rows["optimum"].case.endswith("6e1p1d")
    assert rows["optimum / random"].simulated >= 2.2
    assert rows["optimum"].simulated >= 2.2 * np.mean(random_goodputs(seed=1))
