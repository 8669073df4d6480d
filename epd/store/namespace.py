"""Names all that keys and values depend on besides the tokens, so that no model reads those of another.

Files of a model are read once. Their digests are kept beside what is stored, by path, inode, size and time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b, file_digest
from pathlib import Path

from epd import __version__

# Of the files of this room. Another number is another namespace.
_FORMAT = 2
_NAME_BYTES = 16
_DIGESTS = "models.json"
_SUFFIXES = frozenset((".safetensors", ".bin", ".json", ".model", ".txt", ".jinja", ".tiktoken"))


def namespace(facts: Mapping[str, str]) -> str:
    """Returns the name of a namespace: a digest of these facts, of this version and of the files' format."""
    text = json.dumps({"epd": __version__, "format": _FORMAT, **facts}, sort_keys=True)
    return blake2b(text.encode(), digest_size=_NAME_BYTES).hexdigest()


def model_digest(model: Path, folder: Path) -> str:
    """Returns a digest of a model's files, weights and settings. folder: where digests of files are kept."""
    whole = blake2b(digest_size=_NAME_BYTES)
    known = _read(folder / _DIGESTS)
    found = {}
    for file in sorted(each for each in model.iterdir() if each.suffix in _SUFFIXES and each.is_file()):
        stat = file.stat()
        place = f"{file.resolve()} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns}"
        found[place] = known.get(place) or _digest_of(file)
        whole.update(f"{file.name} {found[place]}\n".encode())
    if not found.keys() <= known.keys():
        _write(folder / _DIGESTS, known | found)
    return whole.hexdigest()


def _digest_of(file: Path) -> str:
    with file.open("rb") as opened:
        return file_digest(opened, "sha256").hexdigest()


def _read(file: Path) -> dict[str, str]:
    """Reads digests; none from a file that is not there or not whole."""
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _write(file: Path, digests: Mapping[str, str]) -> None:
    """Keeps digests, if the disk takes them: else they are made again."""
    own = file.with_name(f"{file.name}.{os.getpid()}")
    with suppress(OSError):
        own.write_text(json.dumps(digests, indent=1), encoding="utf-8")
        own.replace(file)
        return
    with suppress(OSError):
        own.unlink(missing_ok=True)
