"""Contains the page at `/` and that of the API at `/docs`, without a build step or anything external."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import cache
from http import HTTPStatus
from mimetypes import guess_type
from pathlib import Path
from threading import Lock

from fastapi import APIRouter
from fastapi.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from epd.serve_app.http.address import HostCheck, route_path
from epd.serve_app.observability.record import new_request_id
from epd.shapes import make_scene

_SCHEMA = "/openapi.json"
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


class Pages:
    """Finds pages whose bytes are prepared, to be sent below the framework's costlier routing."""

    def __init__(self, host_check: HostCheck, schema: Callable[[str], bytes]) -> None:
        """Reads the files. schema: returns the API's schema below a path, as JSON."""
        self._host_check = host_check
        self._schema = schema
        self._pages = {route: _page(_FOLDER / name) for route, name in _FILES.items()}
        self._schemas: dict[str, _Prepared] = {}
        self._lock = Lock()  # of the thread that writes one

    def found(self, scope: Scope) -> ASGIApp | None:
        """Returns what answers a GET; None where it is for no page, or has another server's name."""
        path = route_path(scope)
        if path not in (_SCHEMA, *self._pages) or not self._host_check.allows(scope):
            return None
        return self._pages.get(path, self._send_schema)

    async def _send_schema(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers with the schema. A thread writes it when it is first asked for: it takes a second."""
        root = scope.get("root_path", "").rstrip("/")
        schema = self._schemas.get(root)
        if schema is None:
            schema = await asyncio.to_thread(self._written, root)
        await schema(scope, receive, send)

    def _written(self, root: str) -> _Prepared:
        with self._lock:
            return self._schemas.get(root) or self._schemas.setdefault(
                root, _Prepared(self._schema(root), _SCHEMA)
            )


class _Prepared:
    """Answers with bytes that are in memory."""

    def __init__(self, body: bytes, name: str, headers: Mapping[str, str] | None = None) -> None:
        """Prepares the answer. name: of a file of its type."""
        self._body = body
        self._headers = Response(body, headers=headers, media_type=guess_type(name)[0]).raw_headers

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        headers = [*self._headers, (b"x-request-id", new_request_id().encode())]
        await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": headers})
        await send({"type": "http.response.body", "body": self._body})


def _page(path: Path) -> _Prepared:
    return _Prepared(path.read_bytes(), path.name, _HEADERS)


sample_route = APIRouter(include_in_schema=False)


@sample_route.get("/page/sample.mp4")
async def send_sample() -> Response:
    return Response(await asyncio.to_thread(_sample), media_type="video/mp4", headers=_HEADERS)


@cache
def _sample() -> bytes:
    """Returns a video of drawn shapes, made when it is first asked for."""
    from epd.video.demo_video import drawn_frames, encode_h264  # PyAV, which other pages do not need

    video = io.BytesIO()
    times_s = (number / _FPS for number in range(_SECONDS * _FPS))
    frames = drawn_frames(make_scene(_SEED, float(_SECONDS)), times_s, _HEIGHT, _WIDTH)
    encode_h264(video, frames, fps=Fraction(_FPS), height=_HEIGHT, width=_WIDTH)
    return video.getvalue()
