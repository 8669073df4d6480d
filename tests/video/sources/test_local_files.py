"""Which local files are read, and that refusals tell nothing of the others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from epd import video
from epd.errors import MediaForbiddenError, MediaLimitError, MediaNotFoundError

MANY = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inside = tmp_path / "media"
    inside.mkdir()
    (inside / "a b.mp4").write_bytes(b"inside")
    (inside / "alias.mp4").symlink_to(inside / "a b.mp4")
    (inside / "out.mp4").symlink_to(tmp_path / "secret.mp4")
    (inside / "circle.mp4").symlink_to(inside / "circle.mp4")
    (tmp_path / "secret.mp4").write_bytes(b"outside")
    os.mkfifo(inside / "pipe.mp4")
    return inside


@pytest.mark.parametrize("name", ["a b.mp4", "alias.mp4", "../media/a b.mp4"])
def test_a_path_and_a_url_name_the_same_file(folder: Path, name: str) -> None:
    for source in (folder / name, f"{folder}/{name}", f"file://{folder}/{name.replace(' ', '%20')}"):
        assert video.allowed_file(source, folder, MANY) == folder / "a b.mp4"
    assert video.allowed_file(f"FILE://localhost{folder}/a%20b.mp4", folder, MANY) == folder / "a b.mp4"


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("out.mp4", MediaForbiddenError, "outside the media folder"),
        ("../secret.mp4", MediaForbiddenError, "outside the media folder"),
        ("../nothing.mp4", MediaForbiddenError, "outside the media folder"),
        ("pipe.mp4", MediaForbiddenError, "not a regular file"),
        ("", MediaForbiddenError, "not a regular file"),
        ("nothing.mp4", MediaNotFoundError, "No such file"),
        ("circle.mp4", MediaNotFoundError, "cannot read"),
        ("a%00b.mp4", MediaNotFoundError, "cannot read"),
        ("x" * 300, MediaNotFoundError, "cannot read"),
    ],
)
def test_other_files_are_refused(folder: Path, name: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        video.allowed_file(f"file://{folder}/{name}", folder, MANY)


def test_no_folder_and_other_hosts(folder: Path) -> None:
    with pytest.raises(MediaForbiddenError, match="set media_folder"):
        video.allowed_file(folder / "a b.mp4", None, MANY)
    with pytest.raises(MediaForbiddenError, match="on the host far"):
        video.allowed_file(f"file://far{folder}/a%20b.mp4", folder, MANY)
    with pytest.raises(MediaNotFoundError, match="correct it"):
        video.allowed_file("file://[x/y", folder, MANY)


def test_a_file_that_is_too_large(folder: Path) -> None:
    assert video.allowed_file(folder / "a b.mp4", folder, 6)
    with pytest.raises(MediaLimitError, match="6 bytes; allowed 5"):
        video.allowed_file(folder / "a b.mp4", folder, 5)


def test_refusals_show_neither_the_folder_nor_where_links_lead(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (folder / "dangling.mp4").symlink_to(folder / "hidden" / "target.mp4")
    for name in ("out.mp4", "dangling.mp4"):
        with pytest.raises((MediaForbiddenError, MediaNotFoundError)) as caught:
            video.allowed_file(name, folder, MANY)
        assert str(folder.parent) not in str(caught.value)
        assert "target" not in str(caught.value)
        assert "secret" not in str(caught.value)


def test_what_is_opened_is_what_was_checked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder on the way is exchanged for a link between the check and the opening."""
    inner = folder / "inner"
    inner.mkdir()
    (inner / "a.mp4").write_bytes(b"inside")
    (folder.parent / "a.mp4").write_bytes(b"outside")
    with video.open_allowed(inner / "a.mp4", folder, MANY) as file:
        assert Path(file.source).read_bytes() == b"inside"
    check = video.sources.local_files.allowed_file

    def then_exchange(source: str | Path, media_folder: Path | None, max_bytes: int) -> Path:
        path = check(source, media_folder, max_bytes)
        inner.rename(folder / "moved")
        inner.symlink_to(folder.parent)
        return path

    monkeypatch.setattr("epd.video.sources.local_files.allowed_file", then_exchange)
    with pytest.raises(MediaForbiddenError, match="outside the media folder"):
        video.open_allowed(inner / "a.mp4", folder, MANY)
