"""Writes docs/openapi.json, the schema of the HTTP API: `python -m tests.openapi_file`."""

from __future__ import annotations

import json
from typing import Any

from epd.control.routing import Router
from epd.serve_app.http.api import create_api
from epd.serve_app.media.fleet_media import FleetMedia
from tests import ROOT
from tests.serve_app.fakes import FakeService
from tests.serve_app.media_fleet import MediaFleet

FILE = ROOT / "docs" / "openapi.json"


def schema() -> dict[str, Any]:
    """Returns what a server gives at /openapi.json."""
    return create_api(FakeService(), FleetMedia(MediaFleet(names=()), Router())).openapi()


if __name__ == "__main__":
    FILE.write_text(json.dumps(schema(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
