"""Whose folders are removed: those of processes that were killed, never those of living ones elsewhere."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from epd.serve_app import held_folder
from epd.serve_app.held_folder import HeldFolder, abandoned, remove_abandoned, remove_own
from epd.serve_app.media.media_spool import MediaSpool
from epd.serve_app.network.memory import PoolFiles, orphans, remove_orphans
from epd.video import FetchPolicy

# A process that has files of a fleet, a pool and media, as an ingress does; it says when.
OWNER = """
import sys, tempfile
from pathlib import Path
from epd.serve_app.network import memory as shared_memory
from epd.serve_app import held_folder
from epd.serve_app.held_folder import SPOOL_PREFIX, HeldFolder
shared_memory._MEMORY_FOLDER = Path(sys.argv[1])
tempfile.tempdir = sys.argv[1]
files = shared_memory.PoolFiles("some-fleet")
files.hold()
files.create("p0.prefill-kv", 4096)
files.shared("weights", 5, lambda path: path.write_bytes(b"12345"))
spool = HeldFolder(Path(sys.argv[1], SPOOL_PREFIX + "0"))
(spool.path / "requests").mkdir()
(spool.path / "requests" / "medium").write_bytes(b"a video")
print("there", flush=True)
sys.stdin.read()
"""


@contextmanager
def owner(folder: Path, *wrapper: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*wrapper, sys.executable, "-c", OWNER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def shared_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What stands for /dev/shm and for the temporary folder."""
    monkeypatch.setattr("epd.serve_app.network.memory._MEMORY_FOLDER", tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_files_of_a_living_process_stay_and_go_at_the_next_start_once_it_was_killed(
    shared_folder: Path,
) -> None:
    with owner(shared_folder):
        before = sorted(shared_folder.rglob("*"))
        remove_orphans()
        assert sorted(shared_folder.rglob("*")) == before
        assert len(before) >= 8
        assert orphans() == []
    assert len(orphans()) == 1
    files = PoolFiles("next-fleet")
    files.hold()
    assert [path.name for path in shared_folder.iterdir()] == ["epd-fleet-next-fleet"]
    files.release()
    assert list(shared_folder.iterdir()) == []


def test_files_of_a_process_that_we_cannot_see_stay(shared_folder: Path) -> None:
    """As in a container with the same name and /dev/shm, whose processes have numbers of their own."""
    unshare = shutil.which("unshare")
    wrapper = [unshare, "--pid", "--fork", "--kill-child"] if unshare else []
    if wrapper and subprocess.run([*wrapper, "true"], capture_output=True, check=False).returncode:
        wrapper = []  # not allowed here: then it is a process like any other, which nobody looks up
    with owner(shared_folder, *wrapper):
        before = sorted(shared_folder.rglob("*"))
        remove_orphans()
        assert sorted(shared_folder.rglob("*")) == before


def test_a_spool_that_starts_removes_what_a_killed_one_has_left(shared_folder: Path) -> None:
    with owner(shared_folder):
        left = list(shared_folder.glob("epd-media-*/requests/medium"))
        assert len(left) == 1
    spool = MediaSpool(FetchPolicy(), parent=shared_folder)
    assert not left[0].exists()
    assert spool.path.is_dir()
    assert abandoned(shared_folder, "epd-media-") == []
    spool.close()
    assert list(shared_folder.glob("epd-media-*")) == []


def test_a_folder_is_held_by_all_that_use_it(tmp_path: Path) -> None:
    first, second = HeldFolder(tmp_path / "epd-x"), HeldFolder(tmp_path / "epd-x")
    first.release()
    assert abandoned(tmp_path, "epd-") == []
    second.release()
    assert abandoned(tmp_path, "epd-") == [tmp_path / "epd-x"]
    again = HeldFolder(tmp_path / "epd-x")
    remove_abandoned(tmp_path, "epd-")
    assert again.path.is_dir()
    again.remove()
    assert not again.path.exists()


def test_a_process_that_ends_at_once_removes_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_folder, "_own", [])  # not those of servers that other tests share
    mine = [HeldFolder(tmp_path / f"epd-mine-{number}") for number in range(3)]
    released = HeldFolder(tmp_path / "epd-released")
    released.release()
    remove_own()
    assert not any(each.path.exists() for each in mine)
    assert released.path.exists()


def test_folders_that_nobody_has_ever_held_are_not_ours(tmp_path: Path) -> None:
    (tmp_path / "epd-media-of-another-program").mkdir()
    remove_abandoned(tmp_path, "epd-media-")
    assert (tmp_path / "epd-media-of-another-program").is_dir()
