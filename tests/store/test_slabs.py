"""Pieces in an object store: right or a miss, whatever happens to it; no writer waits; one warning.

Modules: `epd/store/object_store.py`, `epd/store/object_contents.py`, `epd/store/write_behind.py`.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from epd.engine_config import EngineConfig
from epd.errors import RequestError
from epd.serve_app.app_args import AppArgs
from epd.serve_app.cli.program import app
from epd.store import object_contents, object_store, slabs
from epd.store.file_format import piece_digest
from epd.store.object_store import check_url, open_store
from epd.store.piece_files import PieceFiles
from epd.store.slabs import Slabs
from epd.store.write_behind import WriteBehind
from tests import ROOT
from tests.store.object_servers import S3, Objects, proxied, s3

__all__ = ("s3",)

_NEVER_S = 3600.0
_ROOM = 1 << 28
_SIZE = 5000  # stands in a slab
_NUM = 6


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store is given all time to answer, and writes slabs when it is closed."""
    for name in ("_SLAB_S", "_FIRST_LOOK_S", "_CLOSE_S"):
        monkeypatch.setattr(slabs, name, _NEVER_S)
    for name in ("_CONNECT_S", "_REQUEST_S"):
        monkeypatch.setattr(object_store, name, 60.0)


@pytest.fixture(params=["s3", "file"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    if request.param == "file":
        return Objects(f"file://{tmp_path / 'objects'}", folder=tmp_path / "objects")
    server: S3 = request.getfixturevalue("s3")
    prefix = uuid.uuid4().hex
    return Objects(server.url(prefix), server, prefix)


def machine(folder: Path, url: str, name: str = "n") -> WriteBehind:
    """A machine with a disk of its own."""
    about = {"model": name}
    return WriteBehind(PieceFiles(folder, name, _ROOM, about, Slabs(url, name, about)), "pieces")


def payload_of(number: int, size: int = _SIZE) -> bytes:
    return bytes([number % 251, 7]) * (size // 2)


def key_of(number: int) -> str:
    return f"{number:032x}"


def put(store: WriteBehind, *numbers: int, size: int = _SIZE) -> None:
    for number in numbers:
        store.add({key_of(number): memoryview(payload_of(number, size))}, number)


def got(store: WriteBehind, number: int, size: int = _SIZE) -> tuple[str | None, bytes | None]:
    payload = bytearray(size)
    tier = store.read(key_of(number), 0, memoryview(payload))
    return tier, bytes(payload) if tier else None


def filled(tmp_path: Path, url: str, count: int = _NUM, size: int = _SIZE) -> None:
    """A machine writes, and is gone with its disk."""
    store = machine(tmp_path / "first", url)
    put(store, *range(count), size=size)
    store.close()


@pytest.mark.parametrize("size", [100, _SIZE], ids=["in lists", "in slabs"])
def test_another_machine_finds_what_one_has_written(tmp_path: Path, objects: Objects, size: int) -> None:
    filled(tmp_path, objects.url, size=size)
    assert len(objects.paths(".keys")) == 1
    store = machine(tmp_path / "second", objects.url)
    for number in range(_NUM):
        assert key_of(number) in store
        assert got(store, number, size) == ("objects", payload_of(number, size))
    assert key_of(_NUM) not in store
    assert got(store, _NUM) == (None, None)
    store.close()
    again = machine(tmp_path / "second", objects.url)
    assert {got(again, number, size)[0] for number in range(_NUM)} == {"disk"}, "it is written to the disk"
    again.close()
    assert len(objects.paths(".keys")) == 1, "nothing is written twice"
    other = machine(tmp_path / "second", objects.url, "other")
    assert got(other, 1) == (None, None)
    other.close()


def test_machines_find_what_others_write_later(
    tmp_path: Path, objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slabs, "_LOOK_S", 0.05)
    store = machine(tmp_path / "second", objects.url)
    assert key_of(1) not in store
    filled(tmp_path, objects.url)
    wait_until(lambda: key_of(1) in store)
    assert got(store, 1) == ("objects", payload_of(1))
    store.close()


def wait_until(is_so: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(6000):
        if is_so():
            return
        pause.wait(0.01)
    raise AssertionError("it never came")


def truncated(objects: Objects, path: str) -> None:
    objects.put(path, objects.get(path)[: len(objects.get(path)) // 2])


def emptied(objects: Objects, path: str) -> None:
    objects.put(path, b"")


def flipped(objects: Objects, path: str) -> None:
    data = bytearray(objects.get(path))
    for at in range(0, len(data), 97):
        data[at] ^= 1
    objects.put(path, bytes(data))


def missing(objects: Objects, path: str) -> None:
    objects.delete(path)


def exchanged(objects: Objects, path: str) -> None:
    """Takes the place of the other object of its kind, and that one its."""
    suffix = path[path.rindex(".") :]
    other = next(each for each in objects.paths(suffix) if each != path)
    here, there = objects.get(path), objects.get(other)
    objects.put(path, there)
    objects.put(other, here)


@pytest.mark.parametrize("suffix", [".slab", ".keys"])
@pytest.mark.parametrize("damage", [truncated, emptied, flipped, missing, exchanged])
def test_what_is_damaged_is_right_or_a_miss(
    tmp_path: Path, objects: Objects, suffix: str, damage: Callable[[Objects, str], None]
) -> None:
    """Also where one slab is whole: its pieces are found."""
    for first in (0, _NUM):
        store = machine(tmp_path / "first", objects.url)
        put(store, *range(first, first + _NUM))
        store.close()
    assert len(objects.paths(suffix)) == 2
    damage(objects, objects.paths(suffix)[0])
    store = machine(tmp_path / "second", objects.url)
    found = [got(store, number)[1] for number in range(2 * _NUM)]
    assert all(each in (None, payload_of(number)) for number, each in enumerate(found))
    num_missing = found.count(None)
    assert num_missing >= 1
    assert num_missing == 2 * _NUM if damage is exchanged else num_missing <= _NUM
    put(store, *range(2 * _NUM))
    assert all(got(store, number)[1] == payload_of(number) for number in range(2 * _NUM)), "kept anew"
    store.close()


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["cache", *words])
    return done.exit_code, done.output


def test_the_command_lists_verifies_and_removes(tmp_path: Path, objects: Objects) -> None:
    filled(tmp_path, objects.url)
    code, listed = run("ls", objects.url)
    assert code == 0
    assert listed.split()[1:3] == ["6", "pieces"]
    assert listed.split()[-1] == "n"
    assert run("verify", objects.url) == (0, "6 pieces, 0 damaged\n")
    assert run("rm", objects.url, "--model", "other") == (0, "removed 0.0 MB\n")
    assert run("rm", objects.url, "--unused-days", "1") == (0, "removed 0.0 MB\n")
    flipped(objects, objects.paths(".slab")[0])
    code, said = run("verify", objects.url)
    assert code == 1
    assert "which is damaged\n6 pieces, 1 damaged\n" in said
    assert objects.paths(".slab") == objects.paths(".keys") == []
    filled(tmp_path / "anew", objects.url)
    assert run("rm", objects.url, "--model", "n") == (0, "removed 0.0 MB\n")
    assert objects.paths(".slab") == objects.paths(".keys") == []


class Unsteady(NamedTuple):
    """A store that lists everything, and does not answer where names with this end are read."""

    system: Any
    end: str

    def __getattr__(self, name: str) -> Any:
        return getattr(self.system, name)

    def open_input_file(self, path: str) -> Any:
        if path.endswith(self.end):
            raise OSError("AWS Error NETWORK_CONNECTION: timed out")
        return self.system.open_input_file(path)


@pytest.mark.parametrize("end", [".slab", ".keys", "about.json"])
def test_what_a_store_does_not_give_now_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    objects = Objects(f"file://{tmp_path / 'objects'}", folder=tmp_path / "objects")
    filled(tmp_path, objects.url)
    there = objects.paths()
    system, root = open_store(objects.url)
    monkeypatch.setattr(object_contents, "open_store", lambda _url: (Unsteady(system, end), root))
    code, said = run("verify", objects.url)
    assert (code, objects.paths()) == (3, there), said


_WRITER = """
import os, sys
from pathlib import Path
from epd.store import slabs
from epd.store.piece_files import PieceFiles
from epd.store.write_behind import WriteBehind

folder, url, killed_at, first = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
slabs._SLAB_BYTES = 12_000
whole, count = slabs.Slabs._put, 0

def dies(store, name, parts):
    global count
    count += 1
    if count == killed_at:
        if url.startswith("file:"):
            whole(store, name, [part[: len(part) // 2] for part in parts])
        os._exit(9)
    whole(store, name, parts)

slabs.Slabs._put = dies
below = slabs.Slabs(url, "n", {"model": "n"})
store = WriteBehind(PieceFiles(Path(folder), "n", 1 << 28, {"model": "n"}, below), "pieces")
for number in range(first, first + 6):
    store.add({f"{number:032x}": memoryview(bytes([number, 7]) * 2500)}, number)
store.close()
"""


@pytest.mark.parametrize("killed_at", range(1, 8))
def test_writers_that_are_killed_leave_nothing_wrong(
    tmp_path: Path, objects: Objects, killed_at: int
) -> None:
    """Two processes, each at one of its writes: half of what they write is the same."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(tmp_path / name), objects.url, str(killed_at), str(first)],
            env=env,
        )
        for name, first in (("a", 0), ("b", 3))
    ]
    assert {each.wait() for each in writers} <= {0, 9}
    store = machine(tmp_path / "second", objects.url)
    found = [got(store, number)[1] for number in range(9)]
    assert all(each in (None, payload_of(number)) for number, each in enumerate(found))
    put(store, *range(9))
    assert all(got(store, number)[1] == payload_of(number) for number in range(9))
    store.close()
    assert run("verify", objects.url)[0] in (0, 1)
    assert run("verify", objects.url)[0] == 0
    last = machine(tmp_path / "third", objects.url)
    assert all(got(last, number)[1] in (None, payload_of(number)) for number in range(9))
    last.close()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        each.message
        for each in caplog.records
        if each.levelno >= logging.WARNING and each.name.startswith("epd.store")
    ]


def test_a_store_that_is_down_costs_one_warning(
    tmp_path: Path, s3: S3, caplog: pytest.LogCaptureFixture
) -> None:
    with proxied(s3) as proxy:
        url = s3.url("down", proxy.port)
    store = machine(tmp_path, url)
    put(store, 1, 2)
    store._thread.submit(lambda: None).result()
    assert got(store, 1) in [("disk", payload_of(1)), ("memory", payload_of(1))]
    assert key_of(3) not in store
    store.close()
    assert len(warnings_of(caplog)) == 1
    assert "nothing is kept in s3://kept/down" in warnings_of(caplog)[0]


def test_a_store_that_takes_nothing_is_read_all_the_same(
    tmp_path: Path, objects: Objects, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    filled(tmp_path, objects.url)
    monkeypatch.setattr(object_store, "_SILENT_S", 0.0)
    monkeypatch.setattr(slabs, "_SLAB_S", 0.01)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Slabs, "_put", full)
    store = machine(tmp_path / "second", objects.url)
    put(store, _NUM, _NUM + 1)
    wait_until(lambda: len(warnings_of(caplog)) > 0)
    put(store, _NUM + 2)
    wait_until(lambda: key_of(1) in store)
    assert got(store, 1) == ("objects", payload_of(1))
    store.close()
    assert len(warnings_of(caplog)) == 1
    assert "No space left" in warnings_of(caplog)[0]


def test_no_writer_waits_for_a_store_and_what_waits_is_bounded(
    tmp_path: Path, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store answers nothing until all was added."""
    monkeypatch.setattr(slabs, "_MOST_WAITING", 10 * _SIZE)
    with proxied(s3) as proxy:
        below = Slabs(s3.url("held", proxy.port), "n", {})
        proxy.may_pass.clear()
        for number in range(100):
            payload = memoryview(payload_of(number))
            below.add(key_of(number), payload, piece_digest("n", key_of(number), payload))
        assert sum(len(payload) for payload, _ in below._waiting.payloads.values()) <= 10 * _SIZE
        proxy.may_pass.set()
        below.close()
    kept = Slabs(s3.url("held"), "n", {})
    assert [number for number in range(100) if key_of(number) in kept] == list(range(10))
    kept.close()


def test_a_piece_is_fetched_once_at_a_time(
    tmp_path: Path, objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path, objects.url)
    fetched, fetch = [], Slabs._range

    def counted(store: Slabs, place: slabs.Place) -> bytes:
        fetched.append(place.offset)
        return fetch(store, place)

    monkeypatch.setattr(Slabs, "_range", counted)
    store = machine(tmp_path / "second", objects.url)
    found: list[bytes | None] = []
    readers = [threading.Thread(target=lambda: found.append(got(store, 2)[1])) for _ in range(8)]
    for each in readers:
        each.start()
    for each in readers:
        each.join()
    assert found == [payload_of(2)] * 8
    assert len(fetched) == 1
    store.close()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("ftp://bucket/kept", "allowed: s3://BUCKET/PREFIX"),
        ("bucket", "allowed: s3://BUCKET/PREFIX"),
        ("s3://", "allowed: s3://BUCKET/PREFIX"),
        ("file://host/kept", "allowed: s3://BUCKET/PREFIX"),
        ("s3://key:secret@bucket/kept", "give the key by the environment"),
        ("s3://bucket/kept?secret_key=x", "received the option 'secret_key'"),
    ],
)
def test_a_url_that_is_none_is_refused(url: str, said: str) -> None:
    with pytest.raises(RequestError, match=said) as raised:
        check_url(url)
    assert "secret@" not in str(raised.value)


def test_a_store_needs_a_folder_and_a_folder_is_no_url() -> None:
    with pytest.raises(RequestError, match="received a cache_objects without a cache_dir"):
        AppArgs(cache_objects="s3://bucket/kept").resolved()
    with pytest.raises(RequestError, match="give the URL as cache_objects"):
        EngineConfig.checked({"cache_dir": Path("s3://bucket/kept")})


def test_a_store_needs_pyarrow(tmp_path: Path) -> None:
    program = f"""
import importlib.util, sys
whole = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "pyarrow" else whole(name, *more)
sys.modules["pyarrow"] = None
from epd.errors import RequestError
from epd.store.slabs import Slabs
try:
    Slabs("file://{tmp_path}", "n", {{}})
except RequestError as error:
    print(error)
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
    )
    assert "needs pyarrow; install epd-vlm[cloud]" in done.stdout
