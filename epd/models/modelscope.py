"""Finds a model by its name at ModelScope: in the cache that ModelScope's client keeps, else by a download.

    OWNER/NAME -> models/OWNER--NAME/snapshots/REVISION      clients before 1.38: [hub/]models/OWNER/NAME

`MODELSCOPE_CACHE`, `MODELSCOPE_ENDPOINT` and `MODELSCOPE_API_TOKEN` act as with that client.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from epd.models.hub import INCLUDED, HubModel, is_whole

MASTER = "master"


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
