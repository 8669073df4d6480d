"""Files that the workers of one machine share."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from epd.serve_app.held_folder import HeldFolder
from epd.serve_app.network.memory import PoolFiles


def write_whole(path: Path) -> None:
    path.write_bytes(b"whole")


def slowly_held(path: Path) -> HeldFolder:
    """All threads ask for a folder while the first of them gets it."""
    time.sleep(0.05)
    return HeldFolder(path)


def test_a_shared_file_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epd.serve_app.network.memory._MEMORY_FOLDER", tmp_path)
    monkeypatch.setattr("epd.serve_app.network.memory.HeldFolder", slowly_held)
    files = PoolFiles("shared-test")
    written: list[Path] = []

    def write(path: Path) -> None:
        written.append(path)
        time.sleep(0.05)
        write_whole(path)

    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(files.shared, "weights", 7, write) for _ in range(4)]
        paths = {each.result() for each in asked}
    assert len(written) == 1
    assert [path.read_bytes() for path in paths] == [b"whole"]
    files.release()
    assert files.paths() == []


def test_a_shared_file_that_cannot_be_written_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("epd.serve_app.network.memory._MEMORY_FOLDER", tmp_path)
    files = PoolFiles("shared-test")

    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        files.shared("weights", 7, fail)
    assert files.shared("weights", 7, write_whole).read_bytes() == b"whole"
    files.release()


def test_only_names_of_ended_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new worker may have the name of a lost one before all others know of the loss."""
    monkeypatch.setattr("epd.serve_app.network.memory._MEMORY_FOLDER", tmp_path)
    files = PoolFiles("ended-test")
    kept = files.create("p0.prefill-kv", 4096)
    ended = kept.with_name("p0.prefill-kv-ended")
    ended.symlink_to(f"/proc/{2**22 + 1}/fd/5")  # no process has such an id
    files.remove_ended("p0")
    assert files.paths() == [kept]
    files.release()
