"""Guards every route: request ids, the Host check, the key, and errors in OpenAI's format."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import math
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from epd.control.recent import Recent
from epd.errors import (
    AdminRightError,
    AuthenticationError,
    EPDError,
    MissingScopeError,
    OverloadedError,
    RequestLimitError,
    RequestTimeoutError,
    UnavailableError,
    http_status,
)
from epd.serve_app.clients import ADMIN_RIGHTS, USER_RIGHTS, Client, Right, owner_with_key
from epd.serve_app.http.address import HostCheck, route_path
from epd.serve_app.http.guard.keyed_clients import KeyedClients
from epd.serve_app.http.protocol import ErrorBody, ErrorReply
from epd.serve_app.observability.record import CLIENT_GONE, RequestRecord, new_request_id, record_of

logger = logging.getLogger(__name__)

_ERROR_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}
# Routes that answer, by POST, and how the ids of their requests begin.
ANSWER_ROUTES = {
    "/v1/chat/completions": "chatcmpl-",
    "/v1/completions": "cmpl-",
    "/v1/responses": "resp_",
    "/invocations": "invoc-",
}
# After these errors the rest of the body is not read.
_CLOSING = (RequestLimitError, RequestTimeoutError)


_MAX_HELD_S, _MAX_CLIENTS = 1.0, 4096


class HeldRefusals:
    """Holds back what a client is refused if it has not waited as it was told.

    refused: wait 1 s    asks after 0.1 s, is refused 0.9 s later    asks after 1 s, is refused at once
    """

    def __init__(self) -> None:
        """Has refused nobody yet."""
        self._until_s: Recent[str, float] = Recent(_MAX_CLIENTS)

    async def hold(self, client: str, retry_after_s: float) -> None:
        """Waits for a second at most. retry_after_s: what the client is told now"""
        now_s = time.monotonic()
        until_s = self._until_s.get(client) or now_s
        self._until_s.set(client, max(until_s, now_s + min(retry_after_s, _MAX_HELD_S)))
        if until_s > now_s:
            await asyncio.sleep(until_s - now_s)


class RequestEdge:
    """Gives every HTTP request a record, every answer its request's id, and every bug an error response."""

    def __init__(
        self,
        app: ASGIApp,
        on_finished: Callable[[RequestRecord], None],
        host_check: HostCheck,
        answers: Mapping[str, ASGIApp] | None = None,
        clients: KeyedClients | None = None,
    ) -> None:
        """Guards app.

        answers: the apps of `ANSWER_ROUTES`, by path; by default the app itself
        clients: whose answers say what is left of their minute
        """
        self._clients = clients
        self._app = app
        self._answers = answers or {}
        self._on_finished = on_finished
        self._host_check = host_check
        self._refusals = HeldRefusals()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = route_path(scope)
        is_answer = scope["method"] == "POST" and path in ANSWER_ROUTES
        record = RequestRecord(
            request_id=new_request_id(ANSWER_ROUTES.get(path, "chatcmpl-")),
            is_answer=is_answer,
            traceparent=Headers(scope=scope).get("traceparent", ""),
        )
        scope.setdefault("state", {})["record"] = record
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                record.status = record.status or message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = record.request_id
                if self._clients is not None and record.client and is_answer:
                    headers.update(self._clients.headers(record.client))
                await self._hold(scope, record, headers)
            await send(message)

        try:
            await self._app_for(scope, record)(scope, receive, send_with_id)
        except Exception:  # the edge of the process: a bug ends one request, not the server
            logger.exception("request_id=%s ended by a bug", record.request_id)
            record.status, record.error = HTTPStatus.INTERNAL_SERVER_ERROR.value, "bug"
            if not started:
                await bug_response(record)(scope, receive, send_with_id)
        finally:
            self._on_finished(record)

    async def _hold(self, scope: Scope, record: RequestRecord, headers: MutableHeaders) -> None:
        client = scope["state"].get("client")
        if record.status == HTTPStatus.TOO_MANY_REQUESTS and isinstance(client, Client):
            await self._refusals.hold(client.share, float(headers.get("retry-after", "0")))

    def _app_for(self, scope: Scope, record: RequestRecord) -> ASGIApp:
        app = self._answers.get(route_path(scope), self._app) if record.is_answer else self._app
        return app if self._host_check.allows(scope) else _foreign_host_response()


def _foreign_host_response() -> JSONResponse:
    message = (
        "received a Host header with a name that is not this server's; allowed: localhost, addresses and "
        "the names it was started with; start it with --allowed-hosts NAME"
    )
    return JSONResponse(
        _reply(HTTPStatus.FORBIDDEN, message, "host_forbidden").model_dump(), HTTPStatus.FORBIDDEN
    )


