"""Figure 6: MiniCPM-V's cut follows within a fifth; those of InternVL2 are not reached, as the page says."""

from __future__ import annotations

import pytest

from epd.published.figure6 import figure_6, figure_profile
from epd.published.paper import FOUR_K, paper_profile


def test_cuts_of_the_mean_ttft() -> None:
    rows = {row.case.split(",")[0]: row for row in figure_6()}
    assert not any(row.is_fitted for row in rows.values())
    assert abs(rows["minicpm-v-2.6"].error) < 0.2
    assert rows["internvl2-8b"].simulated == pytest.approx(15.5, abs=1.5)
    assert rows["internvl2-26b"].simulated == pytest.approx(24.3, abs=1.5)


def test_costs_leave_the_tables_as_they_were() -> None:
    """Encode of an image: the objectives' slope less prefill, for the models that have no table."""
    assert figure_profile("minicpm-v-2.6") == paper_profile()
    for model, image_s in (("internvl2-8b", 0.147), ("internvl2-26b", 0.588)):
        profile = figure_profile(model)
        patches = profile.media.image(FOUR_K).num_patches
        assert profile.encode.cost.seconds(patches) == pytest.approx(image_s, rel=0.02)
