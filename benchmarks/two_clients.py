"""What one client waits while another asks for as much as it can of everything.

    python -m benchmarks.two_clients [--rounds 5]

lines     a batch of 240                      uploads   64 at once, each at 200 KB/s
formats   40 at once that take a second of CPU    names     63 pictures of 4 MB, and one more each second

Both have a key of a file of keys. Prints the median time of what the other asks: alone; while the first asks
all that of another server of this machine, which takes the same CPU; and of the same server. What sharing a
server costs is the ratio of the last two.
"""

from __future__ import annotations

import argparse
import base64
import io
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

from benchmarks.hostile_clients import served

NUM_LINES, NUM_FORMATS, NUM_NAMES, NUM_UPLOADS = 240, 40, 63, 64
_NAMED_BYTES, _UPLOAD_BYTES, _UPLOAD_BYTES_PER_S = 4 << 20, 4 << 20, 200_000
_JSON = dict[str, Any]
_numbers = itertools.count()


class Client:
    """One client with a key."""

    def __init__(self, port: int, key: str) -> None:
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{port}",
            headers={"authorization": f"Bearer {key}"},
            timeout=900,
            trust_env=False,
            limits=httpx.Limits(max_connections=None),
        )

    def send(self, method: str, path: str, **content: Any) -> _JSON:
        """Returns the JSON of an answer. Raises httpx.HTTPError for one that is no 200."""
        response = self.http.request(method, path, **content)
        response.raise_for_status()
        found: _JSON = response.json()
        return found

    def ask(self, content: Any = "How many?", **fields: Any) -> None:
        messages = [{"role": "user", "content": content}]
        self.send("POST", "/v1/chat/completions", json={"messages": messages, "max_tokens": 4, **fields})

    def upload(self, data: Any, purpose: str = "user_data") -> str:
        found = self.send("POST", "/v1/files", files={"file": ("a", data)}, data={"purpose": purpose})
        return str(found["id"])

    def batch(self, num_lines: int) -> str:
        body = {"messages": [{"role": "user", "content": "How many?"}], "max_tokens": 4}
        line = {"method": "POST", "url": "/v1/chat/completions", "body": body}
        lines = "\n".join(json.dumps({"custom_id": str(number), **line}) for number in range(num_lines))
        file = self.upload(lines.encode(), "batch")
        made = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        return str(self.send("POST", "/v1/batches", json=made)["id"])

    def batched(self) -> None:
        name = self.batch(1)
        while self.send("GET", f"/v1/batches/{name}")["status"] != "completed":
            time.sleep(0.02)

    def name(self, num_bytes: int = 0) -> None:
        """Names a picture and asks about it by its name."""
        name, image = f"name {next(_numbers)}", {"url": picture(num_bytes)}
        for known in (image, None):
            self.ask([{"type": "image_url", "image_url": known, "uuid": name}, {"type": "text", "text": "?"}])

    def format(self) -> None:
        self.ask(structured_outputs={"regex": f"[0-9]{{{next(_numbers) % 1000 + 1}}}"})

    def slow_format(self) -> None:
        number = 99_999_989 - next(_numbers)
        self.ask(structured_outputs={"json": {"type": "integer", "multipleOf": number}})


def picture(num_bytes: int) -> str:
    """Returns a small picture as a URL, its file made so large."""
    file = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(file, "PNG")
    data = file.getvalue().ljust(num_bytes * 3 // 4, b"\0")
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def slowly(stop: threading.Event) -> Iterator[bytes]:
    """Yields the form of an upload at a client's pace."""
    yield b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n'
    yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    for _ in range(_UPLOAD_BYTES * 5 // _UPLOAD_BYTES_PER_S):
        if not stop.wait(0.2):
            yield bytes(_UPLOAD_BYTES_PER_S // 5)
    yield b"\r\n--x--\r\n"


@contextmanager
def crowd(many: Client) -> Iterator[None]:
    """Asks for everything while open."""
    stop = threading.Event()

    def again(work: Callable[[], object]) -> None:
        while not stop.is_set():
            with suppress(httpx.HTTPError):  # what is refused is asked again at once
                work()

    def upload() -> None:
        form = {"content-type": "multipart/form-data; boundary=x"}
        many.http.post("/v1/files", content=slowly(stop), headers=form)

    def name() -> None:
        many.name(_NAMED_BYTES)
        stop.wait(1.0)

    def lines() -> None:
        batch = many.batch(NUM_LINES)
        while not stop.is_set() and many.send("GET", f"/v1/batches/{batch}")["status"] != "completed":
            stop.wait(1.0)

    for _ in range(NUM_NAMES):
        many.name(_NAMED_BYTES)
    with ThreadPoolExecutor(NUM_FORMATS + NUM_UPLOADS + 2) as threads:
        works = [lines, name, *[many.slow_format] * NUM_FORMATS, *[upload] * NUM_UPLOADS]
        for work in works:
            threads.submit(again, work)
        time.sleep(5.0)
        try:
            yield
        finally:
            stop.set()


def medians(one: Client, rounds: int) -> dict[str, float]:
    """Returns the seconds of each thing that the other does."""
    data = bytes(1 << 20)
    works: dict[str, Callable[[], object]] = {
        "a question": one.ask,
        "a batch of one line": one.batched,
        "a new format": one.format,
        "a named picture, and by its name": one.name,
        "an upload of 1 MB": lambda: one.upload(data),
    }
    found: dict[str, list[float]] = {name: [] for name in works}
    for _, (name, work) in itertools.product(range(rounds), works.items()):
        start_s = time.monotonic()
        work()
        found[name].append(time.monotonic() - start_s)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder, ExitStack() as servers:
        file, keys = keys_file(Path(folder))
        ports = [
            servers.enter_context(served("--api-keys-file", file, "--files-dir", f"{folder}/{number}"))[0]
            for number in range(2)
        ]
        one = Client(ports[0], keys["one"])
        medians(one, 1)
        alone = medians(one, rounds)
        with crowd(Client(ports[1], keys["many"])):
            elsewhere = medians(one, rounds)
        with crowd(Client(ports[0], keys["many"])):
            beside = medians(one, rounds)
    print("| asks | alone, s | beside the same at another server, s | at this server, s | ratio |")
    print("|---|---|---|---|---|")
    for name, seconds in alone.items():
        there, here = elsewhere[name], beside[name]
        print(f"| {name} | {seconds:.3f} | {there:.3f} | {here:.3f} | {here / there:.2f} |")


def keys_file(folder: Path) -> tuple[str, dict[str, str]]:
    """Returns a new file of keys, and the keys by the names of their clients."""
    keys = {}
    with (folder / "keys.jsonl").open("wb") as file:
        for name in ("many", "one"):
            command = [sys.executable, "-m", "epd", "keys", "new", name]
            made = subprocess.run(command, capture_output=True, check=True)
            file.write(made.stdout)
            keys[name] = made.stderr.decode().split()[-1]
    return file.name, keys


if __name__ == "__main__":
    main()
