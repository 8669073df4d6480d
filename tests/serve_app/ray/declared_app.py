"""The application as `serve deploy` declares it, and streams over HTTP through all of its fronts."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from epd.serve_app.app_args import AppArgs
from epd.serve_app.network.memory import PoolFiles, orphans
from tests.serve_app.conftest import JSON, data_url, image_part, video_part
from tests.serve_app.deployments import Answered, Question
from tests.serve_app.ray import held_app
from tests.serve_app.ray.ray_session import RaySession, delete_app
from tests.what_waits import what_waits

DEPLOYMENTS = ("Front", "Media", "Stage")
DEPLOYED_S = 3000.0  # nine processes start, which import torch; pytest ends the test later
Truth = tuple[str, int]  # a text, and how many tokens it has


@dataclass(slots=True)
class Stream:
    """An answer that is being read. outcome: how it ended; empty while it has not."""

    question: Question
    text: str = ""
    num_tokens: int = 0
    report: JSON = field(default_factory=dict)
    outcome: str = ""

    @property
    def truth(self) -> Truth:
        return self.text, self.num_tokens

    async def read(self, http: httpx.AsyncClient) -> None:
        request = body(self.question) | {"stream": True, "stream_options": {"include_usage": True}}
        try:
            async with http.stream("POST", "/v1/chat/completions", json=request) as response:
                self.outcome = await self._lines(response)
        except httpx.HTTPError as error:
            self.outcome = f"cut: {type(error).__name__}"

    async def _lines(self, response: httpx.Response) -> str:
        if response.status_code != httpx.codes.OK:
            return f"refused: {response.status_code}"
        outcome = "cut: it ended"
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                outcome = "whole"  # and reads on: see `delete_app`
            elif line.startswith("data: "):
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    return f"an error: {chunk['error']['message']}"
                self._take(chunk)
        return outcome

    def _take(self, chunk: JSON) -> None:
        self.text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
        self.report = chunk.get("epd") or self.report
        if chunk.get("usage"):
            self.num_tokens = chunk["usage"]["completion_tokens"]


def body(question: Question) -> JSON:
    sampling = question.sampling
    parts = [
        video_part(path.as_uri()) if path.suffix == ".mp4" else image_part(data_url(path, "image/png"))
        for path in question.media
    ]
    return {
        "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": question.text}]}],
        "max_tokens": sampling.max_tokens,
        "ignore_eos": sampling.ignore_eos,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "seed": sampling.seed,
        "epd": {"num_frames": question.frame_sampling.num_frames},
    }


def truth(answer: Answered) -> Truth:
    return answer.text, len(answer.tokens)


def replicas_of(application: str, deployment: str) -> dict[str, int]:
    """The process ids of a deployment's running replicas, by their ids."""
    client = _get_global_client()
    assert client is not None
    applications = client.get_serve_details()["applications"]
    there = applications.get(application, {}).get("deployments", {}).get(deployment, {}).get("replicas", ())
    return {each["replica_id"]: each["pid"] for each in there if each["state"] == "RUNNING"}


