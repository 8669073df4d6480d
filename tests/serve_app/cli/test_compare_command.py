"""The command `epd bench compare`, on paced layouts and on servers that run.

Modules: `epd/planning/replay.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from epd.bench.compare import load
from epd.serve_app.cli.program import app
from tests.bench.fake_server import FakeServer, Manner

MIX = """
num_requests: 2
mix:
  - images: 1
    image_size: 64x64
    videos: 1
    video_size: 64x64
    video_s: 2
    video_fps: 4
    text_tokens: 5
    output_tokens: 2
"""


def run(*options: str) -> None:
    app(["bench", "compare", *options], standalone_mode=False)


def test_paced_layouts_are_measured_and_simulated_by_the_same_requests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A prompt has as many tokens for both. All passes are late: nothing waits."""
    (tmp_path / "both.yaml").write_text(MIX, encoding="utf-8")
    out, plot = tmp_path / "found.json", tmp_path / "found.png"
    asked = ["--workload", str(tmp_path / "both.yaml"), "--rate", "1000", "--slo-ttft-s", "60"]
    paced = ["--paced", "qwen2.5-vl-7b@a100-80gb", "--scale", "32", "--dilate", "0.001", "--rounds", "1"]
    run("2x1epd", "1e1pd+roles", *asked, *paced, "--out", str(out), "--plot", str(plot))
    found = load(out)
    assert {each.layout for each in found.rounds.values()} == {"2x1epd", "1e1pd+roles"}
    for key, one in found.rounds.items():
        assert [each.error for each in one.outcomes] == [None, None]
        simulated = found.simulated[key].outcomes
        assert [each.prompt_tokens for each in one.outcomes] == [each.prompt_tokens for each in simulated]
        assert [each.kind for each in one.outcomes] == [each.kind for each in simulated] == ["video"] * 2
        assert all(each.ttft_s and each.tpot_s for each in (*one.outcomes, *simulated))
    assert plot.stat().st_size > 1000
    assert "rounds are not reported" in capsys.readouterr().out
    record = json.loads(out.read_text(encoding="utf-8"))
    assert {"question", "made", "rounds", "simulated", "summary"} <= record.keys()


def test_servers_are_compared_one_call_after_the_other(
    server: FakeServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second call adds its layout to the file, and does not ask the first server again."""
    monkeypatch.setattr("epd.workload.metrics.MAX_LATENESS_S", 600.0)  # a late round would be run again
    out = tmp_path / "found.json"
    asked = [
        "--workload",
        "text",
        "--num-requests",
        "3",
        "--rate",
        "20..40",
        "--rounds",
        "2",
        "--num-devices",
        "2",
    ]
    asked += ["--slo-ttft-s", "0.5", "--price-per-hour", "3", "--out", str(out)]
    run(f"first={server.url},{server.url}", *asked)
    num_first = len(server.bodies)
    assert num_first == 2 * 2 * (3 + 4)  # rounds, rates, requests and two warm ones for each server
    with FakeServer(Manner(status=500)) as broken:
        run(f"second={broken.url}", *asked)
        assert len(broken.bodies) > 0
    assert len(server.bodies) == num_first
    found = load(out)
    attained = {
        name: found.curve(found.question.traffic[0], each).attained(20.0)
        for name, each in zip(("first", "second"), found.layouts, strict=True)
        if found.curve(found.question.traffic[0], each).rounds
    }
    assert attained.get("second", 0.0) == 0.0
    assert "first" in capsys.readouterr().out
    run("--again", str(out), "--out", str(out))
    assert len(server.bodies) == num_first
    run(f"first={server.url}", *asked, "--seed", "7")
    assert "has another question" in capsys.readouterr().err


@pytest.mark.parametrize("rates", [[], ["--rate", "0"], ["--rate", "a..b"], ["--rate", "4..1"]])
def test_rates_that_are_none_are_refused(rates: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    run("1epd", "--paced", "qwen2.5-vl-7b@a100-80gb", *rates)
    assert "allowed: numbers above 0" in capsys.readouterr().err
