"""What is known of damaged videos: bounded, and the same in another life where it is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from epd.encode.encoder_cache import GroupKey
from epd.serve_app.orchestration.substituted import SubstitutedFrames

KEYS = [GroupKey("video", (float(i),), (0, 0), (28, 28), "model") for i in range(4)]


def life(folder: Path | None, max_groups: int = 3) -> SubstitutedFrames:
    return SubstitutedFrames(max_groups, folder)


def test_another_life_knows_the_last_count_of_each_group(tmp_path: Path) -> None:
    first = life(tmp_path)
    for key, num in zip(KEYS, (1, 2, 0, 4), strict=True):
        first.note(key, num)
    first.note(KEYS[1], 0)
    (file,) = tmp_path.iterdir()
    assert len(file.read_bytes().splitlines()) == 4, "a whole group is no line"
    assert file.stat().st_mode & 0o077 == 0
    assert b"video" not in file.read_bytes()
    assert (
        [life(tmp_path).total([key]) for key in KEYS] == [first.total([key]) for key in KEYS] == [1, 0, 0, 4]
    )


@pytest.mark.parametrize("damage", [b'["x"', b"null", b"\xff\xfe", b'["x", "y"]', b"[{}, 1]"])
def test_a_line_that_is_cut_off_or_damaged_is_skipped(tmp_path: Path, damage: bytes) -> None:
    life(tmp_path).note(KEYS[0], 1)
    (file,) = tmp_path.iterdir()
    with file.open("ab") as opened:
        opened.write(damage + b"\n")
    life(tmp_path).note(KEYS[1], 2)
    assert life(tmp_path).total(KEYS) == 3


def test_the_file_stays_short(tmp_path: Path) -> None:
    for number in range(30):
        life(tmp_path).note(KEYS[0], 1 + number % 2)
    (file,) = tmp_path.iterdir()
    assert len(file.read_bytes().splitlines()) <= 7
    assert life(tmp_path).total(KEYS) == 2


def test_a_disk_that_takes_nothing_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    known = life(tmp_path / "missing")
    known.note(KEYS[0], 1)
    known.note(KEYS[1], 2)
    assert known.total(KEYS) == 3
    assert len(caplog.records) == 1


def test_nothing_is_written_where_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    life(None).note(KEYS[0], 1)
    assert not list(tmp_path.iterdir())
