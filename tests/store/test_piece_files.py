"""Files of pieces: whole or not there, within their room, and those of another model are never read.

Modules: `epd/store/file_format.py`.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
import tracemalloc
from collections.abc import Iterable
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from epd.errors import RequestError
from epd.serve_app.cli.program import app
from epd.store.file_format import is_whole, written
from epd.store.piece_files import PieceFiles, contents, model_digest, namespace, remove_oldest, stored

_ROOM = 1 << 20


def files_in(folder: Path, name: str = "n", room: int = _ROOM) -> PieceFiles:
    return PieceFiles(folder, name, room, {"model": name})


def payload_of(number: int, size: int = 1000) -> bytes:
    return bytes([number % 251]) * size


def put(files: PieceFiles, number: int, index: int = 0, size: int = 1000) -> int:
    return files.write({key_of(number): memoryview(payload_of(number, size))}, index)


def got(files: PieceFiles, number: int, size: int = 1000) -> bytes | None:
    payload = bytearray(size)
    return bytes(payload) if files.read(key_of(number), 0, memoryview(payload)) else None


def key_of(number: int) -> str:
    return f"{number:032x}"


def test_what_was_written_is_read_by_another(tmp_path: Path) -> None:
    assert put(files_in(tmp_path), 1) > 1000
    assert put(files_in(tmp_path), 1) == 0, "it is there"
    assert got(files_in(tmp_path), 1) == payload_of(1)
    assert got(files_in(tmp_path, "other"), 1) is None
    assert got(files_in(tmp_path), 2) is None
    assert [each.path.stat().st_mode & 0o077 for each in stored(tmp_path)] == [0]


def put_together(files: PieceFiles, numbers: Iterable[int], size: int = 1000) -> int:
    return files.write({key_of(number): memoryview(payload_of(number, size)) for number in numbers})


def files_of(folder: Path) -> list[list[int]]:
    """The pieces of each file."""
    found: dict[int, list[int]] = {}
    for each in stored(folder):
        found.setdefault(each.file, []).append(int(each.path.name, 16))
    return sorted(sorted(each) for each in found.values())


def test_small_pieces_that_are_written_at_once_share_a_file(tmp_path: Path) -> None:
    """A piece that is there is not written again, and a large one has a file of its own."""
    files = files_in(tmp_path, room=16 * 5000)
    put(files, 3)
    written = put_together(files, range(8))
    assert put_together(files, range(8)) == 0
    put(files, 8, size=9000)
    assert files_of(tmp_path) == [[0, 1, 2, 4, 5], [3], [6, 7], [8]]
    sizes = {each.stat().st_ino: each.stat().st_size for each in tmp_path.rglob("*") if each.is_file()}
    assert sum(sizes.values()) - (tmp_path / "n" / "about.json").stat().st_size == pytest.approx(
        sum(each.num_bytes for each in stored(tmp_path)), abs=8
    )
    assert 7000 < written < 8000
    assert all(got(files, number) == payload_of(number) for number in range(8))
    assert run("verify", str(tmp_path)) == (0, "9 pieces, 0 damaged\n")


@pytest.mark.parametrize("damage", ["one bit", "cut off", "missing"])
def test_a_damaged_piece_leaves_the_others_of_its_file(tmp_path: Path, damage: str) -> None:
    files = files_in(tmp_path)
    put_together(files, range(5))
    last = next(each.path for each in stored(tmp_path) if each.path.name == key_of(4))
    if damage == "missing":
        last.unlink()
    elif damage == "cut off":
        os.truncate(last, last.stat().st_size - 1)
    else:
        data = bytearray(last.read_bytes())
        data[-1] ^= 1
        last.write_bytes(data)
    assert [got(files, number) == payload_of(number) for number in range(5)] == [True] * 4 + [False]
    put_together(files, range(5))
    assert files_of(tmp_path) == [[0, 1, 2, 3], [4]]
    assert got(files, 4) == payload_of(4)


def test_no_changed_bit_of_a_header_gives_what_was_not_written(tmp_path: Path) -> None:
    """Nor one of another number of payloads, or of impossible sizes."""
    files = files_in(tmp_path)
    for at in range(8 * (10 + 2 * 40)):
        put_together(files, range(2))
        path = next(stored(tmp_path)).path
        data = bytearray(path.read_bytes())
        data[at // 8] ^= 1 << at % 8
        path.write_bytes(data)
        assert all(got(files, number) in (None, payload_of(number)) for number in range(2))
        remove_oldest(tmp_path, 0)


def test_a_file_goes_with_all_of_its_pieces(tmp_path: Path) -> None:
    """Or its room would not be won. One that was used lately stays, with all of them too."""
    files = files_in(tmp_path, room=16 * 2400)
    for first in range(0, 36, 2):
        put_together(files, range(first, first + 2))
        for each in stored(tmp_path):
            os.utime(each.path, (each.used_s - 60, each.used_s - 60))
    assert got(files, 1) is not None
    put_together(files, (98, 99))
    first, *others, last = files_of(tmp_path)
    assert (first, last) == ([0, 1], [98, 99])
    assert {len(pieces) for pieces in others} == {2}
    assert key_of(2) not in files


def test_a_file_system_that_gives_a_file_one_name_has_more_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    files = files_in(tmp_path)
    put_together(files, range(3))
    assert files_of(tmp_path) == [[0], [1], [2]]
    assert [got(files, number) for number in range(3)] == [payload_of(number) for number in range(3)]


def test_a_payload_of_another_size_is_a_miss(tmp_path: Path) -> None:
    files = files_in(tmp_path)
    put(files, 1)
    assert got(files, 1, size=999) is None
    assert key_of(1) not in files, "it was removed"


def test_a_renamed_file_is_a_miss(tmp_path: Path) -> None:
    """Of another piece of the same size, and of another namespace: both are whole."""
    files = files_in(tmp_path)
    put(files, 1)
    (file,) = (each.path for each in stored(tmp_path))
    for target in (file.with_name(key_of(2)), tmp_path / "other" / file.parent.name / file.name):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes())
    assert got(files, 2) is None
    assert got(files_in(tmp_path, "other"), 1) is None
    assert got(files, 1) == payload_of(1)


def test_those_that_were_used_last_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one prompt, the first pieces: those after them are worth nothing without them.

    All in one moment: a machine that is busy for seconds between two writes would date the later one later.
    """
    now_s = time.time()
    monkeypatch.setattr("epd.store.file_format.time", SimpleNamespace(time=lambda: now_s))
    files = files_in(tmp_path, room=11_000)
    for index in range(10):
        put(files, index, index)
    for path in (each.path for each in stored(tmp_path)):
        stat = path.stat()
        os.utime(path, (stat.st_mtime - 60, stat.st_mtime - 60))
    assert got(files, 9) is not None
    put(files, 10)
    left = [number for number in range(11) if key_of(number) in files]
    assert left == [*range(len(left) - 2), 9, 10]
    assert sum(each.num_bytes for each in stored(tmp_path)) <= 11_000


