"""Reads rates as people write them: 20, 20/s, 20/min, 1000/h, 5000/day."""

from __future__ import annotations

import math

from epd.errors import RequestError

_SECONDS = {
    "s": 1,
    "sec": 1,
    "min": 60,
    "minute": 60,
    "h": 3600,
    "hour": 3600,
    "day": 86_400,
    "month": 2_628_000,
}


def rate_of(text: str | float) -> float:
    """Returns a rate per second. Raises RequestError for anything but a number above 0 and a unit of time."""
    number, _, unit = str(text).partition("/")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    seconds = _SECONDS.get(unit.strip() or "s")
    if not 0 < value < math.inf or seconds is None:
        raise RequestError(
            f"received the rate {text!r}; allowed: a number above 0, alone for each second, or with one of "
            f"{', '.join(f'/{name}' for name in _SECONDS)}; try 20/min"
        )
    return value / seconds
