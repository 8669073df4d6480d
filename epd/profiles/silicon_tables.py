"""Reads AIConfigurator's tables, in Parquet or text, and latencies between the sizes of a table."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epd.errors import RequestError
from epd.late_module import LateModule

parquet = LateModule("pyarrow.parquet")  # brought by an extra

BACKENDS = ("vllm", "sglang", "trtllm")
_MAX_FILE_BYTES = 256 << 20
Row = Mapping[str, Any]


def number(row: Row, name: str) -> float:
    return float(row[name])


@dataclass(frozen=True)
class Grid:
    """Holds latencies in seconds by two sizes: rows of the first, points of the second in each."""

    points: Mapping[float, Mapping[float, float]]

    @classmethod
    def of(cls, rows: Iterable[tuple[float, float, float]]) -> Grid:
        """rows: (first, second, seconds). Of equal sizes, the fastest kernel counts."""
        found: dict[float, dict[float, float]] = {}
        for first, second, seconds in rows:
            known = found.setdefault(first, {})
            known[second] = min(seconds, known.get(second, math.inf))
        return cls(found)

    def seconds(self, first: float, second: float) -> float:
        """Returns the latency; beyond the table it grows in proportion."""
        rows = {each: between(points, second) for each, points in self.points.items()}
        return between(rows, first)


def between(points: Mapping[float, float], size: float) -> float:
    """Returns the value at a size; above all points in proportion, below them that of the first."""
    sizes = sorted(points)
    if size <= sizes[0]:
        return points[sizes[0]]
    if size >= sizes[-1]:
        return points[sizes[-1]] * size / sizes[-1]
    above = next(each for each in sizes if each >= size)
    below = max(each for each in sizes if each < size)
    share = math.log(size / below) / math.log(above / below)
    return math.exp((1 - share) * math.log(points[below]) + share * math.log(points[above]))


def newest(data: Path, stem: str, backend: str, *, is_optional: bool) -> Path | None:
    """Returns the newest file of a table, None if it is optional and there is none. Raises RequestError."""
    files = [
        path
        for path in data.rglob(f"{stem}.*")
        if path.suffix in (".parquet", ".txt", ".csv") and path.parent.parent.name == backend
    ]
    if not files and is_optional:
        return None
    if not files:
        raise RequestError(
            f"received '{data}', which has no {stem} of {backend}; allowed: a copy with that table, or "
            f"another of {', '.join(BACKENDS)}; name another --backend"
        )
    return max(files, key=lambda path: ([int(each) for each in re.findall(r"\d+", path.parent.name)], path))


def read(path: Path) -> Iterator[Row]:
    if path.stat().st_size > _MAX_FILE_BYTES:
        raise RequestError(
            f"received '{path}' of {path.stat().st_size} bytes; allowed: {_MAX_FILE_BYTES}; cut it"
        )
    if path.suffix != ".parquet":
        with path.open(encoding="utf-8", newline="") as file:
            yield from csv.DictReader(file)
        return
    try:
        yield from parquet.read_table(path).to_pylist()
    except ModuleNotFoundError:
        raise RequestError(
            f"received '{path}', a Parquet file, without pyarrow; allowed: epd-vlm with [cloud]; install that"
        ) from None
    except (ValueError, OSError) as error:  # those of pyarrow are such
        reason = " ".join(str(error).split())[:120]
        raise RequestError(f"received '{path}', which cannot be read ({reason}); copy it again") from None