def test_one_that_is_larger_than_all_room_is_not_kept(tmp_path: Path) -> None:
    files = files_in(tmp_path, room=5000)
    put(files, 1)
    assert put(files, 2, size=6000) == 0
    assert key_of(1) in files


def write_all(folder: str, first: int) -> None:
    files = files_in(Path(folder), room=50_000)
    for number in range(first, first + 100, 4):
        put(files, number)
        put_together(files, range(number, number + 4))


def test_folders_that_somebody_removed_are_made_again(tmp_path: Path) -> None:
    files = files_in(tmp_path)
    put(files, 1)
    for each in (tmp_path / "n").iterdir():
        if each.is_dir():
            shutil.rmtree(each)
    put(files, 2)
    put(files, 3)
    assert got(files, 3) == payload_of(3)


@pytest.mark.parametrize("removed", [".", "n"])
def test_a_whole_folder_that_somebody_removed_is_made_again(tmp_path: Path, removed: str) -> None:
    files = files_in(tmp_path / "cache")
    put(files, 1)
    shutil.rmtree(tmp_path / "cache" / removed)
    put(files, 2)
    put(files, 3)
    assert got(files, 3) == payload_of(3)
    assert [each.about for each in contents(tmp_path / "cache")] == [{"model": "n"}]


def test_two_writers_share_a_folder(tmp_path: Path) -> None:
    """Half of what they write is the same. Whatever is there is whole."""
    context = get_context("fork")
    writers = [context.Process(target=write_all, args=(str(tmp_path), first)) for first in (0, 50)]
    for each in writers:
        each.start()
    for each in writers:
        each.join()
    assert [each.exitcode for each in writers] == [0, 0]
    files = files_in(tmp_path, room=50_000)
    there = [number for number in range(150) if key_of(number) in files]
    assert there
    assert all(got(files, number) == payload_of(number) for number in there)
    assert len(there) == len(list(stored(tmp_path))), "nothing half written is left"


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match="cannot be written"):
        files_in(tmp_path / "file")


