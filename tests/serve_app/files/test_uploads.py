"""Uploads in parts: what the official client sees, what goes on after a cut, limits, and owners."""

from __future__ import annotations

import hashlib
import os
import socket
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from epd.errors import RequestError
from epd.serve_app.cli.conversations import conversation_with
from epd.serve_app.files import file_store
from epd.serve_app.files.records import read_record
from epd.serve_app.files.settings import FileSettings
from epd.serve_app.files.upload_store import _PATIENCE_S
from epd.video import FetchPolicy
from tests.serve_app.conftest import JSON, Front, image_part, video_part
from tests.serve_app.server import wait_until

RunFront = Callable[..., Front]
KEY = {"authorization": "Bearer one"}
BYTES = bytes(range(256)) * 4000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kept"


def begun(front: Front, num_bytes: int = len(BYTES), **more: object) -> httpx.Response:
    asked = {"filename": "clip.mp4", "bytes": num_bytes, "purpose": "user_data", "mime_type": "video/mp4"}
    return front.http.post("/v1/uploads", json=asked | more)


def part(front: Front, upload_id: str, content: bytes, **headers: str) -> httpx.Response:
    return front.http.post(
        f"/v1/uploads/{upload_id}/parts", files={"data": ("blob", content)}, headers=headers
    )


def ended(front: Front, upload_id: str, *part_ids: str, **more: object) -> httpx.Response:
    return front.http.post(f"/v1/uploads/{upload_id}/complete", json={"part_ids": part_ids} | more)


def left_in(folder: Path) -> list[str]:
    return sorted(path.suffix for path in (folder / "files").iterdir())


def test_the_official_client_sends_a_file_in_parts(run_front: RunFront, folder: Path) -> None:
    client = run_front(files=FileSettings(folder)).openai
    made = client.uploads.create(filename="a.mp4", bytes=len(BYTES), purpose="vision", mime_type="video/mp4")
    cuts = (BYTES[:100_000], BYTES[100_000:])
    first, second = [client.uploads.parts.create(made.id, data=cut).id for cut in cuts]
    done = client.uploads.complete(made.id, part_ids=[first, second], md5=hashlib.md5(BYTES).hexdigest())
    assert done.status == "completed"
    assert done.file is not None
    assert client.files.content(done.file.id).read() == BYTES
    assert client.files.retrieve(done.file.id).purpose == "vision"
    assert left_in(folder) == [".data", ".json", ".json", ".lock"], "no part stays"
    os.utime(next(folder.rglob(f"{made.id}.json")), (2**31, 2**31))  # it was kept a second later, or many
    assert client.uploads.complete(made.id, part_ids=[first, second]) == done, "asked again after a cut"


def test_parts_come_in_any_order_and_a_cut_one_is_sent_again(run_front: RunFront, folder: Path) -> None:
    front = run_front(files=FileSettings(folder))
    upload = begun(front).json()["id"]
    last = part(front, upload, BYTES[600_000:]).json()["id"]
    cut = b'--x\r\nContent-Disposition: form-data; name="data"; filename="b"\r\n\r\n' + BYTES[:1000]
    headers = {"content-type": "multipart/form-data; boundary=x"}
    reply = front.http.post(f"/v1/uploads/{upload}/parts", content=cut, headers=headers)
    assert reply.status_code == 400, "a part without its end is none"
    first = part(front, upload, BYTES[:600_000]).json()["id"]
    again = part(front, upload, BYTES[:600_000]).json()["id"]  # its client did not learn that it had arrived
    state = front.http.get(f"/v1/uploads/{upload}").json()
    assert {each["id"]: each["bytes"] for each in state["parts"]} == {
        first: 600_000, again: 600_000, last: len(BYTES) - 600_000
    }  # fmt: skip
    file = ended(front, upload, first, last).json()["file"]
    assert front.http.get(f"/v1/files/{file['id']}/content").content == BYTES
    assert front.http.get(f"/v1/uploads/{upload}").json()["parts"] == []


def test_an_upload_outlives_its_server(run_front: RunFront, folder: Path) -> None:
    before = run_front(files=FileSettings(folder))
    upload = begun(before).json()["id"]
    first = part(before, upload, BYTES[:5000]).json()["id"]
    after = run_front(files=FileSettings(folder))
    second = part(after, upload, BYTES[5000:]).json()["id"]
    assert ended(after, upload, first, second).json()["file"]["bytes"] == len(BYTES)


