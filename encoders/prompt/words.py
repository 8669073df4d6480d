"""Spells whole numbers in English words, as some prompts do."""

from __future__ import annotations

_SMALL = [
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    *("ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen"),
    "nineteen",
]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def number_in_words(number: int) -> str:
    """Spells 0 to 999,999: `one hundred and two`, `one thousand and one`, `two thousand, one hundred`.

    Raises ValueError beyond.
    """
    if not 0 <= number < 1_000_000:
        raise ValueError(f"only 0 to 999999 can be spelled, got {number}")
    if number < 1000:
        return _below_thousand(number)
    thousands, rest = divmod(number, 1000)
    words = f"{_below_thousand(thousands)} thousand"
    if rest == 0:
        return words
    return f"{words}{' and ' if rest < 100 else ', '}{_below_thousand(rest)}"


def _below_thousand(number: int) -> str:
    hundreds, rest = divmod(number, 100)
    if hundreds == 0:
        return _below_hundred(rest)
    words = f"{_SMALL[hundreds]} hundred"
    return f"{words} and {_below_hundred(rest)}" if rest else words


def _below_hundred(number: int) -> str:
    if number < 20:
        return _SMALL[number]
    tens, ones = divmod(number, 10)
    return f"{_TENS[tens - 2]}-{_SMALL[ones]}" if ones else _TENS[tens - 2]
