"""Files over HTTP: what the official client sees, whose they are, and what never reaches the disk."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from epd.serve_app.files.settings import FileSettings
from tests.serve_app.conftest import Front

RunFront = Callable[..., Front]
LINES = b'{"custom_id": "a"}\n'
KEY = {"authorization": "Bearer one"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kept"


def uploaded(front: Front, content: bytes = LINES, **headers: str) -> httpx.Response:
    form: Any = {"files": {"file": ("in.jsonl", content)}, "data": {"purpose": "batch"}}
    return front.http.post("/v1/files", headers=headers, **form)


def left_in(folder: Path) -> list[str]:
    return sorted(path.suffix for path in (folder / "files").iterdir())


def test_the_official_client_keeps_reads_and_deletes_a_file(run_front: RunFront, folder: Path) -> None:
    client = run_front(files=FileSettings(folder)).openai
    content = bytes(range(256)) * 10_000  # more than one piece, and more than any text
    made = client.files.create(file=("in.jsonl", content), purpose="batch")
    assert (made.filename, made.bytes, made.purpose) == ("in.jsonl", len(content), "batch")
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).read() == content
    others = [client.files.create(file=("b", LINES), purpose="batch") for _ in range(3)]
    assert {each.id for each in client.files.list(limit=2)} == {made.id, *(each.id for each in others)}
    assert client.files.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(made.id)
    assert len(left_in(folder)) == 2 * len(others)


def test_a_file_is_kept_as_long_as_its_client_said(
    run_front: RunFront, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    front = run_front(files=FileSettings(folder))
    made = front.openai.files.create(
        file=("a", LINES), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert made.expires_at == made.created_at + 3600
    assert front.openai.files.retrieve(made.id) == made
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3601)
    with pytest.raises(openai.NotFoundError):
        front.openai.files.retrieve(made.id)
    stays = uploaded(front).json()
    assert stays["expires_at"] is None
    assert sorted(path.stem for path in (folder / "files").iterdir()) == [stays["id"]] * 2


def test_files_are_deleted_while_they_are_listed(run_front: RunFront, folder: Path) -> None:
    client = run_front(files=FileSettings(folder)).openai
    for _ in range(101):
        client.files.create(file=("a", LINES), purpose="batch")
    assert len(client.files.list().data) == 101
    for each in client.files.list():
        client.files.delete(each.id)
    assert left_in(folder) == []


def test_a_server_without_a_folder_says_which_flag_it_needs(run_front: RunFront) -> None:
    response = uploaded(run_front())
    assert response.status_code == 404
    assert "--files-dir" in response.json()["error"]["message"]


def test_files_belong_to_the_key_that_made_them(run_front: RunFront, folder: Path) -> None:
    front = run_front(files=FileSettings(folder), api_key="one", admin_api_key="two")
    file_id = uploaded(front, **KEY).json()["id"]
    other = {"authorization": "Bearer two"}
    for path in ("", "/content"):
        assert front.http.get(f"/v1/files/{file_id}{path}", headers=KEY).status_code == 200
        assert front.http.get(f"/v1/files/{file_id}{path}", headers=other).status_code == 404
        assert front.http.get(f"/v1/files/{file_id}{path}").status_code == 401
    assert front.http.delete(f"/v1/files/{file_id}", headers=other).status_code == 404
    assert front.http.get("/v1/files", headers=other).json()["data"] == []
    assert [each["id"] for each in front.http.get("/v1/files", headers=KEY).json()["data"]] == [file_id]
    assert not [path for path in (folder / "files").iterdir() if b"one" in path.read_bytes()], (
        "no key is kept"
    )


@pytest.mark.parametrize("name", ["..", "file-", "..%2f..%2fsecret", "file-" + "0" * 24, "%00", "file-*"])
def test_ids_name_files_alone(run_front: RunFront, folder: Path, name: str) -> None:
    front = run_front(files=FileSettings(folder))
    (folder / "secret.json").write_text("secret")
    for path in (f"/v1/files/{name}", f"/v1/files/{name}/content"):
        response = front.http.get(path)
        assert response.status_code in {404, 405} or path.endswith(".."), response.text
        assert "secret\n" not in response.text
    assert front.http.delete(f"/v1/files/{name}").status_code in {404, 405}


def test_what_is_too_large_leaves_nothing(run_front: RunFront, folder: Path) -> None:
    front = run_front(files=FileSettings(folder, max_file_bytes=3 << 20, max_folder_bytes=5 << 20))
    assert uploaded(front, b"x" * ((3 << 20) + 1)).status_code == 413
    assert left_in(folder) == []
    assert uploaded(front, b"x" * (3 << 20)).status_code == 200
    response = uploaded(front, b"x" * (3 << 20))
    assert response.status_code == 413
    assert "--max-files-bytes" in response.json()["error"]["message"]
    assert left_in(folder) == [".data", ".json"]


def test_there_are_never_more_files_than_allowed(run_front: RunFront, folder: Path) -> None:
    front = run_front(files=FileSettings(folder, max_files=2))
    assert [uploaded(front).status_code for _ in range(3)] == [200, 200, 429]


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({"files": {"file": ("a", b"")}, "data": {"purpose": "batch"}}, "empty"),
        ({"files": {"file": ("a", LINES)}, "data": {"purpose": "fine-tune"}}, "'batch'"),
        ({"files": {"file": ("a", LINES)}}, "'batch'"),
        *(
            (
                {"files": {"file": ("a", LINES)}, "data": {"purpose": "batch", **expiry}},
                "allowed: created_at and 60 to 2592000 seconds",
            )
            for expiry in (
                {"expires_after[anchor]": "created_at"},
                {"expires_after[anchor]": "created_at", "expires_after[seconds]": "59"},
                {"expires_after[anchor]": "last_used_at", "expires_after[seconds]": "3600"},
            )
        ),
        ({"files": {"other": ("a", LINES)}, "data": {"purpose": "batch"}}, "without a file"),
        (
            {"files": [("file", ("a", LINES)), ("file", ("b", LINES))], "data": {"purpose": "batch"}},
            "several",
        ),
        ({"files": [(f"{n}", LINES) for n in range(20)], "data": {"purpose": "batch"}}, "more than 16"),
        ({"files": {"file": LINES}, "data": {"purpose": "b" * 5000}}, "more than 4096"),
        ({"json": {"purpose": "batch"}}, "multipart/form-data"),
        ({"content": b"{}", "headers": {"content-type": "multipart/form-data; boundary=x"}}, "form"),
        (
            {"content": b"", "headers": {"content-type": f"multipart/form-data; boundary={'x' * 300}"}},
            "a boundary of 300 bytes",
        ),
        (
            {"content": b"--x\r\nbroken", "headers": {"content-type": "multipart/form-data; boundary=x"}},
            "form",
        ),
    ],
)
def test_forms_that_are_refused_say_why_and_leave_nothing(
    run_front: RunFront, folder: Path, form: Any, says: str
) -> None:
    front = run_front(files=FileSettings(folder))
    response = front.http.post("/v1/files", **form)
    assert response.status_code in {400, 413}, response.text
    assert says in response.json()["error"]["message"]
    assert left_in(folder) == []


def test_files_outlive_their_server(run_front: RunFront, folder: Path) -> None:
    file_id = uploaded(run_front(files=FileSettings(folder))).json()["id"]
    again = run_front(files=FileSettings(folder))
    assert again.http.get(f"/v1/files/{file_id}/content").content == LINES