def test_too_large_a_file_is_refused_before_a_byte_of_it(run_front: RunFront, folder: Path) -> None:
    front = run_front(files=FileSettings(folder, max_file_bytes=1000, max_upload_bytes=5000))
    assert begun(front, 5001).status_code == 413
    assert begun(front, 1001, purpose="batch").status_code == 413
    assert begun(front, 5000).status_code == 200
    limits = front.http.get("/v1/models").json()["data"][0]["limits"]
    assert (limits["max_file_bytes"], limits["max_upload_bytes"]) == (1000, 5000)


def test_a_length_that_is_announced_is_refused_at_once(run_front: RunFront, folder: Path) -> None:
    """Of a body that never comes, which a server that reads it would wait for."""
    front = run_front(files=FileSettings(folder, max_file_bytes=1 << 20, max_part_bytes=1 << 20))
    upload = begun(front).json()["id"]
    for path in ("/v1/files", f"/v1/uploads/{upload}/parts"):
        assert refused_unread(front.server.url, path, 2 << 20) == 413


def refused_unread(url: str, path: str, num_bytes: int) -> int:
    """The status of the answer to the head of a request alone."""
    with sent(url, path, num_bytes) as connection:
        return int(connection.recv(64).split()[1])


@contextmanager
def sent(url: str, path: str, num_bytes: int, content: bytes = b"") -> Iterator[socket.socket]:
    """A connection with the head of a form of so many bytes, and the first of these."""
    host, port = url.removeprefix("http://").split(":")
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: {num_bytes}\r\n"
        "Content-Type: multipart/form-data; boundary=x\r\n\r\n"
    )
    with socket.create_connection((host, int(port)), timeout=200) as connection:
        connection.sendall(head.encode() + content)
        yield connection


def test_no_more_arrives_than_was_announced(run_front: RunFront, folder: Path) -> None:
    front = run_front(files=FileSettings(folder, max_part_bytes=1000))
    upload = begun(front, 1500).json()["id"]
    assert part(front, upload, b"x" * 1001).status_code == 413
    ids = [part(front, upload, b"x" * 750).json()["id"] for _ in range(3)]
    assert part(front, upload, b"x" * 251).status_code == 413, "one more than announced, and a part again"
    assert ended(front, upload, *ids).status_code == 400, "more than announced"
    assert ended(front, upload, ids[0]).status_code == 400, "fewer"
    assert ended(front, upload, ids[0], ids[0]).status_code == 400, "one twice"
    assert ended(front, upload, ids[0], "part_" + "0" * 24).status_code == 404
    assert ended(front, upload, ids[0], "../" + ids[1]).status_code == 404
    assert ended(front, upload, *ids[:2], md5="0" * 32).status_code == 400


def test_the_folder_has_room_for_what_it_may_hold(run_front: RunFront, folder: Path) -> None:
    front = run_front(files=FileSettings(folder, max_folder_bytes=100_000, max_uploads=2))
    upload = begun(front, 1 << 40 >> 10).json()["id"]  # 1 GiB: nothing is set aside for it
    assert part(front, upload, b"x" * 90_000).status_code == 200
    assert part(front, upload, b"x" * 90_000).status_code == 413
    assert begun(front).status_code == 200
    assert begun(front).status_code == 429
    front.http.post(f"/v1/uploads/{upload}/cancel")
    assert begun(front).status_code == 200


def test_a_cancelled_upload_leaves_nothing(run_front: RunFront, folder: Path) -> None:
    front = run_front(files=FileSettings(folder))
    upload = begun(front).json()["id"]
    first = part(front, upload, BYTES).json()["id"]
    assert front.http.post(f"/v1/uploads/{upload}/cancel").json()["status"] == "cancelled"
    assert left_in(folder) == [".json", ".lock"]
    for reply in (part(front, upload, BYTES), ended(front, upload, first)):
        assert reply.status_code == 400
        assert "cancelled" in reply.json()["error"]["message"]


