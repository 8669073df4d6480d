"""One client asks for as much as it can of everything, and the other's turn comes as if it were alone.

Turns are counted, not seconds: how many of the first's are begun while the second waits for its own.
"""

from __future__ import annotations

import base64
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from epd.errors import OverloadedError
from epd.serve_app.clients import owner_named
from epd.serve_app.files.batch_runner import OwnApp
from epd.serve_app.files.batch_store import BatchStore
from epd.serve_app.files.file_store import FileStore
from epd.serve_app.files.records import BatchRequest, StoredBatch
from epd.serve_app.files.settings import FileSettings
from epd.serve_app.files.upload import UploadForm
from epd.stages.grammar.formats import AnswerFormat
from tests.serve_app.conftest import QUESTION, Front, image_part
from tests.serve_app.fakes import FakeService
from tests.serve_app.files.test_batches import CHAT, FINAL, asked, line
from tests.serve_app.hostile import png
from tests.serve_app.http.test_api_keys import ask, sent
from tests.serve_app.http.test_api_keys import line as key_line
from tests.serve_app.server import NEVER_S, wait_until

NUM_LINES, NUM_FORMATS, NUM_NAMES, NUM_UPLOADS = 240, 40, 63, 64
NUM_IN_FLIGHT = 2
# A 64th of the default, as the names are: 63 of 4 MB would be 252 of 256.
NAMED_BYTES = 4 << 20
NAME_BYTES = NAMED_BYTES // 64
PICTURE = png(8, 8)
HALF_UPLOAD = (
    "POST /v1/files HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer many\r\nContent-Length: 100000\r\n"
    "Content-Type: multipart/form-data; boundary=x\r\n\r\n"
    '--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
)


@dataclass
class Crowd:
    """Everything that one client wants at once. begun: its formats. waits: lines begun as another asks."""

    front: Front
    service: FakeService
    begun: list[str] = field(default_factory=list)
    waits: dict[str, list[int]] = field(default_factory=dict)
    released: threading.Event = field(default_factory=threading.Event)

    def lines(self) -> list[str]:
        """The messages of lines that were begun, which come after all that users wait for."""
        return [str(each.messages) for each in self.service.requests if each.priority == 1]

    def check_format(self, wanted: AnswerFormat) -> str:
        """Takes for ever for each of the first client's formats."""
        self.begun.append(wanted.text)
        if wanted.text.startswith("many"):
            self.released.wait(NEVER_S)
        return wanted.text

    def format(self, key: str, number: int) -> httpx.Response:
        return ask(self.front, key, structured_outputs={"regex": f"{key}{number}"})

    def name(self, key: str, uuid: str, num_bytes: int = 0) -> httpx.Response:
        """Names a medium, or asks about one by its name."""
        content = base64.b64encode(PICTURE.ljust(num_bytes * 3 // 4, b"\0")).decode()
        url = f"data:image/png;base64,{content}"
        part = {**image_part(url), "uuid": uuid} if num_bytes else {"type": "image_url", "uuid": uuid}
        body = {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "x"}]}]}
        return self.front.http.post("/v1/chat/completions", json=body, headers=sent(key))


