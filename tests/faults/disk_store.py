"""Keeps keys and values on a disk that fails at drawn operations, by servers that end at some.

Whatever is read is what was written, or a miss. Once the disk is well, everything can be kept, and the folder
is listed. Of each server that ended, one part of a file may be left, which counts as room.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from random import Random

from epd.store.file_format import is_whole
from epd.store.piece_files import PieceFiles, contents, model_digest, stored
from tests.faults.disk import Disk, DiskFault, ServerEndedError

_NUM_PIECES = 12
_NUM_SERVERS = 6
_SIZE = 500
_ROOMS = (_NUM_PIECES * 4000, 3000)  # for all of them, and to share files, or for few


def run_store_on(folder: Path, seed: int, faults: Mapping[int, DiskFault]) -> tuple[list[str], Disk]:
    """Keeps pieces until all faults were met. Returns what was wrong, and the disk."""
    rng, disk = Random(f"{seed} store"), Disk(folder, faults)
    room, model = rng.choice(_ROOMS), folder / "model"
    model.mkdir(parents=True)
    (model / "weights.bin").write_bytes(b"weights")
    digest, found, num_ended = model_digest(model, folder), [], 0
    for _ in range(_NUM_SERVERS):
        try:
            with disk.failing():
                found += _served(folder / "kept", room, rng, model, digest)
        except ServerEndedError:
            num_ended += 1
            disk.restart()
        disk.note_open()
    found += [f"left open: {name}" for name in sorted(disk.left_open)]
    return [*found, *_wrong(folder / "kept", room, num_ended)], disk


def _served(folder: Path, room: int, rng: Random, model: Path, digest: str) -> list[str]:
    """Does what one server does. It writes until the disk does not take something, as `KVStore`."""
    found, can_write = [], True
    files = PieceFiles(folder, "n", room, {"model": "tiny"})
    if model_digest(model, folder) != digest:
        found.append("the model has another digest")
    for number in rng.choices(range(_NUM_PIECES), k=8):
        found += (
            [f"piece {number} is another"] if _read(files, number) not in (None, _payload(number)) else []
        )
        if can_write:
            try:
                _write(files, *rng.choice(((number,), range(number, _NUM_PIECES))))
            except OSError:
                can_write = False
    return found


def _wrong(folder: Path, room: int, num_ended: int) -> list[str]:
    """Returns what is wrong once the disk is well."""
    files, found = PieceFiles(folder, "n", max(_ROOMS), {"model": "tiny"}), []
    num_parts = sum(not is_whole(each.path) for each in stored(folder))
    found += [f"{num_parts} parts are left of {num_ended} servers"] if num_parts > num_ended else []
    num_bytes = sum(each.num_bytes for each in stored(folder))
    found += [f"{num_bytes} bytes in a room of {room}"] if num_bytes > room else []
    for number in range(_NUM_PIECES):
        _write(files, number)
    wrong = [number for number in range(_NUM_PIECES) if _read(files, number) != _payload(number)]
    listed = [(each.namespace, dict(each.about)) for each in contents(folder)]
    found += [f"it is listed as {listed}"] if listed != [("n", {"model": "tiny"})] else []
    return [*found, *([f"pieces {wrong} are not kept"] if wrong else [])]


def _payload(number: int) -> bytes:
    return bytes([number]) * _SIZE


def _write(files: PieceFiles, *numbers: int) -> None:
    """Writes pieces, which share files where there is room."""
    files.write({f"{number:032x}": memoryview(_payload(number)) for number in numbers}, numbers[0])


def _read(files: PieceFiles, number: int) -> bytes | None:
    payload = bytearray(_SIZE)
    return bytes(payload) if files.read(f"{number:032x}", number, memoryview(payload)) else None
