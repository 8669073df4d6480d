"""Lists every layout of a few devices: kinds of workers mixed at will."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations_with_replacement, groupby

from epd.topology import Topology, parse_topology

_KINDS = ("e", "ed", "ep", "epd", "p", "pd", "d")


def mixes(num_devices: int) -> Iterator[Topology]:
    """Yields every layout that does all stages: 168 of four devices, 2,871 of eight."""
    for chosen in combinations_with_replacement(_KINDS, num_devices):
        if set("epd") <= set("".join(chosen)):
            yield parse_topology("".join(f"{len([*same])}{kind}" for kind, same in groupby(chosen)))
