"""The command `epd simulate` on workloads and traces: records, plots, and one-line errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from epd.serve_app.cli.program import app

TRACE = """TIMESTAMP,NumImages,ContextTokens,GeneratedTokens
2024-10-15 00:00:00.000000,1,700,20
2024-10-15 00:00:00.400000,0,300,5
2024-10-15 00:00:01.250000,2,1743,12
"""


def run(*options: str) -> None:
    app(["simulate", *options], standalone_mode=False)


def test_the_same_seed_gives_the_same_record(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for seed in ("1", "1", "2"):
        run("--workload", "images", "--rate", "5", "--num-requests", "40", "--seed", seed, "--json")
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    record = json.loads(texts[0])
    assert record["num_requests"] == 40
    assert record["latencies"]["TTFT"]["p50_s"] > 0


def test_media_that_come_again_drafts_and_lanes_are_options(capsys: pytest.CaptureFixture[str]) -> None:
    records = []
    for more in ([], ["--questions-per-media", "4"], ["--draft-acceptance", "0.8"], ["--no-encode-beside"]):
        run(
            "--workload",
            "images",
            "--num-requests",
            "40",
            "--rate",
            "9",
            "--topology",
            "1epd",
            "--json",
            *more,
        )
        records.append(json.loads(capsys.readouterr().out))
    plain, again, drafted, in_turns = records
    assert (plain["num_groups_encoded"], plain["num_cached_tokens"]) == (40, 0)
    assert again["num_groups_encoded"] < 20
    assert again["num_cached_tokens"] > 0
    assert drafted["latencies"]["TPOT"]["p50_s"] < 0.6 * plain["latencies"]["TPOT"]["p50_s"]
    assert in_turns["latencies"] != plain["latencies"]


def test_videos_are_cut_by_tokens_if_wished(capsys: pytest.CaptureFixture[str]) -> None:
    num_groups = []
    for more in ([], ["--group-tokens", "256"], ["--group-tokens", "100000"]):
        run("--workload", "video", "--num-requests", "4", "--rate", "1", "--json", *more)
        num_groups.append(json.loads(capsys.readouterr().out)["num_groups"])
    by_frames, small, large = num_groups
    assert small > by_frames > large == 2 * 4, "of large groups, the first is a small one"


@pytest.mark.parametrize("workload", ["text", "images", "video", "mixed"])
def test_every_preset_can_be_simulated(workload: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(
        "--workload",
        workload,
        "--rate",
        "2",
        "--num-requests",
        "20",
        "--topology",
        "1e1pd",
        "--slo-ttft-s",
        "9",
    )
    assert "20 requests" in capsys.readouterr().out


def test_without_an_objective_nothing_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--workload", "images", "--num-requests", "20"]
    run(*options)
    assert "kept the objectives" not in capsys.readouterr().out
    run(*options, "--json")
    record = json.loads(capsys.readouterr().out)
    assert record["slo_attainment"] is None
    assert record["goodput_per_s"] is None
    run(*options, "--slo-ttft-s", "60")
    assert "100.0% kept the objectives" in capsys.readouterr().out


def test_a_simulation_names_what_binds_and_its_cure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ten minutes of 1080p take a thread four minutes: 16 threads read one in a quarter of a minute."""
    path = tmp_path / "films.yaml"
    part = {"videos": 1, "video_s": 600, "video_size": "1920x1080", "video_fps": 30}
    path.write_text(json.dumps({"rate": 0.1, "num_requests": 6, "mix": [part]}))
    options = ["--workload", str(path), "--topology", "4epd"]
    run(*options)
    text = capsys.readouterr().out
    assert "busiest is reading media: 16 threads" in text
    assert "raise --cpu-threads" in text
    run(*options, "--json")
    binds = json.loads(capsys.readouterr().out)["binds"]
    assert binds["max_per_s"] == pytest.approx(16 / (600 * 30 * 1920 * 1080 / 1.5e8))
    run(*options, "--video-gpus", "1", "--json")
    beside = json.loads(capsys.readouterr().out)["binds"]
    assert beside["what"] == "reading media: 16 threads and 1 GPUs"
    assert beside["max_per_s"] == pytest.approx(binds["max_per_s"] * (16 + 24) / 16)
    run(*options, "--cpu-threads", "4096")
    assert "busiest is epd workers" in capsys.readouterr().out


def test_a_trace_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    run("--trace", str(path), "--json")
    assert json.loads(capsys.readouterr().out)["num_requests"] == 3


def test_chrome_trace_and_plots_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, plot = tmp_path / "trace.json", tmp_path / "plot.png"
    run("--num-requests", "10", "--rate", "5", "--chrome-trace", str(trace), "--plot", str(plot))
    events = json.loads(trace.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names >= {"e0", "p0", "d0"}
    assert {event["name"] for event in events if event["ph"] == "X" and event["pid"] == 2} >= {
        "encode",
        "prefill",
        "decode",
    }
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--topology", "2e1p"], "no worker does decode"),
        (["--profile", "no.json"], "neither a file"),
        (["--sharding", "some"], "groups, request or local"),
        (["--sharding", "local", "--topology", "1e1p1d"], "sharding local"),
        (["--cpu-threads", "0"], "at least 1"),
        (["--chrome-trace", "/nowhere/at/all.json"], "cannot write"),
        (["--plot", "plot.txt"], "cannot plot"),
    ],
)
def test_what_makes_no_sense_is_refused(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app(["simulate", *options], standalone_mode=False) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
