"""`make gpu` in tiny, on the CPU: where neither PyAV nor Ray can be imported, as on a bare GPU machine."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu import mixtures
from benchmarks.gpu.__main__ import SECTIONS, main
from benchmarks.gpu.sections import GpuSection, run_all
from benchmarks.gpu.served import with_published_sizes
from benchmarks.gpu.setup import FULL, TINY, Setup
from benchmarks.reporting import Row
from epd.stages.placement import CPU_FLOAT32, Placement
from tests import ROOT

# What is installed for video, serving and its checks, and not there.
MISSING = ("av", "ray", "fastapi", "pydantic", "uvicorn", "openai", "playwright", "llguidance")
PROGRAM = f"""
import sys
for name in {MISSING}:
    sys.modules[name] = None  # any import of it now raises ImportError
from dataclasses import replace
from benchmarks.gpu import __main__ as program
# Times are for a GPU: a busy CPU may take longer.
program.TOTAL_S = 3600.0
program.SECTIONS = {{name: replace(each, budget_s=3600.0) for name, each in program.SECTIONS.items()}}
sys.exit(program.main(["--dry-run", "--out", sys.argv[1]]))
"""


def test_the_dry_run_ends_well_without_video_and_serving(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    results = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert list(results) == ["setting", *SECTIONS]
    assert all(results[name]["rows"] and not results[name]["problem"] for name in SECTIONS)
    checked = {row["kernel"] for row in results["kernels"]["rows"]}
    assert checked >= {f"{num_rows} rows by experts of a tiny model" for num_rows in TINY.checked_expert_rows}
    answered = {row["checkpoint"] for row in results["tokens"]["rows"]}
    assert answered == {*TINY.checked, *(f"tiny {name}" for name in TINY.checked_families)}
    page = (tmp_path / "gpu.md").read_text(encoding="utf-8")
    assert all(f"## {section.title}\n" in page for section in SECTIONS.values())


def test_each_reader_of_a_video_gives_the_same_frames(tmp_path: Path) -> None:
    """Without a GPU, whose part the CPU takes and the row says so."""
    rows = list(SECTIONS["nvdec"].run(Setup(CPU_FLOAT32, TINY, tmp_path)))
    assert [row["frames"] for row in rows] == [TINY.num_frames] * 5
    assert [(row["of the GPU"], row["PSNR dB"] > 100, row["ok"]) for row in rows[1:4]] == [
        (0, True, True)
    ] * 3


def test_without_a_gpu_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main([]) == 2
    assert "--dry-run" in capsys.readouterr().err


def well(_setup: Setup) -> Iterator[Row]:
    yield {"figure": 1}


def broken(_setup: Setup) -> Iterator[Row]:
    yield {"figure": 2}
    raise ValueError("a bug")


def wrong(_setup: Setup) -> Iterator[Row]:
    yield {"check": "a", "ok": True}
    yield {"check": "b", "ok": False}


def endless(_setup: Setup) -> Iterator[Row]:
    yield {"figure": 3}
    time.sleep(600)


def test_a_section_that_fails_stops_no_other(tmp_path: Path) -> None:
    budgets_s = {broken: 60.0, wrong: 60.0, endless: 0.3, well: 60.0}
    sections = {run.__name__: GpuSection(run.__name__, run, budget_s) for run, budget_s in budgets_s.items()}
    outcomes = run_all(sections, list(sections), Setup(CPU_FLOAT32, TINY, tmp_path), 240.0)
    assert {name: len(outcome.rows) for name, outcome in outcomes.items()} == {
        "broken": 1,
        "wrong": 2,
        "endless": 1,
        "well": 1,
    }
    assert outcomes["broken"].problem == "ValueError: a bug"
    assert "1 checks of 'wrong' failed" in outcomes["wrong"].problem
    assert "ended after" in outcomes["endless"].problem
    assert outcomes["well"].problem == ""


def test_no_section_begins_when_all_time_is_used_up(tmp_path: Path) -> None:
    sections = {"endless": GpuSection("", endless, 60.0), "well": GpuSection("", well, 60.0)}
    outcomes = run_all(sections, list(sections), Setup(CPU_FLOAT32, TINY, tmp_path), 0.3)
    assert all("ended after" in outcome.problem for outcome in outcomes.values())
    assert not outcomes["well"].rows


def test_the_status_says_whether_all_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    for run, status in ((well, 0), (broken, 1), (wrong, 1)):
        monkeypatch.setattr("benchmarks.gpu.__main__.SECTIONS", {"one": GpuSection("", run, 60.0)})
        assert main(["--dry-run"]) == status


def test_a_disk_without_room_is_named_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _folder: SimpleNamespace(free=10**9))
    setup = Setup(CPU_FLOAT32, FULL, tmp_path / "temporary")
    setup.folder.mkdir()
    with pytest.raises(RuntimeError, match=r"1.0 GB are free in .*takes 36.5 GB; set TMPDIR"):
        next(SECTIONS["load"].run(setup))
    assert not list(setup.folder.iterdir())


def test_what_was_measured_is_not_measured_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A second call runs the section that failed, and keeps the other."""
    ran: list[str] = []

    def counted(run: Callable[[Setup], Iterator[Row]]) -> Callable[[Setup], Iterator[Row]]:
        def section(setup: Setup) -> Iterator[Row]:
            ran.append(run.__name__)
            yield from run(setup)

        return section

    sections = {run.__name__: GpuSection("", counted(run), 60.0) for run in (well, broken)}
    monkeypatch.setattr("benchmarks.gpu.__main__.SECTIONS", sections)
    for _ in range(2):
        assert main(["--dry-run", "--resume", "--out", str(tmp_path)]) == 1
    assert ran == ["well", "broken", "broken"]
    results = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert results["well"]["rows"] == [{"figure": 1}]


def test_the_served_checkpoint_has_the_published_sizes_of_pictures(tmp_path: Path) -> None:
    setup = Setup(CPU_FLOAT32, FULL, tmp_path, tmp_path / "measured")
    setup.path.mkdir()
    (setup.path / "model.safetensors").write_bytes(b"x")
    by_hand = {"size": {"shortest_edge": 1, "longest_edge": 2}, "patch_size": 14}
    (setup.path / "processor_config.json").write_text(json.dumps({"image_processor": by_hand}))
    folder = with_published_sizes(setup)
    assert (folder / "model.safetensors").is_symlink()
    found = json.loads((folder / "processor_config.json").read_text())["image_processor"]
    assert found == {"size": {"shortest_edge": 3136, "longest_edge": 12_845_056}, "patch_size": 14}


def test_what_a_decode_reads_is_scaled_up_to_all_layers(tmp_path: Path) -> None:
    """By its name the model has 35 thousand million parameters, and reads 3 of them for a token."""
    setup = Setup(Placement(torch.device("meta"), torch.bfloat16), FULL, tmp_path)
    config = mixtures._config(setup)
    built = {num_layers: mixtures._built(config, num_layers, setup) for num_layers in (4, 8, 40)}
    assert sum(each.numel() for each in built[40].parameters()) == pytest.approx(35e9, rel=0.01)
    for batch in (1, 32):
        few, more, whole = (mixtures.read_bytes(model, batch, 0) for model in built.values())
        assert mixtures.scaled(few, more) == pytest.approx(whole)
        assert batch > 1 or whole / 2 == pytest.approx(3e9, rel=0.01)
