"""A batch whose server is killed: the next server goes on, and each line is in the results exactly once."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI

from epd.serve_app.app_args import AppArgs
from epd.serve_app.http.address import HttpAddress
from epd.serve_app.local.server import served_locally
from tests.ports import kept_port
from tests.serve_app.server import wait_until

# Serves, and goes on with no batch once ten of its lines have ended: none is over before it is killed.
START = """
import threading
from epd.serve_app.cli.program import main
from epd.serve_app.files.batch_runner import BatchRun

def held(run, outcome, note=BatchRun.note):
    note(run, outcome)
    counts = run._stored.batch.request_counts
    if counts.completed + counts.failed >= 10:
        threading.Event().wait()

BatchRun.note = held
main()
"""
NUM_LINES, BAD = 50, (3, 20, 44)


def line(number: int) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": f"What is {number}?"}]}
    body |= {"max_tokens": 12, "ignore_eos": True}
    if number in BAD:
        body["temperature"] = "hot"
    return {"custom_id": f"{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


@contextmanager
def running(port: int, folder: Path, output: Path, http: httpx.Client) -> Iterator[subprocess.Popen[bytes]]:
    options = ("--local", "--topology", "1epd", "--port", str(port), "--files-dir", str(folder))
    command = [sys.executable, "-P", "-c", START, "serve", *options]
    with output.open("ab") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            wait_until(lambda: is_ready(port, process, http))
            yield process
        finally:
            process.kill()


def is_ready(port: int, process: subprocess.Popen[bytes], http: httpx.Client) -> bool:
    assert process.poll() is None
    try:
        return http.get(f"http://127.0.0.1:{port}/health").status_code == 200
    except httpx.HTTPError:
        return False


def test_a_killed_server_asks_no_line_twice(tmp_path: Path) -> None:
    folder, output = tmp_path / "kept", tmp_path / "output"
    lines = "\n".join(json.dumps(line(number)) for number in range(NUM_LINES)).encode()
    with kept_port() as port, httpx.Client(trust_env=False, timeout=200) as http:
        client = OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, http_client=http
        )
        with running(port, folder, output, http) as process:
            file = client.files.create(file=("in.jsonl", lines), purpose="batch")
            batch = client.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
            )
            results = folder / "batches" / batch.id / "results.jsonl"
            wait_until(lambda: results.exists() and results.read_bytes().count(b"\n") > 5)
            process.send_signal(signal.SIGKILL)
            process.wait()
        num_before = results.read_bytes().count(b"\n")
        assert num_before < NUM_LINES - len(BAD)
        args = AppArgs(topology="1epd", files_dir=folder)
        with served_locally(args, HttpAddress(port=port)):  # any server on that folder, here without a start
            wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
            done = client.batches.retrieve(batch.id)
            counts = done.request_counts
            assert counts is not None
            assert (counts.total, counts.completed, counts.failed) == (50, 47, 3)
            names = [
                json.loads(each)["custom_id"]
                for file_id in (done.output_file_id, done.error_file_id)
                for each in client.files.content(str(file_id)).text.splitlines()
            ]
    assert Counter(names) == Counter(str(number) for number in range(NUM_LINES))
