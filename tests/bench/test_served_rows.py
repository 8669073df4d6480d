"""Published servers, simulated by users who ask again: one at a time, and never more than there are.

Modules: `benchmarks/planning/silicon.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.planning.silicon import ClosedLoop, published_rows, served, served_error_rows, served_rows
from epd.profiles.analytic import analytic_profile
from epd.simulate.requests import Job

PROFILE = analytic_profile("h100", "qwen3-vl-8b")
HEAD = "model_path,system,backend,mode,gemm_quant_mode,batch_size,isl,osl,tp_size,"


def test_one_user_waits_for_nobody() -> None:
    """A prompt of 1,000 tokens is one pass, and each of 9 tokens after the first one more."""
    ttft_s, tpot_s = served(PROFILE, 1, 1, 1000, 10)
    assert ttft_s == pytest.approx(PROFILE.prefill.cost.seconds(1000, 1000 * 1001 / 2), rel=1e-6)
    steps_s = [PROFILE.decode.cost.seconds(1, 1000 + number) for number in range(1, 10)]
    assert tpot_s == pytest.approx(sum(steps_s) / 9, rel=0.001)


def test_each_user_asks_again_when_answered_and_not_before() -> None:
    jobs = [Job(number, 0, (), 100, 5, number, number) for number in range(12)]
    rows = ClosedLoop(PROFILE, 1, jobs[3:]).run(jobs[:3]).rows
    assert sorted(row["index"] for row in rows) == list(range(12))
    ends = sorted(row["end"] for row in rows)
    later = sorted(row["due"] for row in rows if row["index"] >= 3)
    assert later == ends[:9]


def test_rows_of_other_types_models_and_forms_are_left_out(tmp_path: Path) -> None:
    own = "Qwen/Qwen3-32B,h100_sxm,vllm,agg,,2,64,4,2,{ttft},5.0"
    others = [own.replace(*pair) for pair in (("vllm", "sglang"), ("agg,,", "agg,fp8,"), ("-32B", "-8B"))]
    lines = [
        HEAD + "silicon_ttft_ms,silicon_tpot_ms",
        *(each.format(ttft=9) for each in others),
        own.format(ttft=100.0),
    ]
    (tmp_path / "silicon_sample.csv").write_text("\n".join(lines), encoding="utf-8")
    (row,) = served_rows(PROFILE, published_rows(tmp_path))
    ttft_s, tpot_s = served(PROFILE, 2, 2, 64, 4)
    assert row["TTFT ms"] == "100.0"
    assert row["TTFT error"] == f"{ttft_s / 0.1 - 1:+.0%}"
    assert row["TPOT error"] == f"{tpot_s / 0.005 - 1:+.0%}"
    told = {(each["devices"], each["of"]): each["median %"] for each in served_error_rows([row])}
    sizes = {name: abs(int(row[f"{name} error"].rstrip("%"))) for name in ("TTFT", "TPOT")}
    assert told == {(degree, name): size for degree in (2, "all") for name, size in sizes.items()}
