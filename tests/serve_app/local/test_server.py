"""The application in one process: the same API, status and metrics, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import torch

from epd.errors import ModelError, RequestError
from epd.serve_app.app_args import AppArgs
from epd.serve_app.http.address import HttpAddress
from epd.serve_app.local.fleet import LocalFleet
from epd.serve_app.local.own_service import devices_of
from epd.serve_app.local.server import served_locally, with_files
from epd.stages.placement import Placement
from epd.stages.ranks.group import ProcessRanks
from tests.ports import free_port
from tests.serve_app.conftest import JSON, data_url, image_part
from tests.serve_app.deployments import core_of
from tests.serve_app.server import wait_until

QUESTION = {"messages": [{"role": "user", "content": "What is it?"}]}


@pytest.fixture
def address() -> HttpAddress:
    return HttpAddress(port=free_port())


def client_of(address: HttpAddress) -> httpx.Client:
    return httpx.Client(base_url=address.url, trust_env=False, timeout=200)


def begun(client: httpx.Client, body: JSON | None = None) -> tuple[Iterator[str], httpx.Response]:
    """The rest of the events of an answer that has begun, and its response, which must be closed."""
    body = {**QUESTION, "max_tokens": 400, "ignore_eos": True, **(body or {}), "stream": True}
    response = client.send(client.build_request("POST", "/v1/chat/completions", json=body), stream=True)
    lines = (line for line in response.iter_lines() if line.startswith("data: "))
    next(lines)
    return lines, response


def text_of(line: str) -> str:
    """The text of an event."""
    event = line.removeprefix("data: ")
    return "" if event == "[DONE]" else json.loads(event)["choices"][0]["delta"].get("content") or ""


def test_it_has_the_api_of_the_application_on_ray(address: HttpAddress) -> None:
    args = AppArgs(topology="2e1pd", model_name="mine")
    before = set(threading.enumerate())  # other tests of this process may have stopped a worker in the middle
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
        counted = 'epd_requests_total{status="200",stream="false"} 3.0'  # each once its answer was sent
        wait_until(lambda: counted in client.get("/metrics").text)
        assert client.get("/health").json() == {"status": "ok"}
        assert client.get("/health", headers={"x": "y" * (65 << 10)}).status_code == 431, (
            "sockets are guarded"
        )
    ours = {"e0", "e1", "pd0", "http"}
    wait_until(lambda: not ours & {each.name for each in threading.enumerate() if each not in before})


def test_files_of_clients_are_media_and_end_with_the_server(
    address: HttpAddress, media: dict[str, Path]
) -> None:
    with with_files(AppArgs(topology="1epd")) as args:
        folder = args.files_dir
        assert folder is not None
        with served_locally(args, address), client_of(address) as client:
            form = {"files": {"file": ("a.png", media["image"].read_bytes())}, "data": {"purpose": "vision"}}
            file_id = client.post("/v1/files", **form).json()["id"]
            answers = [
                client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": [part]}]})
                for part in (image_part(file_id), image_part(data_url(media["image"], "image/png")))
            ]
            assert [each.status_code for each in answers] == [200, 200], answers[0].text
            assert answers[0].json()["choices"][0]["message"] == answers[1].json()["choices"][0]["message"]
            assert list(folder.rglob("*.data"))
    assert not folder.exists()
    with with_files(AppArgs(files_dir=folder.parent)) as args:
        assert args.files_dir == folder.parent
    assert folder.parent.exists()


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
            lines, response = begun(client, {"max_tokens": 4000})
            raise KeyboardInterrupt
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


def test_each_group_of_processes_has_gpus_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    args = AppArgs(topology="1e1p1d", tensor_parallel_size=2)
    placement = Placement(torch.device("cuda", 1), torch.float32)
    monkeypatch.setattr(Placement, "resolve", lambda *_: placement)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)
    assert devices_of(args) == {"e0": "cuda:1", "p0": "cuda:2", "d0": "cuda:4"}
    assert devices_of(args.model_copy(update={"tensor_parallel_size": 1})) == {}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    with pytest.raises(RequestError, match="which needs 5 GPUs; allowed: 4, those from cuda:1 on"):
        devices_of(args)


def test_workers_of_two_processes_answer_as_one_does_when_one_is_lost_too(
    address: HttpAddress,
    checkpoints: dict[str, Path],
    media: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three processes are started, one after another: what no test with threads can show."""
    fleets: list[LocalFleet] = []
    start = LocalFleet.start

    async def start_seen(fleet: LocalFleet) -> None:
        fleets.append(fleet)
        await start(fleet)

    def ranks_of(worker: str) -> ProcessRanks:
        ranks = core_of(fleets[-1], worker)._builder._ranks
        assert ranks is not None
        return ranks

    monkeypatch.setattr(LocalFleet, "start", start_seen)
    content = [image_part(data_url(media["image"], "image/png")), {"type": "text", "text": "What is it?"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 40, "ignore_eos": True}
    alone = AppArgs(model=checkpoints["qwen2_5_vl"], topology="1epd", num_kv_tokens=4096)
    with served_locally(alone, address), client_of(address) as client:
        expected = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    args = alone.model_copy(update={"topology": "1e1p1d", "tensor_parallel_size": 2})
    with served_locally(args, address), client_of(address) as client:
        process_ids = [each for worker in ("p0", "d0") for each in ranks_of(worker).process_ids]
        lines, response = begun(client, body)
        os.kill(process_ids[-1], signal.SIGKILL)
        answer = "".join(map(text_of, lines))
        response.close()
        assert answer == expected
        workers = fleets[-1].workers
        wait_until(lambda: workers["d0"].is_alive and workers["d0"].incarnation > 1)
        process_ids += ranks_of("d0").process_ids
        again = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
        assert again == expected
    wait_until(lambda: not [each for each in process_ids if Path(f"/proc/{each}").exists()])
