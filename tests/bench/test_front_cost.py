"""The layers of a front that are measured in one process answer each kind of request that they get."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from benchmarks.front.front_cost_layers import serve_cases

CASES = [
    {"layer": layer, "what": what, "number": 2, "at_once": 2, "streams": 2}
    for layer, kinds in {"http": ("text",), "orchestration": ("text",), "front": ("text", "video")}.items()
    for what in (*kinds, "token")
]


def test_every_layer_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def run() -> None:
        cases = asyncio.Queue[str]()
        for each in (*map(json.dumps, CASES), ""):
            cases.put_nowait(each)
        await serve_cases(tmp_path, cases)

    asyncio.run(run())
    ready, *costs = capsys.readouterr().out.splitlines()
    assert (ready, len(costs)) == ("ready", len(CASES))
    assert all(float(cost) > 0 for cost in costs)