@pytest.fixture
def crowd(
    run_front: Callable[..., Front], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Crowd]:
    file = tmp_path / "keys.jsonl"
    file.write_text(f"{key_line('many', 'ann')}\n{key_line('one', 'ben')}\n")
    files = FileSettings(tmp_path / "files", num_in_flight=NUM_IN_FLIGHT)
    service = FakeService(word_s=0.02)
    front = run_front(service, api_keys_file=file, files=files, max_named_bytes=NAMED_BYTES)
    crowd = Crowd(front, service)
    monkeypatch.setattr(front.server.front.formats._checker, "_verdict", crowd.check_format)
    in_turn = OwnApp._in_turn

    async def noted(app: OwnApp, request: httpx.Request, owner: str) -> httpx.Response:
        crowd.waits.setdefault(owner, []).append(len(crowd.lines()))
        return await in_turn(app, request, owner)

    monkeypatch.setattr(OwnApp, "_in_turn", noted)
    with ExitStack() as stack:
        formats = stack.enter_context(ThreadPoolExecutor(NUM_FORMATS))
        stack.callback(crowd.released.set)
        for number in range(NUM_FORMATS):
            formats.submit(crowd.format, "many", number)
        assert crowd.name("one", "first", NAME_BYTES * 4).status_code == 200
        for number in range(NUM_NAMES):
            assert crowd.name("many", str(number), NAME_BYTES - 64).status_code == 200
        for _ in range(NUM_UPLOADS):
            address = (front.http.base_url.host, front.http.base_url.port or 0)
            stack.enter_context(socket.create_connection(address)).sendall(HALF_UPLOAD.encode())
        client = front.openai.with_options(api_key="many")
        batch = asked(client, [line(f"many {number}") for number in range(NUM_LINES)])
        wait_until(lambda: len(crowd.waits.get(owner_named("ann"), ())) > NUM_LINES // 8)
        yield crowd
        with suppress(openai.BadRequestError):  # it is over
            client.batches.cancel(batch.id)
        wait_until(lambda: client.batches.retrieve(batch.id).status in FINAL)


def test_the_other_has_its_line_format_name_and_upload_as_alone(crowd: Crowd) -> None:
    front, owner = crowd.front, owner_named("ben")
    client = front.openai.with_options(api_key="one")
    batch = asked(client, [line("one", messages=[{"role": "user", "content": "Ben's line"}])])
    assert crowd.format("one", 0).status_code == 200
    assert sum(text.startswith("many") for text in crowd.begun) == 1
    assert crowd.name("one", "mine", NAME_BYTES * 4).status_code == 200
    for name in ("first", "mine"):
        assert crowd.name("one", name).status_code == 200
    assert crowd.name("many", "0").json()["error"]["code"] == "unknown_uuid"
    assert crowd.name("many", str(NUM_NAMES - 1)).status_code == 200
    uploaded: dict[str, Any] = front.http.get("/v1/files", headers=sent("many")).json()
    assert len(uploaded["data"]) == 1  # that of the batch
    wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
    (place,) = (number for number, text in enumerate(crowd.lines()) if "Ben's line" in text)
    assert place - crowd.waits[owner][0] <= NUM_IN_FLIGHT
    assert place < NUM_LINES  # and not behind all of the other's


def test_a_client_that_takes_all_seats_leaves_some_for_others(
    run_front: Callable[..., Front], tmp_path: Path
) -> None:
    file = tmp_path / "keys.jsonl"
    file.write_text(f"{key_line('many', 'ann')}\n{key_line('one', 'ben')}\n")
    service = FakeService(holds_after=1)
    front = run_front(service, api_keys_file=file, max_requests=8)
    reading: list[Iterator[str]] = []  # a reader that is forgotten leaves
    with ExitStack() as stack:
        stack.callback(service.may_go_on.set)

        def begins(key: str) -> str:
            """Returns the first line of an answer that begins and does not end."""
            body = {**QUESTION, "stream": True}
            asked = front.http.stream("POST", "/v1/chat/completions", json=body, headers=sent(key))
            reading.append(stack.enter_context(asked).iter_lines())
            return next(reading[-1])

        assert all("delta" in begins("many") for _ in range(8))
        refused = ask(front, "many")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "delta" in begins("one")
        assert {each.client for each in service.requests} == {owner_named("ann"), owner_named("ben")}


def uploaded(front: Front, key: str, num_bytes: int) -> int:
    form = {"files": {"file": ("a", b"x" * num_bytes)}, "data": {"purpose": "user_data"}}
    return front.http.post("/v1/files", headers=sent(key), **form).status_code  # type: ignore[arg-type]


def test_a_client_whose_uploads_are_written_slowly_leaves_threads_for_others(
    run_front: Callable[..., Front], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk may be slow while one writes to it."""
    file = tmp_path / "keys.jsonl"
    file.write_text(f"{key_line('many', 'ann')}\n{key_line('one', 'ben')}\n")
    front = run_front(api_keys_file=file, files=FileSettings(tmp_path / "files"))
    begun: list[UploadForm] = []
    released, write = threading.Event(), UploadForm.write

    def slow(form: UploadForm, data: bytes) -> None:
        if len(data) > 10_000:
            begun.append(form)
            released.wait(NEVER_S)
        write(form, data)

    monkeypatch.setattr(UploadForm, "write", slow)
    with ThreadPoolExecutor(NUM_UPLOADS) as threads, ExitStack() as stack:
        stack.callback(released.set)
        many = [threads.submit(uploaded, front, "many", 20_000) for _ in range(NUM_UPLOADS)]
        wait_until(lambda: len(begun) == 4)
        assert uploaded(front, "one", 9) == 200
        assert len(begun) == 4
        released.set()
        assert {each.result() for each in many} == {200}


def upload_begun(front: Front, key: str) -> int:
    body = {"filename": "a", "bytes": 9, "purpose": "user_data", "mime_type": "text/plain"}
    return front.http.post("/v1/uploads", headers=sent(key), json=body).status_code


@pytest.mark.parametrize(
    ("limits", "asks", "refused", "most"),
    [
        ({"max_files": 7}, lambda front, key: uploaded(front, key, 9), 429, 4),
        ({"max_folder_bytes": 70_000}, lambda front, key: uploaded(front, key, 10_000), 413, 3),
        ({"max_uploads": 7}, upload_begun, 429, 4),
    ],
    ids=["files", "bytes", "uploads"],
)
def test_clients_keep_no_more_than_they_leave_free(
    run_front: Callable[..., Front],
    tmp_path: Path,
    limits: dict[str, int],
    asks: Callable[[Front, str], int],
    refused: int,
    most: int,
) -> None:
    """Of seven, and of seven less what records take: then as many as one has are not free any more."""
    file = tmp_path / "keys.jsonl"
    file.write_text(f"{key_line('many', 'ann')}\n{key_line('one', 'ben')}\n")
    files = FileSettings(tmp_path / "files", is_shared=True, **limits)
    front = run_front(api_keys_file=file, files=files)
    assert [asks(front, "many") for _ in range(6)] == [200] * most + [refused] * (6 - most)
    assert asks(front, "one") == 200
    assert asks(front, "many") == refused
    assert len(list((tmp_path / "files" / "files").glob("*.part"))) == 0


def test_a_client_forgets_its_own_batches_first(tmp_path: Path) -> None:
    store = BatchStore(FileStore(FileSettings(tmp_path, max_batches=5, is_shared=True)))

    def made(owner: str, **fields: object) -> str:
        part = store.files.new_part(owner)
        part.write_text("{}")
        source = store.files.adopt(part, owner, part.stem, "a.jsonl", "batch")
        asked = BatchRequest(input_file_id=source.id, endpoint=CHAT, completion_window="24h")
        batch = store.create(owner, asked).model_copy(update=fields)
        store.save(StoredBatch(owner=owner, batch=batch))
        return batch.id

    bens = made("ben", status="completed", created_at=0)
    first, second = (made("ann", status=status, created_at=1) for status in ("completed", "in_progress"))
    last = made("ann", status="in_progress")
    assert store.read(first) is None
    assert [each.id for each in store.owned_by("ben")] == [bens]
    assert {each.id for each in store.owned_by("ann")} == {second, last}
    with pytest.raises(OverloadedError, match="no more than are left"):
        made("ann")
    assert made("cleo")
