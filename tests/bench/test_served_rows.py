"""Published servers, simulated by users who ask again: one at a time, and never more than there are.

Modules: `benchmarks/planning/silicon.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from benchmarks.planning.silicon import (
    ASKED_S,
    PASS_S,
    ClosedLoop,
    least_tpot_s,
    on_a_server,
    published_rows,
    served,
    served_error_rows,
    served_rows,
)
from epd.kv.pass_limits import SchedulerConfig
from epd.profiles.analytic import analytic_profile
from epd.simulate.clock import TICKS_PER_S
from epd.simulate.requests import Job

PROFILE = analytic_profile("h100", "qwen3-vl-8b")
HEAD = "model_path,system,backend,mode,gemm_quant_mode,batch_size,isl,osl,tp_size,moe_tp_size,moe_ep_size,"


def test_one_user_waits_for_nobody() -> None:
    """A prompt of 1,000 tokens is one pass, and each of 9 tokens after the first one more."""
    ttft_s, tpot_s = served(PROFILE, 1, 1, 1000, 10)
    assert ttft_s == pytest.approx(PROFILE.prefill.cost.seconds(1000, 1000 * 1001 / 2), rel=1e-6)
    steps_s = [PROFILE.decode.cost.seconds(1, 1000 + number) for number in range(1, 10)]
    assert tpot_s == pytest.approx(sum(steps_s) / 9, rel=0.001)


def test_each_user_asks_again_when_answered_and_not_before() -> None:
    jobs = [Job(number, 0, (), 100, 5, number, number) for number in range(12)]
    rows = ClosedLoop(PROFILE, 1, SchedulerConfig(8192, 256, 8192), jobs[3:]).run(jobs[:3]).rows
    assert sorted(row["index"] for row in rows) == list(range(12))
    ends = sorted(row["end"] for row in rows)
    later = sorted(row["due"] for row in rows if row["index"] >= 3)
    assert later == ends[:9]


def test_the_first_questions_come_at_once_and_are_counted() -> None:
    """Eight users, ten questions each: the first ones wait for each other, and the mean is of all of them.

    A pass takes the users, a prompt and 1,500 tokens more.
    """
    jobs = [Job(number, 0, (), 4096, 300, number, number) for number in range(80)]
    config = SchedulerConfig(5604, 8, 5604)
    rows = ClosedLoop(PROFILE, 1, config, jobs[8:]).run(jobs[:8]).rows
    waits_s = [(row["first_token"] - row["due"]) / TICKS_PER_S for row in rows]
    first_s = [wait_s for row, wait_s in zip(rows, waits_s, strict=True) if row["index"] < 8]
    assert fmean(first_s) > 1.5 * fmean(waits_s)
    assert served(PROFILE, 1, 8, 4096, 300)[0] == pytest.approx(fmean(waits_s), rel=1e-9)


def test_a_question_is_on_its_way_for_as_long_as_it_has_tokens() -> None:
    """Nine of ten questions of a user wait, by chance for none to twice of 1 us a token."""
    still_s, _ = served(PROFILE, 1, 1, 4000, 2)
    found_s = [served(PROFILE, 1, 1, 4000, 2, asked_s)[0] - still_s for asked_s in (1e-6, 2e-6)]
    assert 0.5 * 4e-3 < found_s[0] < 1.5 * 4e-3
    assert found_s[1] == pytest.approx(2 * found_s[0], rel=1e-6)


def test_the_host_takes_its_part_of_each_pass_on_any_number_of_devices() -> None:
    assert PROFILE.parallel is not None
    shared = {2: (PROFILE.prefill, PROFILE.decode)}
    slower = on_a_server(replace(PROFILE, parallel=replace(PROFILE.parallel, shared=shared))).on(2)
    for before, after in ((PROFILE.prefill, slower.prefill), (PROFILE.decode, slower.decode)):
        assert after.cost.seconds(100, 100) == pytest.approx(before.cost.seconds(100, 100) + PASS_S)


def test_the_first_questions_are_on_their_way_too() -> None:
    """Four users at once: the engine begins with the first that is there, without the others."""
    at_once, _ = served(PROFILE, 1, 4, 4000, 2)
    jobs = [Job(number, 0, (), 4000, 2, number, number) for number in range(4)]
    rows = ClosedLoop(PROFILE, 1, SchedulerConfig(5504, 4, 5504), (), 1e-6).run(jobs).rows
    alone_s = PROFILE.prefill.cost.seconds(4000, 4000 * 4001 / 2)
    firsts_s = sorted((row["first_token"] - row["due"]) / TICKS_PER_S for row in rows)
    assert alone_s < firsts_s[0] < alone_s + 2 * 4e-3
    assert firsts_s[0] < at_once


def test_a_row_faster_than_its_memory_had_more_servers() -> None:
    """16 users with 4,000 tokens each, by 144 kB a token (36 layers), beside weights of 16.4 GB."""
    row = {"batch_size": "16", "isl": "3999", "osl": "2", "tp_size": "2"}
    kv_bytes = 16 * 4000 * 36 * 2 * 8 * 128 * 2
    expected = (PROFILE.memory.language_weight_bytes + kv_bytes) / 2 / 1e12
    assert least_tpot_s(row, PROFILE, 1e12) == pytest.approx(expected)


def test_rows_of_other_types_models_and_forms_are_left_out(tmp_path: Path) -> None:
    own = "Qwen/Qwen3-32B,h100_sxm,vllm,agg,,2,64,4,2,1,1,{ttft},5.0"
    changes = (("vllm", "sglang"), ("agg,,", "agg,fp8,"), ("-32B", "-8B"), ("4,2,1,1", "4,2,1,2"))
    others = [own.replace(*pair) for pair in changes]
    lines = [
        HEAD + "silicon_ttft_ms,silicon_tpot_ms",
        *(each.format(ttft=9) for each in others),
        own.format(ttft=100.0),
    ]
    (tmp_path / "silicon_sample.csv").write_text("\n".join(lines), encoding="utf-8")
    (row,) = served_rows(PROFILE, published_rows(tmp_path))
    assert row["held out"] == "yes"
    ttft_s, tpot_s = served(PROFILE, 2, 2, 64, 4, ASKED_S)
    assert row["TTFT ms"] == "100.0"
    assert row["TTFT error"] == f"{ttft_s / 0.1 - 1:+.0%}"
    assert row["TPOT error"] == f"{tpot_s / 0.005 - 1:+.0%}"
    told = {(each["devices"], each["of"]): each["median %"] for each in served_error_rows([row])}
    sizes = {name: abs(int(row[f"{name} error"].rstrip("%"))) for name in ("TTFT", "TPOT")}
    assert told == {(degree, name): size for degree in (2, "all") for name, size in sizes.items()}
