"""Contains the page at `/` and that of the API at `/docs`, without a build step or anything external."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Coroutine
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from fastapi.responses import FileResponse, Response

from epd.shapes import make_scene

_FOLDER = Path(__file__).parent
_FILES = {
    "/": "index.html",
    "/docs": "docs.html",
    **{
        f"/page/{path.name}": path.name
        for path in sorted(_FOLDER.iterdir())
        if path.suffix in (".css", ".js")
    },
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' blob: data:; media-src blob:; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
# Of the sample video.
_SEED, _SECONDS, _FPS, _HEIGHT, _WIDTH = 11, 30, 8, 216, 384


def page_routes() -> APIRouter:
    router = APIRouter(include_in_schema=False)
    for route, name in _FILES.items():
        router.get(route)(_sender(name))
    router.get("/page/sample.mp4")(_send_sample)
    return router


def _sender(name: str) -> Callable[[], Coroutine[Any, Any, FileResponse]]:
    async def send() -> FileResponse:
        return FileResponse(_FOLDER / name, headers=_HEADERS)

    return send


async def _send_sample() -> Response:
    return Response(await asyncio.to_thread(_sample), media_type="video/mp4", headers=_HEADERS)


@cache
def _sample() -> bytes:
    """Returns a video of drawn shapes, made when it is first asked for."""
    from epd.video.demo_video import PLAIN, encode_h264  # PyAV, which other pages do not need

    video = io.BytesIO()
    times_s = (number / _FPS for number in range(_SECONDS * _FPS))
    frames = PLAIN.frames(make_scene(_SEED, float(_SECONDS)), times_s, _HEIGHT, _WIDTH)
    encode_h264(video, frames, fps=Fraction(_FPS), height=_HEIGHT, width=_WIDTH)
    return video.getvalue()