def test_uploads_that_are_left_alone_end(
    run_front: RunFront, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    front = run_front(files=FileSettings(folder))
    alone, used = begun(front).json()["id"], begun(front).json()["id"]
    assert part(front, alone, BYTES[:10]).status_code == 200
    begun(front)
    later_s, now_s = 0.0, time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now_s() + later_s)
    later_s = _PATIENCE_S - 60
    assert part(front, used, BYTES[:10]).status_code == 200
    begun(front)
    later_s += 120
    begun(front)
    assert front.http.get(f"/v1/uploads/{alone}").status_code == 404
    assert not list(folder.rglob(f"{alone}*"))
    assert front.http.get(f"/v1/uploads/{used}").status_code == 200


@pytest.mark.parametrize("hours", [-9, 9])
def test_an_upload_goes_on_when_the_clock_is_set(
    run_front: RunFront, folder: Path, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    front = run_front(files=FileSettings(folder))
    upload = begun(front).json()["id"]
    first = part(front, upload, BYTES[:10]).json()["id"]
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3600 * hours)
    for path in folder.rglob("upload_*"):  # what the file system says is as far behind, or ahead
        os.utime(path, (now() - 3600 * hours,) * 2)
    begun(front)
    assert front.http.get(f"/v1/uploads/{upload}").json()["parts"][0]["id"] == first


def test_a_file_is_kept_as_long_as_its_client_said(
    run_front: RunFront, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    front = run_front(files=FileSettings(folder))
    upload = begun(front, 3, expires_after={"anchor": "created_at", "seconds": 60}).json()["id"]
    file = ended(front, upload, part(front, upload, b"abc").json()["id"]).json()["file"]
    assert file["expires_at"] - file["created_at"] == 60
    assert front.http.get(f"/v1/files/{file['id']}").status_code == 200
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 61)
    assert front.http.get(f"/v1/files/{file['id']}").status_code == 404
    begun(front)
    assert not (folder / "files" / f"{file['id']}.data").exists()


def test_uploads_belong_to_the_key_that_began_them(run_front: RunFront, folder: Path) -> None:
    front = run_front(files=FileSettings(folder), api_key="one", admin_api_key="two")
    other = {"authorization": "Bearer two"}
    asked = {"filename": "a", "bytes": 3, "purpose": "user_data", "mime_type": ""}
    upload = front.http.post("/v1/uploads", json=asked, headers=KEY).json()["id"]
    first = part(front, upload, b"abc", **KEY).json()["id"]
    complete = {"json": {"part_ids": [first]}, "headers": other}
    assert front.http.post(f"/v1/uploads/{upload}/complete", **complete).status_code == 404
    assert front.http.post(f"/v1/uploads/{upload}/cancel", headers=other).status_code == 404
    assert part(front, upload, b"abc", **other).status_code == 404
    assert front.http.get(f"/v1/uploads/{upload}", headers=other).status_code == 404
    assert front.http.get(f"/v1/uploads/{upload}").status_code == 401


def test_many_upload_at_once_are_cut_and_go_on(run_front: RunFront, folder: Path) -> None:
    """Each loses its connection in the middle of a part. Questions beside are answered."""
    front = run_front(files=FileSettings(folder))
    first = b'--x\r\nContent-Disposition: form-data; name="data"; filename="b"\r\n\r\n' + bytes(1_200_000)

    def send(number: int) -> bool:
        content = number.to_bytes(2, "big") * 200_000
        with httpx.Client(base_url=front.server.url, trust_env=False, verify=False, timeout=200) as http:
            mine = replace(front, http=http)
            upload = begun(mine, len(content)).json()["id"]
            with sent(front.server.url, f"/v1/uploads/{upload}/parts", 2_000_000, first):
                pass
            ids = [
                part(mine, upload, content[at : at + 150_000]).json()["id"] for at in (0, 150_000, 300_000)
            ]
            file = ended(mine, upload, *ids).json()["file"]["id"]
            return http.get(f"/v1/files/{file}/content").content == content

    with ThreadPoolExecutor(64) as threads:
        whole = threads.map(send, range(64))
        assert [front.ask().status_code for _ in range(5)] == [200] * 5
        assert all(whole)
    wait_until(lambda: ".part" not in left_in(folder))


