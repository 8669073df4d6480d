"""Whether profiles from published tables of kernels agree with what we measured on an H100.

    python -m benchmarks.planning.silicon FOLDER

FOLDER is a copy of github.com/ai-dynamo/aiconfigurator. Nothing of it is fitted to our measurement, each row
of which is listed: qwen2.5-vl-7b, benchmarks/results/gpu_profile.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from benchmarks.reporting import RESULTS, Row, Section, run_sections, setting
from epd.profiles.files import load_profile
from epd.profiles.profile import Profile
from epd.profiles.silicon import load_silicon, silicon_profile

MODEL, OURS = "qwen2.5-vl-7b", RESULTS / "gpu_profile.json"
DEVICES = ("h100", "h200", "b200", "gb200", "l40s")
STAGES = ("encode", "prefill", "decode")


def held_out_rows(tables: Profile, ours: Profile) -> Iterator[Row]:
    """Yields each measured point, beside the profile of the tables and that of the data sheet."""
    sheet = load_profile(f"{MODEL}@h100")
    for stage in STAGES:
        for point in getattr(ours, stage).measurements:
            measured_s = point.median_s
            found_s, sheet_s = (
                getattr(each, stage).cost.seconds(point.units, point.items) for each in (tables, sheet)
            )
            yield {
                "stage": stage,
                "units": f"{point.units:.0f} {getattr(ours, stage).units}",
                "measured ms": f"{1000 * measured_s:.2f}",
                "tables ms": f"{1000 * found_s:.2f}",
                "error": f"{found_s / measured_s - 1:+.0%}",
                "data sheet": f"{sheet_s / measured_s - 1:+.0%}",
            }


def error_rows(rows: Sequence[Row]) -> Iterator[Row]:
    """Yields the errors by stage, without their signs."""
    for stage in (*STAGES, "all"):
        for name in ("error", "data sheet"):
            own = [abs(int(row[name].rstrip("%"))) for row in rows if stage in (row["stage"], "all")]
            yield {
                "stage": stage,
                "of": name,
                "points": len(own),
                "median %": median(own),
                "highest %": max(own),
            }


def device_rows(profiles: Sequence[Profile]) -> Iterator[Row]:
    """Yields what each device takes for the same work, and how well the cost fits its tables."""
    for each in profiles:
        yield {
            "device": each.device,
            "encode 16384 patches ms": f"{1000 * each.encode.cost.seconds(16_384, 1):.1f}",
            "prefill 8192 tokens ms": f"{1000 * each.prefill.cost.seconds(8192, 8192 * 8193 / 2):.1f}",
            "decode 32 x 2048 ms": f"{1000 * each.decode.cost.seconds(32, 65_536):.2f}",
            "fit error": " / ".join(f"{getattr(each, stage).error:.1%}" for stage in STAGES),
            "tables": each.assumptions[0].partition("(")[2].rstrip(")"),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    profiles = [silicon_profile(load_silicon(options.folder, each), each, MODEL) for each in DEVICES]
    rows = list(held_out_rows(profiles[0], load_profile(str(OURS))))
    sections = {
        "held_out": Section("Our H100, point by point", lambda: rows),
        "errors": Section("Errors, of tables and of the data sheet", lambda: list(error_rows(rows))),
        "devices": Section("The same work on each device", lambda: list(device_rows(profiles))),
    }
    run_sections(
        "silicon",
        "Profiles from published tables",
        sections,
        list(sections),
        lambda: setting(("pyarrow",)),
        module="planning.silicon FOLDER",
    )


if __name__ == "__main__":
    main()