def test_any_changed_file_of_a_model_is_another_digest(tmp_path: Path) -> None:
    model, kept = tmp_path / "model", tmp_path / "kept"
    model.mkdir()
    kept.mkdir()
    weights, config = model / "model.safetensors", model / "config.json"
    weights.write_bytes(b"w" * 100)
    config.write_text("{}", encoding="utf-8")
    digests = {model_digest(model, kept)}
    assert {model_digest(model, kept)} == digests
    weights.write_bytes(b"w" * 99 + b"v")
    digests.add(model_digest(model, kept))
    config.write_text('{"rope_theta": 1}', encoding="utf-8")
    digests.add(model_digest(model, kept))
    config.rename(model / "other.json")
    digests.add(model_digest(model, kept))
    assert len(digests) == 4


def test_weights_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"w")
    first = model_digest(model, tmp_path)
    monkeypatch.setattr("epd.store.piece_files.file_digest", lambda *_: pytest.fail("read again"))
    assert model_digest(model, tmp_path) == first


def test_any_fact_is_another_namespace() -> None:
    facts = {"dtype": "float32", "visual": ""}
    names = {namespace(facts), namespace(facts | {"dtype": "bfloat16"}), namespace(facts | {"visual": "x"})}
    assert len(names) == 3


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["cache", *words])
    return done.exit_code, done.output


def test_the_command_lists_verifies_and_removes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        for number in range(3):
            put(files_in(tmp_path, name), number)
    code, listed = run("ls", str(tmp_path))
    assert (code, [line.split()[-1] for line in listed.splitlines()]) == (0, ["one", "two"])
    assert run("verify", str(tmp_path)) == (0, "6 pieces, 0 damaged\n")
    damaged = next(stored(tmp_path / "one")).path
    os.truncate(damaged, 500)
    code, said = run("verify", str(tmp_path))
    assert code == 1
    assert said.splitlines() == [f"removed {damaged}, which is damaged", "6 pieces, 1 damaged"]
    assert run("rm", str(tmp_path), "--unused-days", "1") == (0, "removed 0.0 MB\n")
    assert run("rm", str(tmp_path), "--model", "one")[0] == 0
    assert len(list(stored(tmp_path / "one"))) == 0
    assert len(list(stored(tmp_path / "two"))) == 3
    assert remove_oldest(tmp_path, 0) == 0


def test_verifying_leaves_what_a_server_writes_and_drops_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(files_in(tmp_path), 1)
    put(files_in(tmp_path), 2)
    dropped = next(stored(tmp_path)).path
    draft = written(tmp_path / "n", memoryview(b"half of a piece"))

    def drops(path: Path) -> bool:
        dropped.unlink(missing_ok=True)
        return is_whole(path)

    monkeypatch.setattr("epd.serve_app.cli.cache.is_whole", drops)
    assert run("verify", str(tmp_path)) == (0, "2 pieces, 0 damaged\n")
    assert draft.exists()


def test_what_is_dated_later_than_now_is_removed(tmp_path: Path) -> None:
    """By a machine that shares the folder, and whose clock is ahead."""
    put(files_in(tmp_path), 1)
    later_s = time.time() + 3600
    os.utime(next(stored(tmp_path)).path, (later_s, later_s))
    run("rm", str(tmp_path), "--unused-days", "1")
    assert len(list(stored(tmp_path))) == 1
    run("rm", str(tmp_path))
    assert list(stored(tmp_path)) == []


def test_verifying_holds_a_part_of_a_file(tmp_path: Path) -> None:
    size = 16 << 20
    files = files_in(tmp_path, room=2 * size)
    put(files, 1, size=size)
    (file,) = stored(tmp_path)
    tracemalloc.start()
    assert is_whole(file.path)
    assert tracemalloc.get_traced_memory()[1] < size / 4
    tracemalloc.stop()
    with file.path.open("ab") as longer:
        longer.write(b"x")
    assert not is_whole(file.path)


def test_the_command_refuses_what_is_no_folder(tmp_path: Path) -> None:
    code, said = run("ls", str(tmp_path / "none"))
    assert code == 2
    assert "which is no folder; allowed: a --cache-dir; name one" in said


@pytest.mark.parametrize("damaged", [b"", b'{"mod', b"[1]", b"\xff\xfe"])
def test_a_damaged_description_hides_nothing_else(tmp_path: Path, damaged: bytes) -> None:
    put(files_in(tmp_path, "a"), 1)
    put(files_in(tmp_path, "b"), 2)
    next(tmp_path.glob("a*/about.json")).write_bytes(damaged)
    assert [each.about for each in contents(tmp_path)] == [{}, {"model": "b"}]
    listed = CliRunner().invoke(app, ["cache", "ls", str(tmp_path)])
    assert listed.exit_code == 0, listed.output
