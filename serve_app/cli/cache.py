"""The command `epd cache`."""

from __future__ import annotations

import math
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from epd import console
from epd.errors import RequestError
from epd.serve_app.cli.usage import GroupedCommand
from epd.store.file_format import is_whole
from epd.store.object_contents import ObjectContents
from epd.store.piece_files import Contents, contents, remove_oldest, stored

cache = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

_DAY_S = 86_400.0
_Kept = Annotated[
    str,
    typer.Argument(metavar="PLACE", help="A --cache-dir, or a --cache-objects."),
]
_Model = Annotated[str | None, typer.Option(metavar="NAME", help="Only what is kept of this model.")]
_Days = Annotated[
    float, typer.Option("--unused-days", metavar="N", help="Only what was not used for N days.", min=0)
]


@cache.callback()
def _cache() -> None:
    """List or remove what --cache-dir keeps."""


@cache.command(cls=GroupedCommand)
def ls(place: _Kept) -> None:
    """List what is kept, by model and settings."""
    for each in _contents(place):
        used = datetime.fromtimestamp(each.used_s, UTC)
        size = f"{each.num_bytes / 1e6:,.1f} MB"
        of = f"{each.about.get('model', '?')} {each.about.get('visual', '')}".rstrip()
        num = console.counted(each.num_files, "piece")
        console.stream_text(
            f"{each.namespace[:8]}  {num:>12}  {size:>14}  last used {used:%Y-%m-%d %H:%M} UTC  {of}\n"
        )


@cache.command(cls=GroupedCommand)
def rm(place: _Kept, model: _Model = None, unused_days: _Days = 0.0) -> None:
    """Remove what is kept. A server that uses the folder computes it again."""
    # What another machine's clock has dated later than now goes too, where all is to go.
    most_s = time.time() - unused_days * _DAY_S if unused_days else math.inf
    removed = 0
    for each in _contents(place):
        if model in (None, each.about.get("model")):
            if _is_url(place):
                removed += ObjectContents(place).remove(each.namespace, most_s)
                continue
            folder = Path(place, each.namespace)
            before = sum(file.num_bytes for file in stored(folder))
            removed += before - remove_oldest(folder, 0, before_s=most_s)
    console.stream_text(f"removed {removed / 1e6:,.1f} MB\n")


@cache.command(cls=GroupedCommand)
def verify(place: _Kept) -> None:
    """Read every piece, and remove those that are damaged. Ends with code 1 if there are any."""
    if _is_url(place):
        found = list(ObjectContents(place).verify())
        damaged = [slab for slab, _, is_right in found if not is_right]
        num_pieces = sum(num for _, num, _ in found)
    else:
        files = [file for each in _contents(place) for file in stored(Path(place, each.namespace))]
        files = [file for file in files if not file.path.name.startswith(".")]  # which are being written
        damaged = [str(file.path) for file in files if not is_whole(file.path) and file.path.exists()]
        num_pieces = len(files)
        for path in damaged:
            Path(path).unlink(missing_ok=True)
    for path in damaged:
        console.stream_text(f"removed {path}, which is damaged\n")
    console.stream_text(f"{console.counted(num_pieces, 'piece')}, {len(damaged)} damaged\n")
    if damaged:
        raise typer.Exit(1)


def _is_url(place: str) -> bool:
    return "://" in place


def _contents(place: str) -> list[Contents]:
    """Reads what the folder, or the object store, has. Raises RequestError for one that is not there."""
    if _is_url(place):
        return list(ObjectContents(place).contents())
    folder = Path(place)
    if not folder.is_dir():
        raise RequestError(f"received '{folder}', which is no folder; allowed: a --cache-dir; name one")
    return list(contents(folder))
