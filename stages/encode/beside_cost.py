"""Measures how much a batch of the tower and decode passes of one worker slow each other.

    alone    | pass | pass | pass | pass |           | batch .... |
    beside   | pass  | pass  | pass  | pass  |       in turns, so that a slow moment is in all three
             | batch .......................... |

By wall time, since a thread that waits for Python's lock takes no CPU time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import quantiles

import torch

from epd.profiles.measuring import Action, timed
from epd.stages.encode.beside import BesideThread


def beside_of(
    encode: Action, step: Action, device: torch.device, num_rounds: int, clock: Callable[[], float]
) -> float:
    """Returns how many times as long both take while both run, 1 to 2: the lower quartile of rounds.

    Others on the machine only slow what runs together, and above 2 turns would be as good.

    encode, step: a batch of the tower, and a decode pass, many of which fit into the batch.
    clock: wall time; on a GPU, once what was launched is over.
    """
    lane = BesideThread[bool]("profile encode", device, lambda: None)
    try:
        rounds = [_one_round(encode, step, lane, clock) for _ in range(num_rounds + 1)]
    finally:
        lane.close()
    return min(2.0, max(1.0, quantiles(rounds[1:], n=4)[0]))  # the first round does not count


def _one_round(encode: Action, step: Action, lane: BesideThread[bool], clock: Callable[[], float]) -> float:
    """Returns the mean of how many times as long the batch takes, and the passes."""
    encode_s = timed(encode, clock)
    start_s, num_steps = clock(), 0
    lane.start(lambda: _encoded(encode))
    while lane.finish() is None:
        step()
        num_steps += 1
    both_s = clock() - start_s
    steps_s = timed(lambda: [step() for _ in range(num_steps)], clock)
    return (both_s / encode_s + both_s / steps_s) / 2


def _encoded(encode: Action) -> bool:
    with torch.inference_mode():
        encode()
    return True


def wall_clock(device: torch.device) -> Callable[[], float]:
    """Returns the clock for `beside_of`."""

    def completed() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return completed if device.type == "cuda" else time.perf_counter
