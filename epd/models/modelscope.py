"""Finds a model by its name at ModelScope: in the cache that ModelScope's client keeps, else by a download.

    OWNER/NAME -> models/OWNER--NAME/snapshots/REVISION      clients before 1.38: [hub/]models/OWNER/NAME

A download is by the HTTP routes that this client uses:

    /api/v1/models/OWNER/NAME/repo/files?Revision=      the files with sizes and digests
    /api/v1/models/OWNER/NAME/repo?Revision=&FilePath=  one file, from any byte on

`MODELSCOPE_CACHE`, `MODELSCOPE_ENDPOINT` and `MODELSCOPE_API_TOKEN` act as with that client.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from epd.console import progress_bar
from epd.errors import EPDError, ModelError, ModelNotFoundError
from epd.late_module import LateModule
from epd.models.hub import INCLUDED, SMALL, HubModel, check_room, is_whole, weights_of

if TYPE_CHECKING:
    import httpx
else:
    httpx = LateModule("httpx")

MASTER = "master"
_ENDPOINT = "https://www.modelscope.cn"
_PIECE_BYTES = 1 << 20
_MB = 10**6
_TIMEOUT_S, _CONNECT_S = 60.0, 10.0
# A model that is not there, and one that is not shown to who asks.
_MISSING = (401, 403, 404)


@dataclass(frozen=True, slots=True)
class ModelScopeModel(HubModel):
    """Names a model of ModelScope. revision: a branch, tag or commit."""

    revision: str = MASTER

    @property
    def command(self) -> str:
        revision = "" if self.revision == MASTER else f" --revision {self.revision}"
        return f"modelscope download --model {self.name}{revision} --include {INCLUDED}"

    @property
    def cache(self) -> Path:
        return Path(os.environ.get("MODELSCOPE_CACHE") or "~/.cache/modelscope").expanduser()

    @property
    def folder(self) -> Path:
        """Returns where a download puts the model's files."""
        return self.cache / "models" / self.name.replace("/", "--") / "snapshots" / self.revision

    def cached(self) -> Path | None:
        found = [self.folder]
        if self.revision == MASTER:  # of older clients, whose folders do not tell the revision
            owner, name = self.name.replace(".", "___").split("/")
            found += [self.cache / above / owner / name for above in ("models", "hub/models")]
        return next((each for each in found if is_whole(each)), None)

    def pinned(self, _folder: Path) -> str:
        return self.revision

    def downloaded(self) -> Path:
        try:
            with ExitStack() as stack:
                client = stack.enter_context(_client())
                files = _listed(client, self)
                self.folder.mkdir(parents=True, exist_ok=True)
                lock = stack.enter_context(self.folder.with_suffix(".lock").open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX)  # processes that get the same model wait for each other
                for name in _missing(self, [name for name in files if name.endswith(SMALL)]):
                    _get(client, self, files[name])
                missing = _missing(self, weights_of(self, self.folder, files))
                check_room(self, {name: files[name].num_bytes for name in missing}, "MODELSCOPE_CACHE")
                for name in missing:
                    _get(client, self, files[name])
                return self.folder
        except EPDError:
            raise
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, LookupError, TypeError) as error:
            raise _explained(self, error) from error


@dataclass(frozen=True, slots=True)
class _File:
    """Describes a file of a model. sha256: empty where the hub does not tell it."""

    name: str
    num_bytes: int
    sha256: str


def _missing(model: ModelScopeModel, names: Collection[str]) -> list[str]:
    return [name for name in names if not (model.folder / name).exists()]


def _client() -> httpx.Client:
    endpoint = os.environ.get("MODELSCOPE_ENDPOINT") or _ENDPOINT
    base = endpoint if "://" in endpoint else f"https://{endpoint}"
    client = httpx.Client(
        base_url=base, timeout=httpx.Timeout(_TIMEOUT_S, connect=_CONNECT_S), follow_redirects=True
    )
    if token := os.environ.get("MODELSCOPE_API_TOKEN"):
        client.headers["Authorization"] = f"Bearer {token}"
        client.cookies.set("m_session_id", token, domain=urlsplit(base).hostname or "")
    return client


def _listed(client: httpx.Client, model: ModelScopeModel) -> Mapping[str, _File]:
    """Returns the files of the model's first folder, by name."""
    asked = {"Revision": model.revision, "Recursive": "False"}
    answer = client.get(f"/api/v1/models/{model.name}/repo/files", params=asked).raise_for_status().json()
    files = [
        _File(str(each["Path"]), int(each["Size"]), str(each.get("Sha256") or ""))
        for each in answer["Data"]["Files"]
        if each.get("Type") != "tree"
    ]
    return {each.name: each for each in files if Path(each.name).name == each.name}


def _get(client: httpx.Client, model: ModelScopeModel, file: _File) -> None:
    """Gets a file, from where an earlier try ended. Shows a bar on a terminal."""
    part = model.folder / f"{file.name}.incomplete"
    start = part.stat().st_size if part.exists() else 0
    headers = {"Range": f"bytes={start}-"} if 0 < start < file.num_bytes else {}
    asked = {"Revision": model.revision, "FilePath": file.name}
    route = f"/api/v1/models/{model.name}/repo"
    with (
        client.stream("GET", route, params=asked, headers=headers) as answer,
        part.open("ab") as out,
        progress_bar(f"{file.name}, MB") as show,
    ):
        answer.raise_for_status()
        if answer.status_code != httpx.codes.PARTIAL_CONTENT:
            out.truncate(0)
        for piece in answer.iter_bytes(_PIECE_BYTES):
            out.write(piece)
            if out.tell() > file.num_bytes:
                break
            show(out.tell() // _MB, file.num_bytes // _MB)
    _check(part, file)
    part.replace(model.folder / file.name)


def _check(part: Path, file: _File) -> None:
    """Raises ModelError unless a file has the size and the digest that were listed."""
    received, right = part.stat().st_size, True
    if received == file.num_bytes and file.sha256:
        with part.open("rb") as stream:
            right = hashlib.file_digest(stream, "sha256").hexdigest() == file.sha256
    if received >= file.num_bytes and (received > file.num_bytes or not right):
        part.unlink()
    if received != file.num_bytes or not right:
        what = "other bytes than the hub lists" if received == file.num_bytes else f"{received} bytes"
        raise ModelError(f"received {what} for {file.name}; allowed: its {file.num_bytes}; run it again")


def _explained(model: ModelScopeModel, error: Exception) -> ModelError:
    if isinstance(error, httpx.HTTPStatusError) and error.response.status_code in _MISSING:
        return ModelNotFoundError(
            f"there is no folder '{model.name}', and ModelScope shows no model of that name with a revision "
            f"{model.revision!r}; check the spelling, or set MODELSCOPE_API_TOKEN"
        )
    reason = " ".join(str(error).split())[:160] or type(error).__name__
    return ModelNotFoundError(
        f"there is no folder '{model.name}', no such model in '{model.cache}', and ModelScope did not "
        f"give it ({reason}); give a folder, or run this where ModelScope can be reached: {model.command}"
    )
