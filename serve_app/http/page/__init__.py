"""Contains the page at `/` and that of the API at `/docs`, without a build step or anything external."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from fastapi.responses import FileResponse

_FOLDER = Path(__file__).parent
_FILES = {
    "/": "index.html",
    "/docs": "docs.html",
    "/page/docs.js": "docs.js",
    "/page/style.css": "style.css",
    "/page/app.js": "app.js",
    "/page/dialogue.js": "dialogue.js",
    "/page/timeline.js": "timeline.js",
    "/page/frames.js": "frames.js",
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' blob: data:; media-src blob:; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_routes() -> APIRouter:
    router = APIRouter(include_in_schema=False)
    for route, name in _FILES.items():
        router.get(route)(_sender(name))
    return router


def _sender(name: str) -> Callable[[], Coroutine[Any, Any, FileResponse]]:
    async def send() -> FileResponse:
        return FileResponse(_FOLDER / name, headers=_HEADERS)

    return send
