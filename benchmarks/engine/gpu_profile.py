"""Makes a profile of what `make gpu` measured, for `epd plan --profile`, beside the computed one.

    python -m benchmarks.engine.gpu_profile [--model qwen2.5-vl-7b] [--device h100]

Reads benchmarks/results/gpu.json; writes gpu_profile.json, the profile, and gpu_profile.md, where each
measured time stands beside the computed one. Small passes take the host as long whatever their size, so the
tower and prefill have a floor; above it costs are fitted as `epd profile` fits them. Memory, media and what a
CPU decodes are those of MODEL@DEVICE, and so is what a token of a context costs a decode, unless contexts of
two lengths were measured.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.reporting import RESULTS, Row, table
from epd.profiles.analytic import analytic_profile
from epd.profiles.cost import Measurement, StageTable, fit_roofline, fit_table
from epd.profiles.files import dump_profile
from epd.profiles.profile import Profile

_RAN_AHEAD = "engine step, run ahead"  # the default of workers on a GPU


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine.gpu_profile")
    parser.add_argument(
        "--model", default="qwen2.5-vl-7b", help="whose shape was measured, as in MODEL@DEVICE"
    )
    parser.add_argument("--device", default="h100", help="on which device, as in MODEL@DEVICE")
    options = parser.parse_args()
    measured = json.loads((RESULTS / "gpu.json").read_text(encoding="utf-8"))
    computed = analytic_profile(options.device, options.model)
    profile = profile_of(measured, computed)
    (RESULTS / "gpu_profile.json").write_text(dump_profile(profile), encoding="utf-8")
    rows = compared(profile, computed)
    page = f"# {computed.name}, measured and computed\n\n"
    page += "`python -m benchmarks.engine.gpu_profile`, of gpu.json\n\n"
    (RESULTS / "gpu_profile.md").write_text(page + table(rows) + "\n", encoding="utf-8")
    print(table(rows))


def profile_of(measured: Mapping[str, Any], computed: Profile) -> Profile:
    """Replaces the costs that were measured. measured: sections of gpu.json by name."""
    rows = {name: measured[name]["rows"] for name in ("encode", "prefill", "decode")}
    where = measured["setting"]
    return replace(
        computed,
        name=f"{computed.name}, measured",
        is_analytic=False,
        encode=_encode(rows["encode"]),
        prefill=_prefill(rows["prefill"]),
        decode=_decode(rows["decode"], computed.decode),
        assumptions=(
            f"passes and the tower measured on {where['device']}, {where['date']}, torch {where['torch']}, "
            "in a loop of one process, without an application around them",
            *computed.assumptions[1:],
        ),
    )


def _encode(rows: Sequence[Row]) -> StageTable:
    points = [_point(row["patches"], 0.0, row["tower ms"] + row["patches ms"]) for row in rows]
    return fit_roofline("patches", "groups", points)


def _prefill(rows: Sequence[Row]) -> StageTable:
    points = [_point(row["tokens"], row["tokens"] * (row["tokens"] + 1) / 2, row["ms"]) for row in rows]
    return fit_roofline("new tokens", "token pairs", points)


def _decode(rows: Sequence[Row], computed: StageTable) -> StageTable:
    """Fits steps of the engine. With one length of contexts, tokens and requests cannot be told apart."""
    steps = [row for row in rows if row["what"] == _RAN_AHEAD]
    points = [_point(row["requests"], row["requests"] * row["context"], row["ms"]) for row in steps]
    whole = fit_table("sequences", "context tokens", points)
    if len({row["context"] for row in steps}) > 1:
        return whole
    per_token_s = computed.cost.per_item_s
    less = [_point(each.units, 0.0, 1e3 * (each.median_s - per_token_s * each.items)) for each in points]
    cost = replace(fit_table(whole.units, whole.items, less).cost, per_item_s=per_token_s)
    return replace(whole, cost=cost)


def _point(units: float, items: float, milliseconds: float) -> Measurement:
    return Measurement(float(units), float(items), milliseconds / 1e3, 0.0, 10)


def compared(profile: Profile, computed: Profile) -> list[Row]:
    """Every measured point: its time, the fitted one, and the computed one over the measured."""
    stages: Sequence[tuple[str, Callable[[Profile], StageTable]]] = (
        ("encode", lambda each: each.encode),
        ("prefill", lambda each: each.prefill),
        ("decode", lambda each: each.decode),
    )
    return [
        {
            "stage": stage,
            "units": f"{point.units:.0f} {of(profile).units}",
            "measured ms": round(point.median_s * 1e3, 2),
            "fitted ms": round(of(profile).cost.seconds(point.units, point.items) * 1e3, 2),
            "computed ms": round(of(computed).cost.seconds(point.units, point.items) * 1e3, 2),
            "computed/measured": round(
                of(computed).cost.seconds(point.units, point.items) / point.median_s, 2
            ),
        }
        for stage, of in stages
        for point in of(profile).measurements
    ]


if __name__ == "__main__":
    main()
