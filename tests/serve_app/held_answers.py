"""Decode workers that make no more tokens while they are told to hold: answers stay in their middle.

So an answer needs no length that outlasts what happens meanwhile, however slow the machine is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from epd.stages.decode import DecodeStage
from epd.stages.engine.generation import StepResult
from epd.topology import Stage

# A worker holds when each of its answers has the few tokens, or one has the many.
FEW, MANY = 4, 64


def hold(stage: DecodeStage, is_held: Callable[[], bool]) -> None:
    """Lets a decode stage compute nothing while it is held, from when its answers have begun.

    Answers that arrive or move away are taken and handed on all the same.
    """
    engine: Any = stage.engine
    step = engine.step

    def held_step() -> StepResult:
        if is_held():
            nums = [sequence.num_generated for sequence in engine._sequences.values()]
            if nums and (min(nums) >= FEW or max(nums) >= MANY):
                return StepResult()
        result: StepResult = step()
        return result

    engine.step = held_step


class HeldAnswers:
    """Implements `WorkerPace` for workers in threads. is_on: whether decode workers hold."""

    def __init__(self) -> None:
        self.is_on = False

    def slow(self, stage: Stage, role: Any) -> None:
        if stage == "decode":
            hold(role.stage, lambda: self.is_on)

    def started(self, start_s: float) -> None:
        """New roles need no time of their own."""
