"""Reads a colour that a user has written."""

from __future__ import annotations

import re
from typing import TypeAlias

from epd.errors import RequestError

# Red, green and blue, 0 to 255.
Colour: TypeAlias = tuple[int, int, int]
WHITE: Colour = (255, 255, 255)


def parse_colour(text: str) -> Colour:
    """Returns the colour of `#rrggbb` or `R,G,B`. Raises RequestError for anything else."""
    if match := re.fullmatch(r"#([0-9a-fA-F]{2})([0-9a-fA-F]{2})([0-9a-fA-F]{2})", text):
        red, green, blue = (int(part, 16) for part in match.groups())
        return red, green, blue
    parts = re.fullmatch(r"\[?\s*(\d{1,3})\s*,\s*(\d{1,3})\s*,\s*(\d{1,3})\s*\]?", text)
    if parts and max(levels := [int(part) for part in parts.groups()]) < 256:
        return levels[0], levels[1], levels[2]
    raise RequestError(
        f"received the colour {text!r}; allowed: #rrggbb or three numbers from 0 to 255, as 255,255,255; "
        "write it like one of these"
    )
