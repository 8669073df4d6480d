"""Parts the options of a test into an engine's record and what remains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from epd.engine_config import DEFAULT_ENGINE, ENGINE_FIELDS, EngineConfig


def parted(
    options: Mapping[str, Any], base: EngineConfig = DEFAULT_ENGINE
) -> tuple[EngineConfig, dict[str, Any]]:
    """Returns a record with the options that are fields of it, and all others.

    drafting: a `DraftConfig`, taken for the two fields that it is made of.
    """
    others = {name: value for name, value in options.items() if name not in ENGINE_FIELDS}
    drafting = others.pop("drafting", base.drafting)
    given = {name: value for name, value in options.items() if name in ENGINE_FIELDS}
    drafts = {"draft": drafting.method, "max_draft": drafting.max_draft}
    return base.model_copy(update=drafts | given), others
