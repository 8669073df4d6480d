"""Chooses where a video is decoded: by the CPU's threads or by a GPU's decoders, and under load by both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Decoders that a GPU has at least (an L40S three, an H100 seven), and CPU threads that are as fast as one:
# 600 frames of 1080p a second, where a thread decodes 72. Assumptions, until `make gpu` has measured them.
DECODERS_OF_A_GPU, THREADS_OF_A_DECODER = 3, 8
THREADS_OF_A_GPU = DECODERS_OF_A_GPU * THREADS_OF_A_DECODER


@dataclass(frozen=True, slots=True)
class DecoderLoad:
    """What decodes videos at one place.

    threads: of a CPU that are as fast as all of it together
    work: that has been given to it and is not done, in any unit
    """

    threads: int
    work: float = 0.0


def soonest(places: Sequence[DecoderLoad], work: float) -> int:
    """Returns the number of the place that is through with a video first; of equal ones the first.

    work: of that video
    """
    return min(range(len(places)), key=lambda place: (places[place].work + work) / places[place].threads)
