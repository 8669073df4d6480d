"""Chooses where a video is decoded: by the CPU's threads or by a GPU's decoders, and under load by both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Threads of a CPU that decode as fast as the decoders of a GPU: three (an L40S has three, an H100 seven) of
# 600 frames of 1080p a second, where a thread decodes 72. An assumption, until `make gpu` has measured it.
THREADS_OF_A_GPU = 25


@dataclass(frozen=True, slots=True)
class DecoderLoad:
    """What decodes videos at one place.

    threads: of a CPU that are as fast as all of it
    work: that has been given to it and is not done, in any unit
    """

    threads: int
    work: float = 0.0


def soonest(places: Sequence[DecoderLoad], work: float) -> int:
    """Returns the number of the place that is through with a video first; of equal ones the first.

    work: of that video
    """
    return min(range(len(places)), key=lambda place: (places[place].work + work) / places[place].threads)
