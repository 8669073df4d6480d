"""Remembers past switches, so that roles do not oscillate."""

from __future__ import annotations

from dataclasses import dataclass

from epd.control.elasticity.cluster import Roles
from epd.topology import Stage


@dataclass(frozen=True, slots=True)
class _Change:
    at_s: float
    worker: str
    gained: frozenset[Stage]
    lost: frozenset[Stage]


class SwitchHistory:
    """Keeps switches of the last memory_s and counts a stage's turns: from gaining workers to losing them."""

    def __init__(self, memory_s: float) -> None:
        self.memory_s = memory_s
        self._changes: list[_Change] = []

    def add(self, now_s: float, worker: str, old: Roles, new: Roles) -> None:
        self._changes = [each for each in self._changes if each.at_s > now_s - self.memory_s]
        self._changes.append(_Change(now_s, worker, new - old, old - new))

    def withdraw(self, worker: str) -> None:
        """Removes the last switch of the worker, which did not take place."""
        for index in range(len(self._changes) - 1, -1, -1):
            if self._changes[index].worker == worker:
                del self._changes[index]
                return

    def turns(self, now_s: float, old: Roles, new: Roles) -> tuple[int, float]:
        """Returns the turns of a stage with this switch, and the seconds since it last changed the other way.

        The stage with the most turns counts; (0, infinity) if no stage turns.
        """
        found = (0, float("inf"))
        for stage in old ^ new:
            count, other_s = self._turns(now_s, stage, gains=stage in new)
            if count > found[0]:
                found = (count, now_s - other_s)
        return found

    def _turns(self, now_s: float, stage: Stage, *, gains: bool) -> tuple[int, float]:
        count, last, other_s = 0, None, float("-inf")
        for each in self._changes:
            if each.at_s <= now_s - self.memory_s or stage not in each.gained | each.lost:
                continue
            is_gain = stage in each.gained
            count += last is not None and is_gain != last
            last = is_gain
            if is_gain != gains:
                other_s = each.at_s
        count += last is not None and last != gains
        return count, other_s