def test_a_file_of_any_size_takes_the_same_memory(run_front: RunFront, folder: Path) -> None:
    """Parts of 32 MiB, joined: of this process, in which the server runs. 20 GB are a benchmark's."""
    front = run_front(files=FileSettings(folder))
    block, num_blocks = bytes(1 << 20), 32
    head = b'--x\r\nContent-Disposition: form-data; name="data"; filename="b"\r\n\r\n'
    tail = b"\r\n--x--\r\n"
    length = len(head) + len(tail) + len(block) * num_blocks
    headers = {"content-type": "multipart/form-data; boundary=x", "content-length": str(length)}
    upload, ids = begun(front, 2 * len(block) * num_blocks).json()["id"], []
    tracemalloc.start()
    try:
        for _ in range(2):
            body = iter((head, *repeat(block, num_blocks), tail))
            reply = front.http.post(f"/v1/uploads/{upload}/parts", content=body, headers=headers)
            ids.append(reply.json()["id"])
        assert ended(front, upload, *ids).json()["file"]["bytes"] == 2 * len(block) * num_blocks
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 16 << 20


def kept_file(front: Front, content: bytes, purpose: str = "user_data", **headers: str) -> str:
    form: JSON = {"files": {"file": ("a", content)}, "data": {"purpose": purpose}}
    reply = front.http.post("/v1/files", headers=headers, **form)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["id"])


def reading(folder: Path) -> FetchPolicy:
    return FetchPolicy(uploads_folder=FileSettings(folder).files_folder)


def test_a_file_is_a_medium_by_its_id(run_front: RunFront, folder: Path, media: dict[str, Path]) -> None:
    front = run_front(files=FileSettings(folder), fetch=reading(folder))
    video = kept_file(front, media["video"].read_bytes())
    image = kept_file(front, media["image"].read_bytes(), "vision")
    reply = front.ask_about(video_part(video), image_part(image))
    assert reply.status_code == 200, reply.text
    assert front.service.files_seen[0] == [media[name].read_bytes() for name in ("video", "image")]
    assert front.spool.budget.num_taken == 0, "it is read in place"
    input_parts = [{"type": "input_image", "image_url": image}, {"type": "input_text", "text": "?"}]
    response = front.http.post("/v1/responses", json={"input": [{"role": "user", "content": input_parts}]})
    assert response.status_code == 200, response.text
    front.http.delete(f"/v1/files/{video}")
    assert front.ask_about(video_part(video)).status_code == 404


def test_a_medium_is_named_by_file_id(run_front: RunFront, folder: Path, media: dict[str, Path]) -> None:
    """As the official client sends images of responses; and videos, as there are none in its API."""
    front = run_front(files=FileSettings(folder), fetch=reading(folder))
    image = kept_file(front, media["image"].read_bytes(), "vision")
    video = kept_file(front, media["video"].read_bytes())

    def asked(*parts: JSON) -> httpx.Response:
        content = [*parts, {"type": "input_text", "text": "?"}]
        return front.http.post("/v1/responses", json={"input": [{"role": "user", "content": content}]})

    parts = [
        {"type": "input_image", "file_id": image, "detail": "auto"},
        {"type": "input_video", "file_id": video},
    ]
    reply = asked(*parts)
    assert reply.status_code == 200, reply.text
    assert front.service.files_seen[0] == [media[name].read_bytes() for name in ("image", "video")]
    both = asked({"type": "input_image", "file_id": image, "image_url": "data:image/png;base64,AAAA"})
    assert (both.status_code, "allowed: one of them" in both.text) == (400, True)
    assert asked({"type": "input_image", "file_id": "file-" + "0" * 24}).status_code == 404
    path = folder / "files" / f"{image}.data"
    assert asked({"type": "input_image", "file_id": path.as_uri()}).status_code == 400


