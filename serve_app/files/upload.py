"""Writes the file of a multipart form to disk, piece by piece as it arrives."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import BinaryIO

from pydantic import ValidationError
from python_multipart.exceptions import FormParserError, MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from epd.errors import RequestError, RequestLimitError
from epd.serve_app.fair_threads import ResultT
from epd.serve_app.files.file_store import FileStore
from epd.serve_app.files.records import (
    MAX_KEPT_S,
    MIN_KEPT_S,
    UPLOAD_PURPOSES,
    ExpiresAfter,
    FileObject,
    Purpose,
)

_PIECE_BYTES = 1 << 20
_ROOM_BYTES = 16 << 20
_MAX_FIELD_BYTES = 4096
_MAX_HEADER_BYTES = 4096
_MAX_PARTS = 16
_MAX_NAME = 200


class UploadForm:
    """Takes a form's bytes in any pieces, and writes a file of it to a path. Fields are kept in memory."""

    def __init__(self, content_type: str, path: Path, max_bytes: int, field: str = "file") -> None:
        """Takes the Content-Type header. Raises RequestError for another type.

        max_bytes: of the file
        field: its name in the form
        """
        kind, options = parse_options_header(content_type.encode("latin-1"))
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise RequestError(
                f"received the content type {content_type[:50]!r}; allowed: multipart/form-data with a "
                "boundary; send the file as a field of a form"
            )
        self._max_bytes = max_bytes
        self._field = field
        self._file: BinaryIO | None = None
        self.path = path
        self._fields: dict[str, bytearray] = {}
        self._header, self._value = bytearray(), bytearray()
        self._disposition = b""
        self._part = ""
        self._num_parts = 0
        self.num_bytes = 0
        self.filename = ""
        self.has_file = self.is_complete = False
        self._parser = self._parser_of(boundary)

    def _parser_of(self, boundary: bytes) -> MultipartParser:
        try:
            return MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin,
                    "on_header_field": self._add_header,
                    "on_header_value": self._add_value,
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._open,
                    "on_part_data": self._add_data,
                    "on_end": self._end,
                },
            )
        except FormParserError:
            raise RequestError(
                f"received a form with a boundary of {len(boundary)} bytes; allowed: 256 at most; set a "
                "shorter one"
            ) from None

    def write(self, data: bytes) -> None:
        """Takes the next bytes. Raises RequestError for what is no form, RequestLimitError, OSError."""
        try:
            self._parser.write(data)
        except MultipartParseError:
            raise RequestError(
                "the body is not the form that its header says; allowed: multipart/form-data; send it again"
            ) from None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def check(self) -> None:
        """Checks a form that has ended. Raises RequestError."""
        if not self.is_complete:
            raise RequestError("received a form without its end; allowed: a whole one; send it again")
        if not self.has_file:
            raise RequestError(
                f"received a form without a file; allowed: one field '{self._field}'; send one"
            )
        if not self.num_bytes:
            raise RequestError("received an empty file; allowed: 1 byte or more; send its bytes")

    @property
    def purpose(self) -> Purpose:
        """Returns what the file is for. Raises RequestError."""
        named = self._text("purpose")
        for purpose in UPLOAD_PURPOSES:
            if named == purpose:
                return purpose
        allowed = ", ".join(map(repr, UPLOAD_PURPOSES))
        raise RequestError(f"received the purpose {named[:50]!r}; allowed: {allowed}; set purpose to one")

    @property
    def kept_s(self) -> int | None:
        """Returns how long the file is kept; None for ever. Raises RequestError."""
        names = ("anchor", "seconds")
        said = {name: text for name in names if (text := self._text(f"expires_after[{name}]"))}
        if not said:
            return None
        try:
            return ExpiresAfter.model_validate_strings(said).seconds
        except ValidationError:
            shown = " and ".join(f"{name} {text[:50]!r}" for name, text in said.items())
            raise RequestError(
                f"received expires_after with {shown}; allowed: created_at and {MIN_KEPT_S} to {MAX_KEPT_S} "
                "seconds; change it or leave it out"
            ) from None

    def _text(self, name: str) -> str:
        """Returns a field of the form; an empty text for none."""
        return self._fields.get(name, bytearray()).decode("utf-8", "replace")

    def _begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise RequestLimitError(
                f"the form has more than {_MAX_PARTS} fields; send the file, and its purpose"
            )
        self._disposition, self._part = b"", ""
        self._header.clear()
        self._value.clear()

    def _add_header(self, data: bytes, start: int, stop: int) -> None:
        self._add_to(self._header, data[start:stop], _MAX_HEADER_BYTES)

    def _add_value(self, data: bytes, start: int, stop: int) -> None:
        self._add_to(self._value, data[start:stop], _MAX_HEADER_BYTES)

    def _end_header(self) -> None:
        if bytes(self._header).lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def _open(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._part = options.get(b"name", b"").decode("utf-8", "replace")
        if self._part != self._field:
            self._fields.setdefault(self._part, bytearray())
            return
        if self.has_file:
            raise RequestError("received several files; allowed: one; upload each by itself")
        name = options.get(b"filename", b"file").decode("utf-8", "replace")
        self.filename, self.has_file = name[:_MAX_NAME], True
        self._file = self.path.open("xb")

    def _add_data(self, data: bytes, start: int, stop: int) -> None:
        if self._part != self._field or self._file is None:
            self._add_to(self._fields[self._part], data[start:stop], _MAX_FIELD_BYTES)
            return
        self.num_bytes += stop - start
        if self.num_bytes > self._max_bytes:
            raise RequestLimitError(
                f"the file has more than {self._max_bytes} bytes; allowed that many in one request; send it "
                "in parts to /v1/uploads, or start the server with a larger --max-file-bytes"
            )
        self._file.write(data[start:stop])

    def _end(self) -> None:
        self.is_complete = True

    def _add_to(self, whole: bytearray, data: bytes, max_bytes: int) -> None:
        whole += data
        if len(whole) > max_bytes:
            raise RequestLimitError(f"a field of the form has more than {max_bytes} bytes; allowed that many")


async def kept_upload(
    store: FileStore, owner: str, content_type: str, chunks: AsyncIterator[bytes]
) -> FileObject:
    """Returns the file that a form brings. Nothing of it stays if that fails. Raises EPDError, OSError.

    owner: whose it is
    chunks: of the body
    """
    part = await store.run(owner, store.new_part, owner)
    form = UploadForm(content_type, part, store.settings.max_file_bytes)
    return await kept_form(
        store,
        owner,
        form,
        chunks,
        lambda: store.keep(part, owner, form.filename, form.purpose, form.kept_s),
    )


async def kept_form(
    store: FileStore,
    owner: str,
    form: UploadForm,
    chunks: AsyncIterator[bytes],
    keep: Callable[[], ResultT],
) -> ResultT:
    """Writes the file of a form. Returns what `keep` does, which may move it; otherwise it is removed.

    Raises EPDError, OSError.
    """

    def end(rest: bytes) -> ResultT:
        form.write(rest)
        form.close()
        form.check()
        return keep()

    try:
        return await store.run(owner, end, await _write_pieces(store, owner, form, chunks))
    finally:
        form.close()
        form.path.unlink(missing_ok=True)


async def _write_pieces(
    store: FileStore, owner: str, form: UploadForm, chunks: AsyncIterator[bytes]
) -> bytes:
    """Writes in pieces, so that a thread is needed once for many chunks. Returns what is less than one."""
    waiting, since_check = bytearray(), 0
    async for chunk in chunks:
        waiting += chunk
        if len(waiting) < _PIECE_BYTES:
            continue
        await store.run(owner, form.write, bytes(waiting))
        since_check += len(waiting)
        waiting.clear()
        if since_check > _ROOM_BYTES:
            since_check = 0
            await store.run(owner, store.room.check_bytes)
    return bytes(waiting)
