"""Lists every prediction beside what was measured, none of which it was fitted to, with errors by source.

    python -m benchmarks.planning.held_out

Reads what other benchmarks have kept, and measures nothing: score.json, replicas_comparison.json,
draft_prediction.json and silicon.json of benchmarks/results. Writes held_out.md there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median

from benchmarks.reporting import RESULTS, Row, markdown
from epd.bench.compare_report import Pair, p90_of

AIM_MEDIAN, AIM_P90 = 0.10, 0.25
OURS = "the application on 2 CPU cores"
VIRTUAL = "the application in virtual time"
DRAFTS = "drafts, corrected in view of the run"
KERNELS = "one H100, by tables of kernels"
SHEET = "one H100, by its data sheet"
SERVERS = "vLLM's servers on H100, by tables"
IN_8_BITS = "vLLM's servers in 8 bits, by tables"
REASONS = {
    SERVERS: "two devices, prompts of 1,024: simulated passes take two, measured ones look like one",
    IN_8_BITS: "experts: their kernels are of a later vLLM, and prompts of 1,000 as above",
}


@dataclass(frozen=True, slots=True)
class Prediction:
    """Holds one figure in seconds. source: who measured it and by what it was predicted"""

    source: str
    what: str
    figure: str
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    def row(self) -> Row:
        return {
            "source": self.source,
            "of": self.what,
            "figure": self.figure,
            "measured ms": f"{1000 * self.measured_s:.2f}",
            "predicted ms": f"{1000 * self.predicted_s:.2f}",
            "error": f"{self.error:+.1%}",
        }


def _kept(name: str) -> Row:
    found: Row = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def live() -> Iterator[Prediction]:
    """Yields the pairs of `make score`: images, videos, sound, and fewer visual tokens."""
    for pair in _kept("score")["pairs"]:
        case = pair["case"]
        what = f"{case['topology']}, {case['workload']}, retention {case['retention']:g}"
        yield Prediction(OURS, what, pair["figure"], pair["live_s"], pair["simulated_s"])


def virtual() -> Iterator[Prediction]:
    """Yields the medians of each layout and rate of `benchmarks.epd_pays.replicas`."""
    for pair in (Pair(**each) for each in _kept("replicas_comparison")["summary"]["pairs"]):
        what = f"{pair.layout}, {pair.traffic}, {pair.rate:g}/s"
        yield Prediction(VIRTUAL, what, pair.name, pair.measured_s, pair.simulated_s)


def drafts() -> Iterator[Prediction]:
    """Yields the seconds of a token with drafts, which is one pass or less."""
    for row in _kept("draft_prediction")["drafts"]:
        measured, predicted = (float(each) / 1000 for each in row["TPOT with, ms"].split(" / "))
        yield Prediction(DRAFTS, f"{row['topology']}, {row['answers']}", "TPOT", measured, predicted)


def kernels() -> Iterator[Prediction]:
    """Yields the stages of qwen2.5-vl-7b on our H100, by published tables and by the data sheet."""
    for row in _kept("silicon")["held_out"]:
        measured = float(row["measured ms"]) / 1000
        if row["held out"] == "yes":
            yield Prediction(KERNELS, row["units"], row["stage"], measured, float(row["tables ms"]) / 1000)
            yield Prediction(SHEET, row["units"], row["stage"], measured, float(row["data sheet ms"]) / 1000)


def servers() -> Iterator[Prediction]:
    """Yields the servers of vLLM that AIConfigurator lists, but those that gave the constants."""
    for section, source in (("served", SERVERS), ("served_in_8_bits", IN_8_BITS)):
        for row in (each for each in _kept("silicon")[section] if each["held out"] == "yes"):
            what = f"{row['devices']} devices, {row['users']} users, {row['prompt']} + {row['answer']} tokens"
            if "server" in row:
                what = f"{row['server']}, {what}"
            for name in ("TTFT", "TPOT"):
                pair = (float(row[each]) / 1000 for each in (f"{name} ms", f"simulated {name}"))
                yield Prediction(source, what, name, *pair)


def error_rows(found: Sequence[Prediction]) -> Iterator[Row]:
    """Yields the errors of each source without signs, and of all of its figures together."""
    for source in dict.fromkeys(each.source for each in found):
        own = [each for each in found if each.source == source]
        figures = list(dict.fromkeys(each.figure for each in own))
        for figure in (*figures, "all") if len(figures) > 1 else figures:
            sizes = [abs(each.error) for each in own if figure in (each.figure, "all")]
            is_met = median(sizes) <= AIM_MEDIAN and p90_of(sizes) <= AIM_P90
            yield {
                "source": source,
                "figure": figure,
                "rows": len(sizes),
                "median": f"{median(sizes):.1%}",
                "p90": f"{p90_of(sizes):.1%}",
                "highest": f"{max(sizes):.1%}",
                "aim": "met" if is_met else "missed",
                "why": "" if is_met else REASONS.get(source, "not known"),
            }


def page() -> str:
    found = list(chain(live(), virtual(), drafts(), kernels(), servers()))
    results = {
        "setting": {
            "aim": f"median {AIM_MEDIAN:.0%}, 90th percentile {AIM_P90:.0%}, for each source",
            "rows": f"{len(found)} predictions, each of which is listed",
            "p90": "nine of ten errors are at most as large; score.md interpolates",
            "left out": "rows that gave a constant: two of our H100, ten of vLLM's servers (silicon.md), and "
            "two in 8 bits that read faster than their memory can. The forms of the models were chosen after "
            "all rows were seen",
            "of the application in virtual time": "devices are paced by the same costs, so errors are of "
            "scheduling alone",
        },
        "errors": list(error_rows(found)),
        "rows": [each.row() for each in found],
    }
    titles = {"errors": "Errors by source", "rows": "Each prediction"}
    return markdown(
        "Predictions beside measurements", "python -m benchmarks.planning.held_out", results, titles
    )


def main() -> None:
    (RESULTS / "held_out.md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
