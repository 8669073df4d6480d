"""Serves folders as the Hugging Face Hub and ModelScope do, on loopback: what their clients list and get."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "a" * 40


@dataclass(slots=True)
class FakeHub:
    """Holds models by name.

    got: names of files that were sent
    sizes, digests: of files, where other ones than the true are told
    starts, tokens: from which byte on files were asked for, and by whom, at ModelScope
    most_bytes: of an answer with a file of ModelScope
    """

    models: dict[str, Path]
    status: int = 200
    error: str = ""
    got: list[str] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)
    tokens: list[str] = field(default_factory=list)
    most_bytes: int | None = None
    url: str = ""

    def files(self, name: str) -> list[dict[str, Any]]:
        folder = self.models[name]
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return [self._file(path, str(path.relative_to(folder))) for path in files]

    def _file(self, path: Path, name: str) -> dict[str, Any]:
        size = self.sizes.get(name, path.stat().st_size)
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        told = {"rfilename": name, "path": name, "type": "file", "size": size}
        return told | {"oid": etag(path), "sha256": sha256}


def etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes(), usedforsecurity=False).hexdigest()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of a client that does not read on."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def served_hub(models: dict[str, Path]) -> Iterator[FakeHub]:
    """Serves until the block is left."""
    hub = FakeHub(models)
    server = _Server(("127.0.0.1", 0), _handler(hub))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            parts = unquote(urlsplit(self.path).path).strip("/").split("/")
            if parts[:3] == ["api", "v1", "models"]:
                self._modelscope("/".join(parts[3:5]), parts[-1], parse_qs(urlsplit(self.path).query))
            elif parts[:2] == ["api", "models"]:
                self._listed("/".join(parts[2:4]), parts[4:])
            elif parts[2:3] == ["resolve"]:
                self._file("/".join(parts[:2]), "/".join(parts[4:]))
            else:
                self._refuse(404, "")

        def _modelscope(self, name: str, route: str, asked: dict[str, list[str]]) -> None:
            hub.tokens.append(self.headers.get("Authorization", ""))
            if hub.status != 200 or name not in hub.models or asked["Revision"] != ["master"]:
                self._send(b'{"Code": 10010205001}', {}, hub.status if hub.status != 200 else 404)
            elif route == "files":
                files = [self._described(each) for each in hub.files(name)]
                self._send(json.dumps({"Code": 200, "Data": {"Files": files}}).encode(), {})
            else:
                self._part(name, asked["FilePath"][0])

        def _described(self, file: dict[str, Any]) -> dict[str, Any]:
            kind = {"Type": "blob", "Path": file["path"], "Name": Path(file["path"]).name}
            return kind | {"Size": file["size"], "Sha256": hub.digests.get(file["path"], file["sha256"])}

        def _part(self, name: str, file: str) -> None:
            """Sends a file from the byte on that is asked for, and no more than `hub.most_bytes` of it."""
            hub.got.append(file)
            content = (hub.models[name] / file).read_bytes()
            wanted = self.headers.get("Range")
            start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
            hub.starts[file] = start
            self._send(content[start:][: hub.most_bytes], {}, 206 if wanted else 200)

        def _listed(self, name: str, rest: list[str]) -> None:
            if hub.status != 200 or name not in hub.models:
                self._refuse(
                    hub.status if hub.status != 200 else 401,
                    hub.error if hub.status != 200 else "RepoNotFound",
                )
            elif rest[-1] not in ("main", COMMIT):
                self._refuse(404, "RevisionNotFound")
            elif rest[0] == "tree":
                self._send(json.dumps(hub.files(name)).encode(), {})
            else:
                found = {"id": name, "sha": COMMIT, "siblings": hub.files(name)}
                self._send(json.dumps(found).encode(), {})

        def _file(self, name: str, file: str) -> None:
            path = hub.models[name] / file
            if self.command == "GET":
                hub.got.append(file)
            headers = {"ETag": f'"{etag(path)}"', "X-Repo-Commit": COMMIT}
            self._send(path.read_bytes(), headers)

        def _refuse(self, status: int, code: str) -> None:
            self._send(b"{}", {"X-Error-Code": code}, status)

        def _send(self, body: bytes, headers: dict[str, str], status: int = 200) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    return Handler
