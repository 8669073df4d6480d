"""Videos that are drawn: the same frames give the same file."""

from __future__ import annotations

from pathlib import Path

from tests.media import write_video


def test_the_same_frames_give_the_same_file(tmp_path: Path) -> None:
    """160x90, twelve times: with the macroblock tree some of them came out differently."""
    files = {write_video(tmp_path / f"{number}.mp4").read_bytes() for number in range(12)}
    assert len(files) == 1