def test_files_too_large_for_a_question_are_uploaded_first(
    run_front: RunFront, folder: Path, media: dict[str, Path]
) -> None:
    """As `epd ask --url` does. Parts are as large as the server takes; afterwards the file has an end."""
    clip = media["video"]
    size = clip.stat().st_size
    settings = FileSettings(folder, max_part_bytes=size // 2)
    front = run_front(files=settings, fetch=reading(folder), max_body_bytes=(64 << 10) + size)
    conversation = conversation_with(front.server.url, None, None, [str(clip)], {})
    assert conversation.ask("What happens?").text
    assert front.service.files_seen == [[clip.read_bytes()]]
    (file,) = front.openai.files.list().data
    assert file.expires_at is not None
    assert file.expires_at - file.created_at == 24 * 3600
    small = run_front(max_body_bytes=(64 << 10) + size)
    with pytest.raises(RequestError, match="in one question"):
        conversation_with(small.server.url, None, None, [str(clip)], {})


def test_an_upload_reads_no_record_of_a_file_that_stays(
    run_front: RunFront, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records of earlier versions have the time at which they were written: each is read once."""
    front = run_front(files=FileSettings(folder))
    kept = [kept_file(front, b"x") for _ in range(3)]
    old = folder / "files" / f"{kept[0]}.json"
    os.utime(old, (0, 0))
    read: list[str] = []

    def reading_record(path: Path, kind: Any) -> Any:
        read.append(path.stem)
        return read_record(path, kind)

    monkeypatch.setattr(file_store, "read_record", reading_record)
    for _ in range(2):
        assert begun(front).status_code == 200
    assert read == [kept[0]]
    assert all(front.http.get(f"/v1/files/{each}").status_code == 200 for each in kept)


def test_files_of_others_are_no_media(run_front: RunFront, folder: Path, media: dict[str, Path]) -> None:
    front = run_front(files=FileSettings(folder), fetch=reading(folder), api_key="one", admin_api_key="two")
    image = kept_file(front, media["image"].read_bytes(), **KEY)
    lines = kept_file(front, b'{"custom_id": "a"}\n', "batch", **KEY)
    question: JSON = {"messages": [{"role": "user", "content": [image_part(image)]}]}

    def asked(question: JSON, key: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        return front.http.post("/v1/chat/completions", json=question, headers=headers)

    assert asked(question, "one").status_code == 200
    assert asked(question, "two").status_code == 404
    path = folder / "files" / f"{image}.data"
    by_path: JSON = {"messages": [{"role": "user", "content": [image_part(path.as_uri())]}]}
    assert asked(by_path, "one").status_code == 400
    for url in (f"file-../{image}", "file-*", f"{image}.data"):
        reply = asked({"messages": [{"role": "user", "content": [image_part(url)]}]}, "one")
        assert reply.status_code == 404, (url, reply.text)
    reply = asked({"messages": [{"role": "user", "content": [image_part(lines)]}]}, "one")
    assert reply.status_code == 400
    assert "purpose" in reply.json()["error"]["message"]


def test_a_server_without_a_folder_has_no_files_as_media(run_front: RunFront) -> None:
    reply = run_front().ask_about(image_part("file-" + "0" * 24))
    assert reply.status_code == 404
    assert "--files-dir" in reply.json()["error"]["message"]


def test_a_page_of_another_site_uploads_nothing(run_front: RunFront, folder: Path) -> None:
    """A browser sends a form to any site without asking it first."""
    front = run_front(files=FileSettings(folder))
    form: JSON = {"files": {"file": ("a", b"x")}, "data": {"purpose": "user_data"}}
    foreign = front.http.post("/v1/files", headers={"origin": "http://other.example"}, **form)
    assert foreign.status_code == 400
    assert front.http.post("/v1/files", headers={"origin": front.server.url}, **form).status_code == 200


def test_the_official_client_learns_of_a_lost_upload(run_front: RunFront, folder: Path) -> None:
    client = run_front(files=FileSettings(folder)).openai
    with pytest.raises(openai.NotFoundError, match="upload"):
        client.uploads.parts.create("upload_" + "0" * 24, data=b"x")


def test_a_part_that_arrives_while_its_upload_ends_leaves_nothing(
    run_front: RunFront, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    front = run_front(files=FileSettings(folder))
    upload = begun(front).json()["id"]
    store = front.server.front.uploads
    assert store is not None
    check_bytes = store.files.room.check_bytes

    def cancel_meanwhile() -> None:
        check_bytes()
        store.cancel("", upload)

    monkeypatch.setattr(store.files.room, "check_bytes", cancel_meanwhile)
    assert part(front, upload, b"x").status_code == 400
    assert left_in(folder) == [".json", ".lock"]
