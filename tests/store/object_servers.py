"""Object stores for tests: a folder, and moto's S3 on loopback, as it is or behind a slow proxy."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

BUCKET = "kept"
_PART = 1 << 16


class S3:
    """moto's server, with one bucket."""

    def __init__(self) -> None:
        self._server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self._server.start()
        self.port = self._server.get_host_and_port()[1]
        self.client.create_bucket(Bucket=BUCKET)

    @property
    def client(self) -> Any:
        return boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{self.port}",
            region_name="us-east-1",
            aws_access_key_id="x",
            aws_secret_access_key="x",
        )

    def url(self, prefix: str, port: int | None = None) -> str:
        return f"s3://{BUCKET}/{prefix}?endpoint_override=127.0.0.1:{port or self.port}&scheme=http"

    def stop(self) -> None:
        self._server.stop()


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "x")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "x")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        server = S3()
        yield server
        server.stop()


class Objects:
    """The objects below a URL, as bytes by path."""

    def __init__(self, url: str, s3: S3 | None = None, prefix: str = "", folder: Path | None = None) -> None:
        self.url = url
        self._s3 = s3
        self._prefix = prefix
        self._folder = folder

    def paths(self, suffix: str = "") -> list[str]:
        if self._folder is not None:
            found = [str(path) for path in self._folder.rglob("*") if path.is_file()]
        else:
            listed = self._client.list_objects_v2(Bucket=BUCKET, Prefix=self._prefix)
            found = [each["Key"] for each in listed.get("Contents", [])]
        return sorted(path for path in found if path.endswith(suffix))

    @property
    def _client(self) -> Any:
        assert self._s3 is not None
        return self._s3.client

    def get(self, path: str) -> bytes:
        if self._folder is not None:
            return Path(path).read_bytes()
        found: bytes = self._client.get_object(Bucket=BUCKET, Key=path)["Body"].read()
        return found

    def put(self, path: str, data: bytes) -> None:
        if self._folder is not None:
            Path(path).write_bytes(data)
        else:
            self._client.put_object(Bucket=BUCKET, Key=path, Body=data)

    def delete(self, path: str) -> None:
        if self._folder is not None:
            Path(path).unlink()
        else:
            self._client.delete_object(Bucket=BUCKET, Key=path)


class Proxy:
    """Passes connections on, answers at so many bytes a second. may_pass: nothing does while it is clear."""

    def __init__(self, port: int, bytes_per_s: float = 1e9) -> None:
        self._to = port
        self._bytes_per_s = bytes_per_s
        self.may_pass = threading.Event()
        self.may_pass.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self._acceptor.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self._open.append(near)
                far = socket.create_connection(("127.0.0.1", self._to))
                self._open.append(far)
                threading.Thread(target=self._pass, args=(near, far, 0.0), daemon=True).start()
                threading.Thread(
                    target=self._pass, args=(far, near, 1 / self._bytes_per_s), daemon=True
                ).start()

    def _pass(self, source: socket.socket, to: socket.socket, s_per_byte: float) -> None:
        with suppress(OSError):
            while data := source.recv(_PART):
                self.may_pass.wait()
                time.sleep(len(data) * s_per_byte)
                to.sendall(data)
        with suppress(OSError):
            to.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.may_pass.set()
        self._listener.shutdown(socket.SHUT_RDWR)  # or a thread that waits for a connection takes one more
        self._acceptor.join()
        self._listener.close()
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


@contextmanager
def proxied(s3: S3, bytes_per_s: float = 1e9) -> Iterator[Proxy]:
    proxy = Proxy(s3.port, bytes_per_s)
    try:
        yield proxy
    finally:
        proxy.close()