@dataclass(frozen=True)
class DeclaredApp:
    """args: of the application. front_config: `user_config` of fronts, which listen themselves with it.

    pool_files: of fleets that tests saw, to be looked at when the application has ended
    """

    url: str
    args: JSON
    front_config: JSON = field(default_factory=dict)
    import_path: str = held_app.BUILDER
    pool_files: list[PoolFiles] = field(default_factory=list)

    def deploy(self, num_replicas: Mapping[str, int | JSON] | None = None, **args: Any) -> None:
        """Declares the application, as `serve deploy` does with a file. Returns at once.

        num_replicas: of deployments; or other fields of theirs
        """
        fields: dict[str, JSON] = {
            name: {"num_replicas": number} if isinstance(number, int) else number
            for name, number in (num_replicas or {}).items()
        }
        if self.front_config:
            fields["Front"] = fields.get("Front", {}) | {"user_config": self.front_config}
        application = {
            "name": "epd",
            "route_prefix": "/",
            "import_path": self.import_path,
            "args": self.args | args,
            "deployments": [{"name": name, **each} for name, each in fields.items()],
        }
        client = _get_global_client()
        assert client is not None
        client.deploy_apps(ServeDeploySchema.model_validate({"applications": [application]}))

    def delete(self) -> None:
        """Returns when nothing of it is left."""
        delete_app("epd", AppArgs(**self.args).drain_s)

    def replicas(self, deployment: str) -> dict[str, int]:
        """The process ids of a deployment's running replicas, by their ids."""
        return replicas_of("epd", deployment)

    def all_replicas(self) -> dict[str, dict[str, int]]:
        return {name: self.replicas(name) for name in DEPLOYMENTS}

    def is_running(self) -> bool:
        application = serve.status().applications.get("epd")
        assert application is None or application.status != "DEPLOY_FAILED", application
        return application is not None and application.status == "RUNNING"

    async def until_replicas(self, **numbers: int) -> float:
        """Returns the seconds until so many replicas run, and nothing else is under way."""

        def are_there() -> bool:
            return self.is_running() and all(
                len(self.replicas(name)) == number for name, number in numbers.items()
            )

        return await until(lambda: asyncio.to_thread(are_there), DEPLOYED_S, every_s=0.2)

    def http(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        return httpx.AsyncClient(
            base_url=self.url, headers=self.headers, trust_env=False, timeout=300, limits=limits
        )

    @property
    def headers(self) -> dict[str, str]:
        """What a request needs where the application has a key."""
        return {"Authorization": f"Bearer {self.args['api_key']}"} if "api_key" in self.args else {}

    @asynccontextmanager
    async def streams(
        self, questions: Sequence[Question], *, every_s: float = 0.0
    ) -> AsyncIterator[list[Stream]]:
        """Streams that have ended when the block is left. every_s: between the starts of two."""
        streams = [Stream(question) for question in questions]
        async with self.http() as http:
            reading = []
            try:
                for stream in streams:
                    reading.append(asyncio.create_task(stream.read(http)))
                    await asyncio.sleep(every_s)
                yield streams
                await asyncio.gather(*reading)
            finally:
                for task in reading:
                    task.cancel()

    async def status(self) -> JSON:
        async with self.http() as http:
            status: JSON = (await http.get("/v1/epd/status")).json()
        return status

    async def workers(self) -> dict[str, JSON]:
        return {worker["name"]: worker for worker in (await self.status())["workers"]}

    async def is_empty(self) -> bool:
        return not any(
            worker["num_waiting"] or worker["num_running"] or worker["kv_usage"]
            for worker in (await self.workers()).values()
        )


async def until(holds: Callable[[], Any], seconds: float = 200.0, every_s: float = 0.02) -> float:
    """Returns the seconds until it holds. holds: may be a coroutine function."""
    start_s = time.monotonic()
    while True:
        value = holds()
        if await value if asyncio.iscoroutine(value) else value:
            return time.monotonic() - start_s
        assert time.monotonic() - start_s < seconds, f"waited in vain\n{what_waits()}"
        await asyncio.sleep(every_s)


@contextmanager
def declared_app(
    session: RaySession,
    num_replicas: Mapping[str, int | JSON] | None = None,
    *,
    front_port: int | None = None,
    import_path: str = held_app.BUILDER,
    **args: Any,
) -> Iterator[DeclaredApp]:
    """The application, alone. It may leave no file of a pool behind.

    front_port: of fronts that listen themselves; by default they are behind the session's proxy
    """
    before = orphans()
    plain = {name: _plain(value) for name, value in args.items()}
    app = DeclaredApp(session.url, plain, import_path=import_path)
    if front_port is not None:
        app = DeclaredApp(f"http://127.0.0.1:{front_port}", plain, {"host": "127.0.0.1", "port": front_port})
    app.deploy(num_replicas)
    try:
        asyncio.run(until(app.is_running, DEPLOYED_S, every_s=0.2))
        yield app
    finally:
        app.delete()
    assert set(orphans()) <= set(before)


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
