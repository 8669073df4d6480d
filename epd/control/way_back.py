"""Chooses the cheapest way back to the keys and values of a prompt whose media were seen before.

    parts of a prompt    | 0 | 1 | 2 | 3 | 4 | 5 |
    keys and values      | read  |                    first: each token needs all those before it
    embeddings, or       |       | read  |     5 |    whichever is there sooner, part by part
    frames               |       |       | 3 4 |      decoded, then encoded
    prefill              |       | 2 | 3 | 4 | 5 |    beside, as they come

Pure policy. The server gives it what it measured lately, the simulator the costs of a profile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# Numbers of parts that are tried, beside none and all.
_NUM_TRIED = 31


@dataclass(frozen=True, slots=True)
class PartCosts:
    """Holds the seconds of a part of a prompt; infinite for a way that is closed.

    kv_s: to read its keys and values
    embeddings_s: to read its embeddings
    decode_s: to decode its frames, in one of several threads
    encode_s: to encode them
    prefill_s: to compute its keys and values from embeddings
    """

    kv_s: float = math.inf
    embeddings_s: float = math.inf
    decode_s: float = 0.0
    encode_s: float = math.inf
    prefill_s: float = 0.0

    @property
    def reads_embeddings(self) -> bool:
        """Returns whether its embeddings are read, among many parts that are decoded and encoded at once."""
        return self.embeddings_s <= max(self.decode_s, self.encode_s)


@dataclass(frozen=True, slots=True)
class WayBack:
    """Says how a prompt comes back.

    num_kv: leading parts whose keys and values are read
    embeddings: numbers of the later parts whose embeddings are read; the others are encoded
    seconds: until all keys and values are there
    """

    num_kv: int
    embeddings: tuple[int, ...]
    seconds: float


def cheapest(parts: Sequence[PartCosts], num_threads: int = 1) -> WayBack:
    """Returns the cheapest way; of equal ones, that which reads the keys and values of more parts.

    num_threads: that decode. Of many parts, not every number is tried.
    """
    return min((_way(parts, num_kv, num_threads) for num_kv in _tried(len(parts))), key=_seconds)


def _tried(num_parts: int) -> Iterator[int]:
    step = math.ceil(max(1, num_parts) / (_NUM_TRIED + 1))
    yield from range(num_parts, 0, -step)
    yield 0


def _seconds(way: WayBack) -> float:
    return way.seconds


def _way(parts: Sequence[PartCosts], num_kv: int, num_threads: int) -> WayBack:
    """Plays a way: the disk, the tower and the language model each take one part after another."""
    start_s = sum(part.kv_s for part in parts[:num_kv])
    disk_s = tower_s = prefill_s = start_s
    embeddings: list[int] = []
    for number in range(num_kv, len(parts)):
        part = parts[number]
        num_decoded = number - num_kv - len(embeddings)
        frames_s = start_s + part.decode_s * (1 + num_decoded // num_threads)
        read_s, encoded_s = disk_s + part.embeddings_s, max(tower_s, frames_s) + part.encode_s
        if read_s <= encoded_s:
            embeddings.append(number)
            disk_s = read_s
        else:
            tower_s = encoded_s
        prefill_s = max(prefill_s, min(read_s, encoded_s)) + part.prefill_s
    return WayBack(num_kv, tuple(embeddings), prefill_s)
