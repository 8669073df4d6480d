"""Reads a file line by line within bounds, and names files that hold something other than lines of JSON.

A line that cannot be read fails alone. A file is refused as a whole only where no line of its beginning looks
like an object of JSON: then each of its lines would fail for the same reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from epd.errors import RequestError

_HEAD_BYTES = 1 << 16
_TAIL_BYTES = 1 << 10
_SKIP_BYTES = 1 << 20
_OBJECT = re.compile(rb"(?:^|\n)(?:\xef\xbb\xbf)?[ \t]*\{[ \t]*[\"}]")
_CR = re.compile(rb"\}[ \t]*\r+[ \t]*\{[ \t]*\"")
_HEADER = re.compile(rb"\"?[A-Za-z_][\w .\"-]*([,;\t][\w .\"-]*)+")
_WHITE = b" \t\r\n\xef\xbb\xbf"
_PACKED = {
    b"\x1f\x8b": "gzip", b"PK\x03\x04": "ZIP, as spreadsheets are", b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PAR1": "Parquet",
}  # fmt: skip
_ADVICE = "allowed: UTF-8 with a JSON object on each line"


def whole_lines(file: BinaryIO, max_bytes: int) -> Iterator[tuple[bytes, int]]:
    """Yields each line and its length in the file. Of longer ones no more than `max_bytes` + 1 is kept."""
    while text := file.readline(max_bytes + 1):
        num_bytes = len(text)
        last = text
        while len(text) > max_bytes and not last.endswith(b"\n") and (last := file.readline(_SKIP_BYTES)):
            num_bytes += len(last)
        yield text, num_bytes


def check_is_lines(file: BinaryIO, source: Path) -> None:
    """Leaves the file at its start. Raises RequestError for one that holds no lines, by what it holds."""
    head = file.read(_HEAD_BYTES)
    file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
    tail = file.read().rstrip(_WHITE)
    file.seek(0)
    found = _array(head, tail) or _old_ends(head) or ("" if _OBJECT.search(head) else _other(head))
    if found:
        raise RequestError(f"'{source}' {found}")


def _array(head: bytes, tail: bytes) -> str:
    """Returns what is wrong with the file if it is one JSON array; empty for any other."""
    lines = head.lstrip(_WHITE).split(b"\n", 2)
    is_array = lines[0].startswith(b"[") and tail.endswith(b"]")
    is_one = len(lines) == 1 or not lines[0].rstrip().endswith(b"]")
    return f"holds a JSON array; {_ADVICE}; `jq -c '.[]'` writes them" if is_array and is_one else ""


def _old_ends(head: bytes) -> str:
    """Returns what is wrong with a file whose lines end as on old Macs; empty for any other."""
    is_old = b"\n" not in head and _CR.search(head)
    return (
        "ends its lines with CR alone; allowed: LF or CR LF; `tr '\\r' '\\n'` converts it" if is_old else ""
    )


def _other(head: bytes) -> str:
    """Returns what is wrong with a file without any line that begins as an object does; empty if nothing."""
    for magic, name in _PACKED.items():
        if head.startswith(magic):
            return f"is compressed or binary ({name}); {_ADVICE}; unpack or convert it"
    if wide := _wide(head):
        return f"is {wide}; {_ADVICE}; `iconv -f {wide} -t UTF-8` converts it"
    lines = [line for line in re.split(rb"[\r\n]+", head.strip(_WHITE)) if line.strip()]
    if len(lines) < 2:
        return ""
    if lines[0].strip() == b"{":
        return f"holds JSON over several lines; {_ADVICE}; `jq -c .` writes it so"
    if _HEADER.fullmatch(lines[0].strip()):
        shown = lines[0][:60].decode("utf-8", "replace")
        return f"is a table with the header {shown!r}; {_ADVICE}, or a .csv with commas; rename or convert it"
    return ""


def _wide(head: bytes) -> str:
    """Returns the encoding of a text of two or four bytes a character; empty for any other."""
    if head.startswith((b"\xff\xfe\0\0", b"\0\0\xfe\xff")) or b"\0\0\0" in head[:8]:
        return "UTF-32"
    is_wide = head.startswith((b"\xff\xfe", b"\xfe\xff")) or (b"\0" in head[:2] and b"{" in head[:2])
    return "UTF-16" if is_wide else ""
