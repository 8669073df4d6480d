"""How late a look at others is. While the one who looks had no core it could hear of nobody: that time counts
against nobody. No I/O; time is passed in, in seconds on any one clock."""

from __future__ import annotations


class Looks:
    """Regular looks, every_s apart."""

    def __init__(self, every_s: float, now_s: float) -> None:
        self._every_s = every_s
        self._looked_s = now_s

    def late_s(self, now_s: float) -> float:
        """Returns how late this look is, at least 0. To be called at each."""
        late_s = max(0.0, now_s - self._looked_s - self._every_s)
        self._looked_s = now_s
        return late_s


def excused(heard_s: float, late_s: float, now_s: float) -> float:
    """Returns a time when something was heard, as if nobody had been silent while a look was late."""
    return min(heard_s + late_s, now_s)
