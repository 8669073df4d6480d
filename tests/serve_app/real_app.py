"""The whole application behind the HTTP server of fronts, its workers as threads: nothing in it is a fake."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx

from epd.serve_app.http.api import ApiSettings, create_api
from epd.serve_app.http.http_server import HttpServer
from epd.serve_app.media.media_processes import MediaProcesses
from epd.serve_app.media.media_worker import MediaSettings
from epd.video import ChildLimits, MediaChildren
from tests.serve_app.conftest import media_settings
from tests.serve_app.deployments import Deployment
from tests.serve_app.server import NEVER_S, START_S, wait_until

# Connections that wait are closed long before a server does so, which else may meet the next request.
UNUSED = httpx.Limits(keepalive_expiry=1.0)


def workers_lost(http: httpx.Client) -> int:
    """Workers that an application has lost since it started."""
    found = re.search(r"^epd_workers_lost_total (\S+)", http.get("/metrics").text, re.MULTILINE)
    return int(float(found[1])) if found else 0


@dataclass
class RealApp:
    """A running application. deployment: its orchestrator and workers, of another thread's event loop."""

    url: str
    deployment: Deployment
    http: httpx.Client

    @property
    def num_workers_lost(self) -> int:
        return workers_lost(self.http)

    def num_bytes(self) -> int:
        """Returns what of the process is in memory."""
        fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
        return int(fields[1]) * 4096

    def wait_until_empty(self) -> None:
        """Returns when nothing of any request is left anywhere, and checks every worker's state."""
        wait_until(lambda: not self.deployment.leftovers())
        for core in self.deployment.cores():
            core.check_integrity()


# Of children whose machine may be busy: none of their answers is late.
PATIENT = ChildLimits(
    max_children=3, look_s=NEVER_S, image_s=NEVER_S, audio_s=NEVER_S, group_s=NEVER_S, patience_s=NEVER_S
)


@cache
def children(limits: ChildLimits) -> MediaChildren:
    """Those of all applications of this process: they import torch. They end with the process."""
    return MediaChildren(limits, decodes_video=True)


@contextmanager
def real_app(
    path: Path,
    topology: str,
    settings: ApiSettings | None = None,
    media: MediaSettings | None = None,
    limits: ChildLimits = PATIENT,
    workers: dict[str, Any] | None = None,
    **options: Any,
) -> Iterator[RealApp]:
    """Serves the checkpoint at `path`, its media read by child processes.

    limits: of these. workers: options of WorkerSettings. options: of OrchestratorConfig.
    """
    started, stop = threading.Event(), threading.Event()
    found: list[tuple[Deployment, BaseException | None]] = []
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)

    async def serve() -> None:
        settings_here = media or replace(media_settings(), model=path)
        processes = MediaProcesses(children(limits), children(limits))
        fleet = {"processes": processes, "media": settings_here}
        deployment = Deployment(path, topology, fleet, settings=workers or {}, **options)
        try:
            await deployment.service.start()
            app = create_api(deployment.service, deployment.service.media, settings)
            async with app.router.lifespan_context(app):
                server = HttpServer(app, drain_s=2.0)
                serving = asyncio.create_task(server.serve(sockets=[listener]))
                while not server.started and not serving.done():
                    await asyncio.sleep(0.01)
                found.append((deployment, None))
                started.set()
                while not stop.is_set() and not serving.done():
                    await asyncio.sleep(0.05)
                server.should_exit = True
                await serving
        except BaseException as error:
            found.append((deployment, error))
            raise
        finally:
            started.set()
            await deployment.service.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        assert started.wait(START_S)
        deployment, error = found[0]
        assert error is None, error
        with httpx.Client(base_url=url, trust_env=False, timeout=START_S, limits=UNUSED) as http:
            yield RealApp(url, deployment, http)
    finally:
        stop.set()
        thread.join(START_S)
        listener.close()