class KeyCheck:
    """Checks `Authorization: Bearer KEY` in constant time, as a dependency of routes.

    api_key: None allows every client
    admin_api_key: a second valid key, with the rights that `check_admin` requires; None: no client has them
    clients: of a file of keys, in place of an api_key
    """

    def __init__(
        self, api_key: str | None, admin_api_key: str | None = None, clients: KeyedClients | None = None
    ) -> None:
        self._api_key = api_key
        self._clients = clients
        self._admin_api_key = admin_api_key
        self._needs_ask = self.needs("ask")

    async def __call__(self, request: Request) -> None:
        """Finds the client of a request, unless this process asks. Raises AuthenticationError."""
        if not hasattr(request.state, "client"):
            request.state.client = self._found(request)
        elif self._clients is not None:
            request.state.client = self._clients.named(client_of(request))
        record_of(request).client = client_of(request).name

    def needs(self, right: Right) -> Callable[[Request], Awaitable[None]]:
        """Returns the check of routes that need a right. It raises MissingScopeError too."""

        async def check(request: Request) -> None:
            await self(request)
            if right not in client_of(request).rights:
                raise MissingScopeError(
                    "You have insufficient permissions for this operation. Missing scopes: "
                    f"{right}; allowed: {', '.join(sorted(client_of(request).rights))}; use another key"
                )

        return check

    async def admit(self, request: Request) -> None:
        """Checks a request for an answer, and counts it. Raises RateLimitExceededError too."""
        is_from_here = hasattr(request.state, "client")
        await self._needs_ask(request)
        if self._clients is not None and not is_from_here:
            self._clients.admit(client_of(request))

    def _found(self, request: Request) -> Client:
        sent = _sent_key(request)
        is_admin = _is_key(sent, self._admin_api_key)
        if self._clients is not None and not is_admin:
            return self._clients.found(sent)
        if self._api_key is None and not is_admin:  # the header is anything
            return Client(_share(request, b""), space=request.headers.get("authorization", ""))
        if sent is None or not (is_admin or _is_key(sent, self._api_key)):
            raise AuthenticationError(
                "no key or not the right one; allowed: the server's API key; "
                "set the header 'Authorization: Bearer KEY'"
            )
        owner, rights = owner_with_key(sent), ADMIN_RIGHTS if is_admin else USER_RIGHTS
        return Client(_share(request, sent), owner, space=owner, rights=rights)


def _sent_key(request: Request) -> bytes | None:
    """Returns the key that was sent, if any."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip().encode("latin-1") if scheme.lower() == "bearer" else None


def client_of(request: Request) -> Client:
    """Returns who asks, once `KeyCheck` has checked the request."""
    client = request.state.client
    assert isinstance(client, Client)
    return client


def _share(request: Request, key: bytes) -> str:
    """Names a key at an address, since many may use one key; an empty key for none."""
    address = request.client.host if request.client is not None else ""
    return hashlib.blake2b(address.encode() + b" " + key, digest_size=16).hexdigest()


def _is_key(sent: bytes | None, key: str | None) -> bool:
    return sent is not None and key is not None and hmac.compare_digest(sent, key.encode())


def check_admin(request: Request, received: str, allowed: str) -> None:
    """Raises AdminRightError for a request without the admin key. received, allowed: for the message."""
    if not client_of(request).is_admin:
        raise AdminRightError(
            f"received {received}; allowed: {allowed}, and this with the admin key; start the server with "
            "--admin-api-key and set the header 'Authorization: Bearer KEY'"
        )


def error_reply(error: EPDError) -> ErrorReply:
    code = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__.removesuffix("Error")).lower()
    return _reply(http_status(error), str(error), code)


def _reply(status: int, message: str, code: str | None = None) -> ErrorReply:
    fallback = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
    kind = _ERROR_TYPES.get(HTTPStatus(status), fallback) if status in _KNOWN_STATUS else fallback
    return ErrorReply(error=ErrorBody(message=message, type=kind, param=None, code=code))


_KNOWN_STATUS = {status.value for status in HTTPStatus}


def install_error_handlers(app: FastAPI) -> None:
    """Installs handlers that report all errors in OpenAI's format, with the status of `epd.errors`."""
    app.add_exception_handler(EPDError, _on_epd_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)


async def _on_epd_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, EPDError)
    record_of(request).error = type(error).__name__
    headers = {}
    if isinstance(error, OverloadedError | UnavailableError):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, AuthenticationError):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, _CLOSING):
        headers["Connection"] = "close"
    return JSONResponse(error_reply(error).model_dump(), http_status(error), headers)


async def _on_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    return JSONResponse(_reply(error.status_code, message).model_dump(), error.status_code, error.headers)


async def _on_invalid(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return JSONResponse(_reply(HTTPStatus.BAD_REQUEST, "invalid request").model_dump(), 400)


async def _on_disconnect(request: Request, _: Exception) -> Response:
    """Responds after the client left while sending its body: the response is never read."""
    record_of(request).error = "disconnected"
    return Response(status_code=CLIENT_GONE)


def bug_response(record: RequestRecord) -> JSONResponse:
    return JSONResponse(bug_reply(record).model_dump(), HTTPStatus.INTERNAL_SERVER_ERROR)


def bug_reply(record: RequestRecord) -> ErrorReply:
    """Reports an error outside the tree of errors as a bug: the client gets an id, the log the rest."""
    message = f"internal error; the server's log has details under {record.request_id}"
    return _reply(HTTPStatus.INTERNAL_SERVER_ERROR, message, "internal")
