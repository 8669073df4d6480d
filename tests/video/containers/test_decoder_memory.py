"""What decoding will take is known before it begins: too much is refused, much gets fewer decoders."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np
import pytest

from epd import video
from epd.errors import MediaLimitError
from epd.video.containers.decoder_memory import decoder_bytes, references
from tests.video.recipes import GOP15, Recipe, make


def with_references(tmp_path: Path, number: int, name: str = "x.mp4", **options: str) -> Path:
    settings = {**GOP15, "x264-params": f"ref={number}:bframes=0", **options}
    return make(Recipe(name, options=settings, num_frames=40), tmp_path / f"{number}-{name}")


@pytest.mark.parametrize("name", ["x.mp4", "x.ts", "x.mkv", "x.avi"])
@pytest.mark.parametrize("number", [1, 5, 16])
def test_reference_frames_are_read_from_the_headers(tmp_path: Path, number: int, name: str) -> None:
    with av.open(str(with_references(tmp_path, number, name))) as container:
        assert references(container.streams.video[0].codec_context.extradata) == number


def test_other_profiles_and_scaling_lists(tmp_path: Path) -> None:
    for profile in ("baseline", "main", "high"):
        with av.open(str(with_references(tmp_path, 3, f"{profile}.mp4", profile=profile))) as container:
            assert references(container.streams.video[0].codec_context.extradata) == 3
    params = {"x264-params": "ref=4:bframes=0:cqm=jvt"}
    with av.open(str(with_references(tmp_path, 4, "cqm.mp4", **params))) as container:
        assert references(container.streams.video[0].codec_context.extradata) == 4


@pytest.mark.parametrize("extradata", [None, b"", b"\x01\x64", b"\0\0\1\x67\x64", b"\0\0\1\x67" + b"\0" * 40])
def test_the_most_is_assumed_where_nothing_is_said(extradata: bytes | None) -> None:
    assert references(extradata) == 16


def test_too_much_is_refused_before_a_frame_is_decoded(tmp_path: Path) -> None:
    path = with_references(tmp_path, 16)
    with av.open(str(path)) as container:
        needed = decoder_bytes(container.streams.video[0].codec_context)
    assert needed == 128 * 96 * 3 // 2 * 20 + 2 * 3 * 128 * 96
    limits = video.Limits(max_decoder_bytes=needed - 1)
    for attempt in (video.look, video.probe):
        with pytest.raises(MediaLimitError, match="fewer reference frames"):
            attempt(path, limits=limits)
    with pytest.raises(MediaLimitError, match="fewer reference frames"):
        video.decode(path, [0.1], limits=limits)


def test_memory_for_one_decoder_gets_one(tmp_path: Path) -> None:
    path = with_references(tmp_path, 16)
    with av.open(str(path)) as container:
        needed = decoder_bytes(container.streams.video[0].codec_context)
    with video.stream(path, [0.1, 1.2], limits=video.Limits(max_decoder_bytes=needed)) as groups:
        assert groups._run._num_sessions == 1
        alone = np.concatenate([group.frames.data for group in groups])
    assert np.array_equal(alone, video.decode(path, [0.1, 1.2]).data)
