"""The application in one process: the same API, status and metrics, and how it ends."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from epd.errors import ModelError, RequestError
from serve_app.app_args import AppArgs
from serve_app.http.address import HttpAddress
from serve_app.local.server import served_locally
from stages.ranks.group import ProcessRanks

QUESTION = {"messages": [{"role": "user", "content": "What is it?"}]}


@pytest.fixture
def address() -> HttpAddress:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return HttpAddress(port=listener.getsockname()[1])


def client_of(address: HttpAddress) -> httpx.Client:
    return httpx.Client(base_url=address.url, trust_env=False, timeout=60)


def begun(client: httpx.Client) -> tuple[Iterator[str], httpx.Response]:
    """The rest of the events of an answer that has begun, and its response, which must be closed."""
    body = {**QUESTION, "stream": True, "max_tokens": 400, "ignore_eos": True}
    response = client.send(client.build_request("POST", "/v1/chat/completions", json=body), stream=True)
    lines = (line for line in response.iter_lines() if line.startswith("data: "))
    next(lines)
    return lines, response


def test_it_has_the_api_of_the_application_on_ray(address: HttpAddress) -> None:
    args = AppArgs(topology="2e1pd", model_name="mine")
    with served_locally(args, address), client_of(address) as client:
        answer = client.post("/v1/chat/completions", json=QUESTION).json()
        assert answer["choices"][0]["finish_reason"] in {"stop", "length"}
        assert answer["model"] == "mine"
        response = client.post("/v1/responses", json={"input": QUESTION["messages"]}).json()
        assert response["output"][0]["content"][0]["text"] == answer["choices"][0]["message"]["content"]
        token_ids = client.post("/tokenize", json=QUESTION).json()["tokens"]
        completion = client.post("/v1/completions", json={"prompt": token_ids, "max_tokens": None}).json()
        assert completion["choices"][0]["text"] == answer["choices"][0]["message"]["content"]
        status = client.get("/v1/epd/status").json()
        assert status["topology"] == "2e1pd"
        assert sorted(worker["name"] for worker in status["workers"]) == ["e0", "e1", "pd0", "v0"]
        assert 'epd_requests_total{status="200",stream="false"} 3.0' in client.get("/metrics").text
        assert client.get("/health").json() == {"status": "ok"}
        assert client.get("/health", headers={"x": "y" * (65 << 10)}).status_code == 431, (
            "sockets are guarded"
        )
    assert not [thread.name for thread in threading.enumerate() if thread.name in {"e0", "e1", "pd0", "http"}]


def test_a_request_in_flight_is_answered_before_it_ends(address: HttpAddress) -> None:
    with client_of(address) as client:
        with served_locally(AppArgs(topology="1epd", drain_s=60), address):
            lines, response = begun(client)
            rest: list[str] = []
            reading = threading.Thread(target=lambda: rest.extend(lines))
            reading.start()
        reading.join()
        response.close()
        assert rest[-1] == "data: [DONE]"
        with pytest.raises(httpx.ConnectError):
            client.get("/health")


def test_what_ends_the_block_ends_requests_at_once(address: HttpAddress) -> None:
    with client_of(address) as client:
        with suppress(KeyboardInterrupt), served_locally(AppArgs(topology="1epd"), address):
            lines, response = begun(client)
            start_s = time.monotonic()
            raise KeyboardInterrupt
        assert time.monotonic() - start_s < 5
        rest: list[str] = []
        with suppress(httpx.HTTPError):
            rest.extend(lines)
        response.close()
        assert "data: [DONE]" not in rest


def test_what_cannot_be_served_is_raised(address: HttpAddress, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    with pytest.raises(ModelError), served_locally(AppArgs(model=tmp_path), address):
        pass
    taken = pytest.raises(RequestError, match="give another --port")
    with address.listen(), taken, served_locally(AppArgs(), address):
        pass
    address.listen().close()


def test_a_worker_of_two_processes_answers_and_comes_back_when_one_is_lost(
    address: HttpAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes are started, one after the other: what no test with threads can show."""
    started: list[ProcessRanks] = []
    start = ProcessRanks.__init__

    def start_seen(ranks: ProcessRanks, *args: object, **options: object) -> None:
        start(ranks, *args, **options)  # type: ignore[arg-type]
        started.append(ranks)

    monkeypatch.setattr(ProcessRanks, "__init__", start_seen)
    body = {**QUESTION, "max_tokens": 8, "ignore_eos": True}
    args = AppArgs(topology="1epd", tensor_parallel_size=2)
    with served_locally(args, address), client_of(address) as client:
        answer = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
        os.kill(started[0].process_ids[0], signal.SIGKILL)
        deadline_s = time.monotonic() + 60
        while len(started) < 2:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        assert client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"] == answer
    process_ids = [each for ranks in started for each in ranks.process_ids]
    assert not [each for each in process_ids if Path(f"/proc/{each}").exists()]
