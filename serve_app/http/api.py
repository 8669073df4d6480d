"""Builds the HTTP app: OpenAI's chat completions over an AnswerService, health, metrics, and the page."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from epd import __version__
from epd.errors import ModelNotFoundError
from epd.machine import steady_time_s
from epd.serve_app.clients import Right
from epd.serve_app.files.batch_runner import BatchRunner
from epd.serve_app.files.records import BatchRequest, CompleteRequest, UploadRequest
from epd.serve_app.http.address import HostCheck
from epd.serve_app.http.guard.http_guard import (
    KeyCheck,
    RequestEdge,
    check_admin,
    client_of,
    install_error_handlers,
)
from epd.serve_app.http.page import Pages, sample_route
from epd.serve_app.http.protocol import (
    DecisionReport,
    ErrorReply,
    Health,
    LoadEntry,
    LoadReport,
    ModelEntry,
    ModelList,
    RolesRequest,
    ServerLoad,
    StatusReport,
    Version,
)
from epd.serve_app.http.requests.chat_request import ChatRequest
from epd.serve_app.http.requests.completion_request import CompletionRequest
from epd.serve_app.http.requests.prompt_request import DetokenizeRequest, TokenizeRequest
from epd.serve_app.http.requests.response_request import ResponseRequest
from epd.serve_app.http.routes.answer_routes import (
    answer_routes,
    chat_completions,
    completions,
    invocations,
    responses,
)
from epd.serve_app.http.routes.file_routes import batch_routes, file_routes
from epd.serve_app.http.routes.prompt_routes import prompt_routes
from epd.serve_app.http.server_state import ApiSettings, ServerState, server_of
from epd.serve_app.observability import metrics
from epd.serve_app.observability.figures import log_figures
from epd.serve_app.service import AnswerService, MediaService
from epd.serve_app.service_status import RoleSwitch
from epd.serve_app.task_group import Tasks

__all__ = ["ApiSettings", "create_api"]

_ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorReply}, "5XX": {"model": ErrorReply}}
_MAX_ROLES_BYTES = 4096
_BODIES = (
    ChatRequest,
    CompletionRequest,
    ResponseRequest,
    TokenizeRequest,
    DetokenizeRequest,
    BatchRequest,
    UploadRequest,
    CompleteRequest,
)
_SCHEMA_REF = "#/components/schemas/{model}"


def create_api(service: AnswerService, media: MediaService, settings: ApiSettings | None = None) -> FastAPI:
    """Creates the app. Its lifespan calls `app.state.server.close()`; without one the caller must do so.

    media: keeps the media of requests to the service
    """
    server = ServerState(service, media, settings or ApiSettings())
    app = _App(
        title="epd", version=__version__, openapi_url=None, docs_url=None, redoc_url=None, lifespan=_lifespan
    )
    app.state.server = server
    has_key = server.settings.api_key is not None or server.clients is not None
    hosts = HostCheck(server.settings.allowed_hosts, has_key=has_key)
    keys = KeyCheck(server.settings.api_key, server.settings.admin_api_key, server.clients)
    install_error_handlers(app)
    endpoints = {
        "/v1/chat/completions": chat_completions,
        "/v1/completions": completions,
        "/v1/responses": responses,
        "/invocations": invocations,
    }
    answers = {path: chat_route(app, keys, endpoint) for path, endpoint in endpoints.items()}
    app.add_middleware(
        RequestEdge, on_finished=server.finish, host_check=hosts, answers=answers, clients=server.clients
    )
    app.include_router(_open)
    app.include_router(_guarded, dependencies=[Depends(keys)])
    for routes, right in _RIGHTS:
        app.include_router(routes, responses=_ERRORS, dependencies=[Depends(keys.needs(right))])
    app.include_router(sample_route)
    app.pages = Pages(hosts, app.openapi_under)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    server = app.state.server
    runner = None if server.batches is None else BatchRunner(server.batches, app)
    tasks = Tasks()
    try:
        if server.settings.log_stats_s is not None:
            tasks.spawn(log_figures(server.render_metrics, server.settings.log_stats_s))
        if runner is not None:
            runner.start()
        yield
    finally:
        tasks.cancel()
        if runner is not None:
            await runner.close()
        server.close()


class _App(FastAPI):
    """Answers with prepared pages, and adds the bodies that routes read themselves to the OpenAPI schema."""

    pages: Pages

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._openapi_json: dict[str, bytes] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        page = self.pages.found(scope) if scope.get("method") == "GET" else None
        await (page or super().__call__)(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            schema = super().openapi()
            components = schema.setdefault("components", {}).setdefault("schemas", {})
            for kind in _BODIES:
                body = kind.model_json_schema(ref_template=_SCHEMA_REF)
                components |= body.pop("$defs", {}) | {kind.__name__: body}
            self.openapi_schema = schema
        return self.openapi_schema

    def openapi_under(self, root_path: str) -> bytes:
        """Returns the schema of the app below a path as JSON, which is written once for each path."""
        if root_path not in self._openapi_json:
            servers = {"servers": [{"url": root_path}]} if root_path else {}
            self._openapi_json[root_path] = json.dumps(servers | self.openapi(), ensure_ascii=False).encode()
        return self._openapi_json[root_path]


_open = APIRouter()
_guarded = APIRouter(prefix="/v1", responses=_ERRORS)
# What a client's key must have a right to, for each route of these.
_RIGHTS: tuple[tuple[APIRouter, Right], ...] = (
    (answer_routes, "ask"),
    (prompt_routes, "ask"),
    (file_routes, "files"),
    (batch_routes, "batches"),
)


@_guarded.get("/models")
async def list_models(request: Request) -> ModelList:
    return ModelList(data=_entries(request))


@_guarded.get("/models/{name:path}")
async def get_model(request: Request, name: str) -> ModelEntry:
    entries = _entries(request)
    for entry in entries:
        if entry.id == name:
            return entry
    allowed = ", ".join(entry.id for entry in entries)
    raise ModelNotFoundError(f"received the model {name[:100]!r}; allowed: {allowed}; use one")


def _entries(request: Request) -> list[ModelEntry]:
    server = server_of(request)
    limits = server.settings.limits.record() | {"max_body_bytes": server.settings.max_body_bytes}
    if server.settings.files is not None:
        limits |= server.settings.files.limits()
    if server.clients is not None:
        limits |= server.clients.limits(client_of(request).name)
    return [
        ModelEntry(
            id=card.name,
            created=card.created_s,
            root=card.root or card.name,
            parent=card.parent,
            max_model_len=card.max_model_len,
            knows=card.knows,
            limits=limits,
            defaults=server.settings.defaults(),
        )
        for card in server.service.models
    ]


@_guarded.get("/epd/status")
async def status(request: Request) -> StatusReport:
    """Returns the current topology, roles and queues."""
    server = server_of(request)
    now = await server.service.status()
    return StatusReport(
        is_ready=now.is_ready,
        topology=now.topology,
        num_requests=server.num_requests,
        num_waiting=now.num_waiting,
        workers=now.workers,
        switches=now.switches,
        decisions=[DecisionReport.model_validate(decision) for decision in now.decisions],
        advice=now.advice,
        retention=now.retention,
    )


@_guarded.get("/epd/load")
async def load(request: Request) -> LoadReport:
    """Returns the requests of the last ten minutes."""
    now_s = steady_time_s()
    recent = server_of(request).service.recent_load()
    return LoadReport(
        requests=[LoadEntry(age_s=max(0.0, now_s - at_s), **asdict(work)) for at_s, work in recent]
    )


@_guarded.post(
    "/epd/roles",
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": RolesRequest.model_json_schema()}},
        }
    },
)
async def switch_roles(request: Request) -> RoleSwitch:
    """Gives a worker other roles, with the admin key; responds when it has them, or has kept its own."""
    check_admin(request, "a change of roles", "GET /v1/epd/status")
    server = server_of(request)
    wanted = await server.read_small(request, RolesRequest, _MAX_ROLES_BYTES)
    return await server.service.switch_roles(wanted.worker, frozenset(wanted.roles))


@_open.get("/health", responses={503: {"model": Health}})
async def health(request: Request) -> Response:
    """Returns 200 when every role that an answer needs has a worker, else 503."""
    is_ready = (await server_of(request).service.status()).is_ready
    body = Health(status="ok" if is_ready else "unavailable")
    return JSONResponse(body.model_dump(), HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE)


@_open.get("/ping", responses={503: {"model": Health}})
@_open.post("/ping", responses={503: {"model": Health}})
async def ping(request: Request) -> Response:
    """Returns the same as `/health`, under the name that hosts of containers ask for."""
    return await health(request)


@_open.get("/load")
async def server_load(request: Request) -> ServerLoad:
    return ServerLoad(server_load=server_of(request).num_requests)


@_open.get("/version")
async def version() -> Version:
    return Version(version=__version__)


@_open.get("/metrics", response_class=Response)
async def prometheus(request: Request) -> Response:
    """Returns Prometheus metrics."""
    return Response(await server_of(request).render_metrics(), media_type=metrics.CONTENT_TYPE)


def chat_route(app: FastAPI, keys: KeyCheck, endpoint: Callable[[Request], Awaitable[Response]]) -> ASGIApp:
    """Returns an ASGI app that does what the routed endpoint does, below the framework's costlier routing.

    app: whose handlers turn errors into responses
    keys: checks the key of each request, and counts it
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        await keys.admit(request)
        response = await endpoint(request)
        await response(scope, receive, send)

    return ExceptionMiddleware(answer, handlers=app.exception_handlers)
