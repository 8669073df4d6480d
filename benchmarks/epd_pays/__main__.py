"""Whether splitting pays at equal devices: the same workers split and colocated, each as if it had a device.

    python -m benchmarks.epd_pays [--quick] [--mix NAME] [--rounds N] [--dilate N]

Workers are threads of the real app with shapes-vl. A pass lasts as long as the mix's profile says for the
work that the live scheduler put into it, times N, and so do gaps between arrivals, limits of waiting, times
of the controller of roles and the start of a new role, so that the cores of this machine have the time to
compute it all: N is how much slower everything goes than on the devices. All figures are divided by it again.
Three workers at two factors show whether that changes anything.
Passes that took longer nevertheless are counted as late; a round with more than 5 % of them is not reported.
For the same reason a patch and a token of a prompt stand for many of the device's, in costs and in limits.
Reading media and moving embeddings, keys and values is real and is not paced.

Layouts are the best that the planner finds for a mix: of workers with one role each (split), of `ep` and `d`
(vLLM's), and merged, each with the settings that it chooses. All get the same requests, round by round, at
random times (Poisson). The simulator's figures for the same requests stand beside the measured ones.
Goodput is the highest rate at which 90 % of the requests meet both objectives, on a line between rates.
Rounds are kept one by one in benchmarks/results/epd_pays_rounds.jsonl, and what is there is not run again.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import torch

from benchmarks.epd_pays.live import Round, Times
from benchmarks.epd_pays.mixes import MIXES
from benchmarks.epd_pays.plan import KINDS
from benchmarks.epd_pays.rounds import (
    MOST_LATE,
    ROUNDS,
    THREE,
    Case,
    cases,
    kept_rounds,
    measure,
    three_workers,
)
from benchmarks.epd_pays.tables import (
    ATTAINED,
    Cell,
    attained,
    by_rate,
    cells_of,
    goodput_rows,
    p99,
    tail_rows,
    variant_rows,
    verdict_rows,
)
from benchmarks.reporting import RESULTS, Section, run_sections, setting

matplotlib.use("Agg")
from matplotlib import pyplot as plt

# How much slower than the devices, on two cores that others use too.
DILATE: Mapping[str, float] = {
    "four 4K images": 10.0,
    "texts, each second a long video": 24.0,
    "long videos": 24.0,
}


def draw(cells: Sequence[Cell], path: Path) -> None:
    """Draws attainment and TPOT p99 over the rate, measured and simulated (dashed)."""
    mixes = list({cell.mix.name: cell.mix for cell in cells}.values())
    figure, axes = plt.subplots(2, len(mixes), figsize=(6 * len(mixes), 7), squeeze=False)
    for column, mix in enumerate(mixes):
        for number, kind in enumerate(KINDS):
            own = list(by_rate(cells, mix, kind).values())
            rates = [cell.rate for cell in own]
            label, colour = f"{own[0].topology if own else kind}", f"C{number}"
            for place, of in enumerate((lambda times: attained(times, mix.slo), _tpot_p99_ms)):  # noqa: B023 - used at once
                measured = [of(cell.times) for cell in own]
                simulated = [of(cell.simulated_times) for cell in own]
                axes[place][column].plot(rates, measured, marker="o", color=colour, label=label)
                axes[place][column].plot(rates, simulated, linestyle="--", color=colour)
        axes[0][column].set(title=mix.name, ylabel="share that meets both objectives", ylim=(0, 1.05))
        axes[0][column].axhline(ATTAINED, color="grey", linewidth=0.8)
        axes[0][column].legend()
        axes[1][column].set(xlabel="requests per second of the devices", ylabel="TPOT p99, ms", yscale="log")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _tpot_p99_ms(times: Sequence[Times]) -> float:
    return 1000 * p99(each.tpot_s for each in times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one rate; results are not kept")
    parser.add_argument("--mix", action="append", choices=list(MIXES), help="default: all")
    parser.add_argument("--rounds", type=int, default=2, help="0: only the tables (default: %(default)s)")
    parser.add_argument("--dilate", type=float, help=f"default: {DILATE}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    todo = [
        case
        for index in range(options.rounds)
        for name in options.mix or MIXES
        for case in (
            *cases(MIXES[name], index, options.dilate or DILATE[name]),
            *three_workers(MIXES[name], index),
        )
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rounds.jsonl" if options.quick else ROUNDS
        measure(todo[: len(KINDS)] if options.quick else todo, path)
        report(kept_rounds(path), save=not options.quick)


def report(rounds: Mapping[Case, Round], *, save: bool) -> None:
    """Writes the tables and the plot."""
    cells, late = cells_of(rounds)
    print(f"{len(late)} of {len(rounds)} rounds are not reported: more than {MOST_LATE:.0%} late passes")
    plain = [cell for cell in cells if not cell.variant]
    checked = [cell for cell in cells if cell.variant == THREE]
    sections = {
        "live": Section("Measured, and simulated", lambda: [cell.row() for cell in plain]),
        "goodput": Section("Goodput beside merged workers", lambda: goodput_rows(plain)),
        "tails": Section("TPOT p99 beside merged workers, as times better", lambda: tail_rows(plain)),
        "verdicts": Section("Where splitting wins and loses", lambda: verdict_rows(plain)),
        "dilation": Section("Three workers, slowed more and less", lambda: [cell.row() for cell in checked]),
        "variants": Section(
            "Variants, beside the layout measured in the same rounds",
            lambda: variant_rows([cell for cell in cells if cell.variant != THREE]),
        ),
    }
    here = {"rounds_left_out": f"{len(late)} of {len(rounds)}, with more than {MOST_LATE:.0%} late passes"}
    run_sections(
        "epd_pays",
        "Split and colocated, at equal devices",
        sections,
        list(sections),
        lambda: setting(("torch", "transformers"), **here),
        save=save,
    )
    if save:
        draw(plain, RESULTS / "epd_pays.png")


if __name__ == "__main__":
    main()
