"""How far a run is: a line each minute where there is no terminal, and a file of JSON."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from epd.batch.progress import BatchProgress, Done, StatusFile, batch_bar
from epd.errors import UnavailableError

AT_WORK = {"decode": 0.25, "language": 3.75}
HALF = BatchProgress(Done(50, 5, 0, 5400.0, 250), 100, 2, {"MediaError": 3}, 100.0, 90.0, AT_WORK, 0.5)


def test_a_line_a_minute_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    with batch_bar() as show:
        for _ in range(1300):  # 130 s
            show(HALF)
            now_s += 0.1
    line = (
        "50 of 100 lines, 3 failed (3 MediaError); 0.50 a second, time left 2 min; 5 media, 1.50 h of video, "
        "2.5 tokens/s (50% of the engine alone); lines at work: decode 0.2, language 3.8\n"
    )
    assert capsys.readouterr().err == 2 * line


def test_nothing_is_known_before_the_first_line() -> None:
    line = BatchProgress(Done(), 100, 0, {}, 0.0, None, {}).line()
    assert line.startswith("0 of 100 lines, 0 failed; 0.00 a second, time left unknown; 0 media")


def test_the_file_says_how_far_the_run_is_and_why_it_ended(tmp_path: Path) -> None:
    path, shown = tmp_path / "status.json", list[BatchProgress]()
    status = StatusFile(path)
    assert json.loads(path.read_text())["state"] == "starting"
    status._written_s = 0.0
    with status.told(lambda: nullcontext(shown.append)) as show:
        show(HALF)
    told = json.loads(path.read_text())
    assert (told["state"], told["num_done"], told["num_failed"], told["left_s"]) == ("running", 50, 3, 90.0)
    assert shown == [HALF]
    with pytest.raises(UnavailableError), status.of_run():
        raise UnavailableError("the server is gone")
    told = json.loads(path.read_text())
    assert (told["state"], told["error"], told["message"]) == (
        "failed",
        "UnavailableError",
        "the server is gone",
    )
    assert [each.name for each in tmp_path.iterdir()] == ["status.json"]
