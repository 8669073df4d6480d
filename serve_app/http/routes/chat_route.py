"""Answers requests to the model below the framework's routing, which costs more than a short request itself.

edge --POST /v1/chat/completions--> error handlers --> key --> endpoint
  '----everything else------------> the framework's routes, and of them the same endpoint
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request, Response
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from epd.serve_app.http.guard.http_guard import KeyCheck


def chat_route(app: FastAPI, keys: KeyCheck, endpoint: Callable[[Request], Awaitable[Response]]) -> ASGIApp:
    """Returns an ASGI app that does what the routed endpoint does.

    app: whose handlers turn errors into responses
    keys: checks the key of each request
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        await keys(request)
        response = await endpoint(request)
        await response(scope, receive, send)

    return ExceptionMiddleware(answer, handlers=app.exception_handlers)
