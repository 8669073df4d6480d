"""Colours as users write them."""

from __future__ import annotations

import pytest

from epd.colour import WHITE, Colour, parse_colour
from epd.errors import RequestError


@pytest.mark.parametrize(
    ("text", "colour"),
    [("#ffffff", WHITE), ("#0A141e", (10, 20, 30)), ("1,2,3", (1, 2, 3)), ("[255, 0, 9]", (255, 0, 9))],
)
def test_a_colour_is_read(text: str, colour: Colour) -> None:
    assert parse_colour(text) == colour


@pytest.mark.parametrize("text", ["", "white", "#fff", "#gggggg", "1,2", "1,2,256", "1,2,3,4", "-1,0,0"])
def test_anything_else_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(RequestError, match="allowed: #rrggbb or three numbers") as refusal:
        parse_colour(text)
    assert "\n" not in str(refusal.value)
