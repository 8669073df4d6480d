"""Uploads to a server: many at once that are cut, and one of many gigabytes, beside a plain question.

    python -m benchmarks.front.uploads [--gigabytes 20] [--uploads 64] [--megabytes 32] [--no-save]

The server is `epd serve --local` in a process of its own. It keeps the files below --folder. The large file
is a short video with a sparse box behind it, so that only the server writes bytes. In its middle the
connection is lost, and the upload goes on from what the server has. Afterwards the file is asked about.
Of the uploads at once, every second part loses its connection, and is sent again. The server compares
them all by MD5.

memory_mib: resident in the server. question_s: of a plain question to its last token, asked again and again.
Results go to benchmarks/results/uploads.{json,md}.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from benchmarks.reporting import RESULTS, Row, markdown, setting

_PART_BYTES, _BLOCK_BYTES = 16 << 20, 1 << 20
_START_S, _BETWEEN_S = 300.0, 0.2
_HEAD = b'--x\r\nContent-Disposition: form-data; name="data"; filename="part"\r\n\r\n'
_TAIL = b"\r\n--x--\r\n"
_TITLES = {
    "uploads": "Uploads, and a plain question beside",
    "memory": "The server's memory while the large file arrives, cut and resumed in its middle",
}
_QUESTION = {"model": "shapes-vl-2", "max_tokens": 4, "messages": [{"role": "user", "content": "How many?"}]}


_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Server:
    """A server that is ready. pid: of its process."""

    port: int
    pid: int

    def post(self, path: str, body: Any) -> Row:
        """Posts JSON; the reply has the status 200."""
        return self._reply(path, [json.dumps(body).encode()], "application/json")

    def get(self, path: str) -> Row:
        return self._reply(path, [], "", "GET")

    def send_part(self, upload: str, content: Sequence[bytes]) -> str:
        """Sends a part; returns its id."""
        body = [_HEAD, *content, _TAIL]
        reply = self._reply(f"/v1/uploads/{upload}/parts", body, "multipart/form-data; boundary=x")
        return str(reply["id"])

    def cut_part(self, upload: str, content: bytes) -> None:
        """Sends half of a part, and closes the connection."""
        whole = len(_HEAD) + len(content) + len(_TAIL)
        head = (
            f"POST /v1/uploads/{upload}/parts HTTP/1.1\r\nHost: localhost\r\nContent-Length: {whole}\r\n"
            "Content-Type: multipart/form-data; boundary=x\r\n\r\n"
        )
        with socket.create_connection(("127.0.0.1", self.port), timeout=600) as sock:
            sock.sendall(head.encode() + _HEAD + content[: len(content) // 2])

    def memory_mib(self, name: str) -> int:
        """Returns VmRSS, resident now, or VmHWM, the most so far."""
        lines = Path(f"/proc/{self.pid}/status").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name)) >> 10

    def memory_row(self, what: str, num_bytes: int) -> Row:
        now, most = self.memory_mib("VmRSS"), self.memory_mib("VmHWM")
        return {"after": what, "GB": round(num_bytes / 1e9, 1), "memory_mib": now, "most so far": most}

    def _reply(self, path: str, pieces: Sequence[bytes], kind: str, method: str = "POST") -> Row:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=600, blocksize=_BLOCK_BYTES)
        try:
            headers = {"Content-Type": kind, "Content-Length": str(sum(map(len, pieces)))}
            connection.request(method, path, iter(pieces), headers)
            reply = connection.getresponse()
            content = reply.read()
        finally:
            connection.close()
        assert reply.status == 200, (path, reply.status, content[:300])
        found: Row = json.loads(content)
        return found


@contextmanager
def served(folder: Path) -> Iterator[Server]:
    """Yields a server that keeps files in a folder, without limits that matter here."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    command = [sys.executable, "-m", "epd", "serve", "--local", "--port", str(port), "--topology", "1epd"]
    command += [
        "--files-dir",
        str(folder),
        "--max-upload-bytes",
        str(1 << 36),
        "--max-files-bytes",
        str(1 << 37),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        server, end_s = Server(port, process.pid), time.monotonic() + _START_S
        while not _answers(server):
            assert time.monotonic() < end_s, "the server does not start"
            time.sleep(0.5)
        yield server
    finally:
        process.terminate()
        process.wait(60)


def _answers(server: Server) -> bool:
    try:
        server.post("/v1/chat/completions", _QUESTION)
    except (OSError, AssertionError):
        return False
    return True


def begun(server: Server, num_bytes: int) -> str:
    asked = {"filename": "clip.mp4", "bytes": num_bytes, "purpose": "user_data", "mime_type": "video/mp4"}
    return str(server.post("/v1/uploads", asked)["id"])


def sparse_video(path: Path, num_bytes: int) -> None:
    """Writes a video with a free box behind it, of which no block is on disk."""
    command = [sys.executable, "-m", "epd", "demo-video", str(path), "--seconds", "20", "--seed", "3"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    rest = num_bytes - path.stat().st_size
    with path.open("ab") as file:
        file.write(struct.pack(">I4sQ", 1, b"free", rest))  # its size follows its name
        file.truncate(num_bytes)


def upload_sparse(server: Server, path: Path) -> list[Row]:
    """Uploads a file part by part, cut and resumed in the middle. Returns memory by what was sent."""
    num_bytes = path.stat().st_size
    upload, parts, memory = begun(server, num_bytes), [], []
    starts = range(0, num_bytes, _PART_BYTES)
    with path.open("rb") as file:
        for number, start in enumerate(starts):
            if number == len(starts) // 2:
                server.cut_part(upload, bytes(_PART_BYTES))
                assert {part["id"] for part in server.get(f"/v1/uploads/{upload}")["parts"]} == set(parts)
            size = min(_PART_BYTES, num_bytes - start)
            blocks = [file.read(min(_BLOCK_BYTES, size - at)) for at in range(0, size, _BLOCK_BYTES)]
            parts.append(server.send_part(upload, blocks))
            if number in _shown(len(starts)):
                memory.append(server.memory_row("sent", start + size))
    begun_s = time.monotonic()
    done = server.post(f"/v1/uploads/{upload}/complete", {"part_ids": parts})
    memory.append(server.memory_row(f"joined in {time.monotonic() - begun_s:.1f} s", num_bytes))
    assert done["file"]["bytes"] == num_bytes
    for what in ("first", "second"):
        begun_s = time.monotonic()
        answer = server.post("/v1/chat/completions", about(done["file"]["id"]))["choices"][0]["message"]
        seconds = time.monotonic() - begun_s
        memory.append(server.memory_row(f"{what} answer, {answer['content']!r}: {seconds:.1f} s", num_bytes))
    return memory


def _shown(num_parts: int) -> set[int]:
    return {round(tenth * num_parts / 10) - 1 for tenth in range(1, 11)}


def about(file_id: str) -> Row:
    content = [
        {"type": "video_url", "video_url": {"url": file_id}},
        {"type": "text", "text": "Which shape appears first?"},
    ]
    return {"model": "shapes-vl-2", "max_tokens": 8, "messages": [{"role": "user", "content": content}]}


def upload_many(server: Server, number: int, num_bytes: int) -> None:
    """Uploads so many files of that size at once."""
    with ThreadPoolExecutor(number) as threads:
        list(threads.map(partial(upload_with_cuts, server, num_bytes), range(number)))


def upload_with_cuts(server: Server, num_bytes: int, number: int) -> None:
    """Uploads drawn bytes; every second part is cut once. The server compares their MD5."""
    content = hashlib.sha256(str(number).encode()).digest() * (num_bytes // 32)
    upload, parts = begun(server, len(content)), []
    size = len(content) // 4
    for index, start in enumerate(range(0, len(content), size)):
        part = content[start : start + size]
        if index % 2:
            server.cut_part(upload, part)
        parts.append(server.send_part(upload, [part]))
    md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
    done = server.post(f"/v1/uploads/{upload}/complete", {"part_ids": parts, "md5": md5})
    assert done["file"]["bytes"] == len(content)


def questions_during(server: Server, action: Callable[[], _T]) -> tuple[list[float], float, _T]:
    """Asks plain questions while a process runs the action. Returns the time of each, and the action's."""
    start_s = time.monotonic()
    took_s: list[float] = []
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        work, ended = pool.submit(action), threading.Event()
        work.add_done_callback(lambda _: ended.set())
        while not took_s or not ended.is_set():
            asked_s = time.monotonic()
            server.post("/v1/chat/completions", _QUESTION)
            took_s.append(time.monotonic() - asked_s)
            ended.wait(_BETWEEN_S)
        return took_s, time.monotonic() - start_s, work.result()


def row(server: Server, what: str, action: Callable[[], _T], num_bytes: int) -> tuple[Row, _T]:
    """Returns what questions and memory were while the action ran, and what it returned."""
    before = server.memory_mib("VmRSS")
    took_s, seconds, result = questions_during(server, action)
    return {
        "uploads": what,
        "seconds": round(seconds, 1),
        "MB/s": round(num_bytes / seconds / 1e6),
        "memory_mib before": before,
        "most so far": server.memory_mib("VmHWM"),
        "questions": len(took_s),
        "median question_s": round(statistics.median(took_s), 3),
        "slowest": round(max(took_s), 3),
    }, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--gigabytes", type=float, default=20.0)
    parser.add_argument("--uploads", type=int, default=64)
    parser.add_argument("--megabytes", type=int, default=32)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--no-save", action="store_true")
    wanted = parser.parse_args()
    results = {"setting": setting(["fastapi"]), **measured(wanted)}
    print(json.dumps(results, indent=1))
    if not wanted.no_save:
        (RESULTS / "uploads.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        sizes = f"--gigabytes {wanted.gigabytes:g} --uploads {wanted.uploads} --megabytes {wanted.megabytes}"
        page = markdown("Uploads", f"python -m benchmarks.front.uploads {sizes}", results, _TITLES)
        (RESULTS / "uploads.md").write_text(page, encoding="utf-8")


def measured(wanted: argparse.Namespace) -> dict[str, list[Row]]:
    large, small = int(wanted.gigabytes * 1e9), wanted.megabytes << 20
    many = f"{wanted.uploads} at once of {wanted.megabytes} MiB"
    with TemporaryDirectory(dir=wanted.folder) as folder, served(Path(folder) / "kept") as server:
        sparse = Path(folder) / "sparse.mp4"
        sparse_video(sparse, large)
        none, _ = row(server, "none", partial(time.sleep, 10), 0)
        upload_all = partial(upload_many, server, wanted.uploads, small)
        at_once, _ = row(server, many, upload_all, wanted.uploads * small)
        upload_one = partial(upload_sparse, server, sparse)
        one, memory = row(server, f"one of {wanted.gigabytes:g} GB", upload_one, large)
    return {"uploads": [none, at_once, one], "memory": memory}


if __name__ == "__main__":
    main()
