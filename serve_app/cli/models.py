"""The command `epd models`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

from epd import console
from epd.models.families import FAMILIES, REFUSED, Family
from epd.serve_app.cli.options import IsJson

COLUMNS = ("model_type", "checkpoints", "computed by", "takes", "a video in", "limit")


def models(as_json: IsJson = False) -> None:
    """List the model families that load, and who computes each.

    native is an adapter of this project; transformers is its own processor and vision tower.
    """
    if as_json:
        known = [asdict(each) for each in FAMILIES.values()]
        console.stream_text(json.dumps({"families": known, "refused": dict(REFUSED)}, indent=1) + "\n")
        return
    rows = [COLUMNS, *(tuple(cells(family)) for family in FAMILIES.values())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        console.stream_text("  ".join(padded).rstrip() + "\n")
    for model_type, reason in REFUSED.items():
        console.stream_text(f"refused: {model_type}, {reason}\n")


def cells(family: Family) -> Iterator[str]:
    """Yields a family's cells, by `COLUMNS`."""
    unit = family.frames_per_unit
    yield from (family.model_type, family.name, family.impl, " and ".join(family.takes))
    yield "" if unit is None else console.counted(unit, "frame")
    yield family.limit
