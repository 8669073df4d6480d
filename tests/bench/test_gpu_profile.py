"""A profile of what `make gpu` measured: near every measured time, and taken by the planner's files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.engine.gpu_profile import compared, profile_of
from benchmarks.reporting import RESULTS
from epd.profiles.analytic import analytic_profile
from epd.profiles.files import dump_profile, parse_profile

COMPUTED = analytic_profile("h100", "qwen2.5-vl-7b")


def leaves(text: str) -> dict[str, object]:
    """Returns what a JSON text holds by path: fitted coefficients differ in the last digit by processor."""

    def inside(path: str, value: Any) -> Iterator[tuple[str, object]]:
        if not isinstance(value, (dict, list)):
            yield path, value
        else:
            for name, part in value.items() if isinstance(value, dict) else enumerate(value):
                yield from inside(f"{path}/{name}", part)

    return dict(inside("", json.loads(text)))


def test_the_kept_results_make_the_kept_profile() -> None:
    measured = json.loads((RESULTS / "gpu.json").read_text(encoding="utf-8"))
    profile = profile_of(measured, COMPUTED)
    kept = parse_profile((RESULTS / "gpu_profile.json").read_text(encoding="utf-8"))
    found, expected = leaves(dump_profile(profile)), leaves(dump_profile(kept))
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        near = pytest.approx(value, rel=1e-9, abs=1e-15) if isinstance(value, float) else value
        assert found[path] == near, path
    assert not profile.is_analytic
    assert profile.media == COMPUTED.media
    for row in compared(profile, COMPUTED):
        assert abs(row["fitted ms"] / row["measured ms"] - 1) < 0.05, row


def test_small_passes_are_a_floor_and_two_lengths_tell_tokens_from_requests() -> None:
    """Times by hand: 10 ms, or 2 us a patch; 5 ms a step, 0.1 ms a request and 1 us a thousand tokens."""
    encode = [
        {"patches": patches, "tower ms": max(10.0, 2e-3 * patches), "patches ms": 0.0}
        for patches in (500, 4000, 20_000, 40_000)
    ]
    prefill = [
        {"tokens": tokens, "ms": 0.02 * tokens + 1e-9 * tokens * tokens} for tokens in (256, 1024, 4096)
    ]
    decode = [
        {
            "what": "engine step, run ahead",
            "requests": requests,
            "context": context,
            "ms": 5 + 0.1 * requests + 1e-6 * requests * context,
        }
        for requests, context in ((1, 2000), (8, 2000), (32, 2000), (8, 30_000))
    ]
    sections = {"encode": encode, "prefill": prefill, "decode": decode}
    measured = {name: {"rows": rows} for name, rows in sections.items()}
    setting = {"device": "a chip", "date": "today", "torch": "3"}
    profile = profile_of({**measured, "setting": setting}, replace(COMPUTED, name="it"))
    assert round(profile.encode.cost.seconds(600), 6) == 0.010
    assert round(profile.encode.cost.seconds(30_000), 6) == 0.060
    assert round(profile.decode.cost.per_item_s * 1e9, 3) == 1.0
    assert profile.name == "it, measured"
