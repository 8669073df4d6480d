"""Counts the frames of damaged videos that show a neighbour, also for answers that decode nothing."""

from __future__ import annotations

import json
import logging
import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path

from epd.encode.encoder_cache import GroupKey

logger = logging.getLogger(__name__)

# Groups of damaged videos to remember; even after a busy day they take less than 20 MB.
MAX_GROUPS = 1 << 14
_FILE = "substituted.json"
_NAME_BYTES = 16


class SubstitutedFrames:
    """Counts the frames of each group that show a neighbour, as of its last decoding.

    Caches share groups by their key, so what was found when a group was decoded holds for each answer that
    gets it without decoding. Beyond `max_groups` the groups noted longest ago are forgotten. Where groups are
    kept on disk, so is this: a line of a file for each change, with a digest of the group's key.
    """

    def __init__(self, max_groups: int = MAX_GROUPS, folder: Path | None = None) -> None:
        """folder: in which groups are kept on disk; None if they are not."""
        self._file = None if folder is None else folder / _FILE
        self._is_kept = folder is not None
        self._num_by_group: OrderedDict[GroupKey | str, int] = OrderedDict()
        self._max_groups = max_groups
        if self._file is not None:
            self._read(self._file)

    def _read(self, file: Path) -> None:
        """Reads what is kept, and writes it anew where most of the lines are outdated."""
        lines = list(_lines_of(file))
        for name, num_substituted in lines:
            self._set(name, num_substituted)
        if len(lines) > 2 * self._max_groups:
            own = file.with_name(f"{file.name}.{os.getpid()}")
            try:
                own.unlink(missing_ok=True)
                _append(own, self._num_by_group.items())
                own.replace(file)
            except OSError as error:
                logger.warning("%s is not made shorter: %s", file, error.strerror)

    def note(self, group: GroupKey, num_substituted: int) -> None:
        """Notes the result of decoding a group."""
        key = self._key(group)
        is_new = self._num_by_group.get(key, 0) != num_substituted
        self._set(key, num_substituted)
        if self._file is not None and is_new:
            try:
                _append(self._file, [(key, num_substituted)])
            except OSError as error:
                logger.warning("substituted frames are kept in %s no longer: %s", self._file, error.strerror)
                self._file = None

    def _set(self, key: GroupKey | str, num_substituted: int) -> None:
        self._num_by_group.pop(key, None)
        if num_substituted:
            self._num_by_group[key] = num_substituted
        if len(self._num_by_group) > self._max_groups:
            self._num_by_group.popitem(last=False)

    def total(self, groups: Iterable[GroupKey]) -> int:
        """Returns the number of substituted frames in these groups."""
        if not self._num_by_group:
            return 0
        return sum(self._num_by_group.get(self._key(group), 0) for group in groups)

    def _key(self, group: GroupKey) -> GroupKey | str:
        """Returns the key, or a digest of it where that is kept."""
        if not self._is_kept:
            return group
        return blake2b(repr(group).encode(), digest_size=_NAME_BYTES).hexdigest()


def _append(file: Path, lines: Iterable[tuple[GroupKey | str, int]]) -> None:
    """Appends lines at once, so that several processes may. Raises OSError."""
    data = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
    opened = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(opened, data)
    finally:
        os.close(opened)


def _lines_of(file: Path) -> Iterator[tuple[str, int]]:
    """Yields what the lines say. One that was cut off, or is no such line, is skipped."""
    try:
        lines = file.read_bytes().splitlines()
    except OSError:
        return
    for line in lines:
        try:
            name, num_substituted = json.loads(line)
        except (ValueError, TypeError):
            continue
        if isinstance(name, str) and isinstance(num_substituted, int):
            yield name, num_substituted
