"""What a source is, by its content; what is wrong with it, by its error.

Modules: `video/containers/info.py`, `video/decoding/pixels.py`, `video/sources/source.py`.
"""

from __future__ import annotations

import io
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from epd import video
from epd.errors import (
    CorruptMediaError,
    MediaError,
    MediaLimitError,
    MediaNotFoundError,
    UnsupportedMediaError,
)
from epd.video.decoding.pixels import FrameConverter
from tests.video.conftest import Clip
from tests.video.recipes import RECIPES, audio_only, packets_of, picture, with_bytes


def encoded(kind: str, image: np.ndarray, **options: object) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, kind, **options)  # type: ignore[arg-type]
    return buffer.getvalue()


@pytest.fixture(scope="module")
def damaged(
    clip: Clip, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[object, type[MediaError]]]:
    """name: (source, the error it must give)."""
    folder = tmp_path_factory.mktemp("damaged")
    good = clip("h264_b.mp4").read_bytes()
    (folder / "text.mp4").write_text("not a video, whatever its name\n" * 20)
    header_only = good[: good.index(b"mdat") + 4]
    return {
        "missing": (folder / "missing.mp4", MediaNotFoundError),
        "folder": (folder, MediaNotFoundError),
        "nul": ("\0.mp4", MediaNotFoundError),
        "empty": (b"", CorruptMediaError),
        "text": (folder / "text.mp4", UnsupportedMediaError),
        "cut": (good[:2000], CorruptMediaError),
        "no frame": (header_only, CorruptMediaError),
        "audio only": (audio_only(folder / "audio.mp4"), UnsupportedMediaError),
    }


@pytest.mark.parametrize(
    "name", ["missing", "folder", "nul", "empty", "text", "cut", "no frame", "audio only"]
)
def test_each_wrong_source_has_its_error(
    damaged: dict[str, tuple[object, type[MediaError]]], name: str
) -> None:
    source, expected = damaged[name]
    for function in (
        video.probe,
        *([] if name == "audio only" else [video.media_kind]),
        lambda s: video.decode(s, [0.0]),
        lambda s: video.stream(s, [0.0]),
    ):
        with pytest.raises(expected) as caught:
            function(source)  # type: ignore[operator]
        assert len(str(caught.value)) > 30


@pytest.mark.parametrize("name", ["playlist.mp4", "playlist.m3u8", "list.ffconcat"])
def test_a_playlist_opens_nothing_else(clip: Clip, tmp_path: Path, name: str) -> None:
    (tmp_path / "segment.ts").write_bytes(clip("h264.ts").read_bytes())
    playlist = tmp_path / name
    if name.endswith("ffconcat"):
        playlist.write_text("ffconcat version 1.0\nfile segment.ts\n")
    else:
        playlist.write_text("#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:2,\nsegment.ts\n#EXT-X-ENDLIST\n")
    with pytest.raises(UnsupportedMediaError):
        video.probe(playlist)


def test_a_name_is_never_taken_for_a_protocol(
    clip: Clip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("http://127.0.0.1:9/x.mp4", "concat:a.ts|b.ts", "pipe:0", "data:video/mp4;base64,AAAA"):
        with pytest.raises(MediaNotFoundError):
            video.probe(name)
    for name in ("concat:x.mp4", "pipe:0"):
        Path(name).write_bytes(clip("h264_b.mp4").read_bytes())
        assert video.probe(name).num_frames == 60


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF"])
def test_images_by_content(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "image.mp4"
    path.write_bytes(encoded(kind, picture(3, 40, 30)))
    assert video.media_kind(path) == "image"
    loaded = video.load_image(path)
    assert loaded.shape == (30, 40, 3)
    assert loaded.dtype == np.uint8
    with Image.open(path) as image:
        assert np.array_equal(loaded, np.array(image.convert("RGB")))


def test_a_video_named_like_an_image_is_a_video(clip: Clip, tmp_path: Path) -> None:
    path = tmp_path / "video.png"
    path.write_bytes(clip("h264_b.mp4").read_bytes())
    assert video.media_kind(path) == "video"
    with pytest.raises(UnsupportedMediaError):
        video.load_image(path)


def test_images_are_turned_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    stored = picture(5, 40, 30)
    loaded = video.load_image(encoded("PNG", stored, exif=exif))
    assert np.array_equal(loaded, np.rot90(stored, -1))


def test_damaged_and_oversized_images() -> None:
    whole = encoded("PNG", np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8))
    with pytest.raises(CorruptMediaError):
        video.load_image(whole[: len(whole) // 2])
    with pytest.raises(MediaLimitError):
        video.load_image(whole, max_pixels=1000)
    bomb = bytearray(encoded("PNG", picture(0, 8, 8)))
    bomb[16:24] = (60_000).to_bytes(4, "big") * 2
    bomb[29:33] = zlib.crc32(bomb[12:29]).to_bytes(4, "big")
    with pytest.raises(MediaLimitError):
        video.load_image(bytes(bomb))


def test_probe_names_what_the_container_says(clip: Clip) -> None:
    info = video.probe(clip("h264_b.mp4"))
    assert (info.codec, info.width, info.height, info.fps, info.num_frames) == ("h264", 128, 96, 30.0, 60)
    assert info.duration_s == 2.0
    assert info.keyframe_ticks_from_index is not None
    decoded_s = [info.seconds(tick) for tick in info.keyframe_ticks_from_index]
    assert decoded_s == pytest.approx([each - 2 / 30 for each in (0.0, 0.5, 1.0, 1.5)])  # two frames ahead
    assert video.probe(clip("rotated_90.mp4")).width == 96


def test_keyframes_are_listed_without_reading_the_file_and_not_at_all_where_there_is_no_index(
    clip: Clip,
) -> None:
    assert len(video.probe(clip("h264.mkv")).keyframe_ticks_from_index or ()) == 4
    for name in ("h264.ts", "h264_fragmented.mp4"):
        assert video.probe(clip(name)).keyframe_ticks_from_index is None


def test_limits_are_checked_at_probe(clip: Clip) -> None:
    """The length too, which is measured there; decoding has only the header's claim, and decodes what it is
    asked for."""
    path = clip("audio.mp4")
    for limits in (
        video.Limits(max_pixels=100),
        video.Limits(max_duration_s=1.0),
        video.Limits(max_streams=1),
    ):
        with pytest.raises(MediaLimitError):
            video.probe(path, limits=limits)
        if limits.max_duration_s > 1.0:
            with pytest.raises(MediaLimitError):
                video.decode(path, [0.0], limits=limits)
    assert len(video.decode(path, [0.0], limits=video.Limits(max_duration_s=1.0))) == 1


def test_a_gop_that_cannot_be_decoded_gives_the_nearest_frame_and_says_so(clip: Clip) -> None:
    path = clip("h264_b.mp4")
    whole = video.decode(path, [0.25, 0.75, 1.25, 1.75])
    position, size, pts, is_key = packets_of(path)[30]
    assert is_key
    assert 1.0 <= pts / 15360 < 1.1
    bad = with_bytes(path, position, bytes(size))
    frames = video.decode(bad, [0.25, 0.75, 1.25, 1.75], limits=video.Limits(max_substituted_fraction=0.5))
    assert frames.substituted_times_s == (1.25,)
    assert np.array_equal(frames.data[[0, 1, 3]], whole.data[[0, 1, 3]])
    assert any(np.array_equal(frames.data[2], whole.data[i]) for i in (1, 3)) or frames.pts_s[2] != 1.25


def test_a_frame_that_damage_has_reached_is_not_shown_as_good(clip: Clip) -> None:
    path = clip(replace(RECIPES["h264_b.mp4"], name="h264_b_no_number.mp4", has_number=False))
    times = [i / 30 + 0.01 for i in range(60)]
    whole = video.decode(path, times)
    position, size, _, is_key = packets_of(path)[18]
    assert not is_key
    bad = with_bytes(path, position + size // 2, bytes([0xFF]) * (size // 2))
    frames = video.decode(bad, times, limits=video.Limits(max_substituted_fraction=0.5))
    wrong = {times[i] for i in range(60) if not np.array_equal(frames.data[i], whole.data[i])}
    assert wrong
    assert wrong <= set(frames.substituted_times_s)
    assert all(0.5 <= time_s < 1.0 for time_s in frames.substituted_times_s)


def test_beyond_the_error_budget_the_file_is_corrupt(clip: Clip) -> None:
    path = clip("h264_b.mp4")
    bad = path.read_bytes()
    for position, size, _, _ in packets_of(path)[15:]:
        bad = bad[:position] + bytes(size) + bad[position + size :]
    times = list(np.arange(0, 2, 0.1))
    with pytest.raises(CorruptMediaError, match="frames cannot be"):
        video.decode(bad, times)
    with pytest.raises(CorruptMediaError), video.stream(bad, times) as groups:
        list(groups)


def test_a_truncated_file_does_not_pass_its_last_frame_for_the_rest(clip: Clip) -> None:
    data = clip("h264.mkv").read_bytes()
    frames = video.decode(
        data[: len(data) // 3], [0.1, 0.3, 1.95], limits=video.Limits(max_substituted_fraction=0.5)
    )
    assert frames.substituted_times_s == (1.95,)


def test_fast_resizing_is_near_the_exact_one(clip: Clip) -> None:
    """Another filter: a few levels of 255 on average is what the eye takes for the same picture."""
    for name, size in (("h264_b.mp4", (48, 64)), ("rotated_90.mp4", (64, 48)), ("h264_b.mp4", (120, 160))):
        exact = video.decode(clip(name), [0.3, 1.0], size=size)
        fast = video.decode(clip(name), [0.3, 1.0], size=size, mode="fast")
        assert fast.data.shape == exact.data.shape
        assert np.abs(fast.data.astype(int) - exact.data).mean() < 6.0


def test_exact_resizing_is_that_of_the_models_processor(clip: Clip) -> None:
    import torch
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    full = video.decode(clip("h264_b.mp4"), [0.3, 1.0])
    processor = Qwen2VLVideoProcessor(size={"shortest_edge": 28 * 28, "longest_edge": 56 * 84})
    frames = torch.from_numpy(full.data).permute(0, 3, 1, 2)[None]
    resized = processor.resize(frames, processor.size, processor.resample, factor=28)
    height, width = resized.shape[-2:]
    assert (height, width) != (96, 128)
    ours = video.decode(clip("h264_b.mp4"), [0.3, 1.0], size=(height, width))
    assert np.array_equal(ours.data, resized[0].permute(0, 2, 3, 1).numpy())


def test_a_converter_keeps_nothing_of_the_frame_before(clip: Clip) -> None:
    import av

    with av.open(str(clip("h264_b.mp4"))) as container:
        frames = [frame for frame, _ in zip(container.decode(video=0), range(3), strict=False)]
    converter = FrameConverter((40, 56))
    first = converter.convert(frames[0]).copy()
    converter.convert(frames[2])
    assert np.array_equal(converter.convert(frames[0]), first)
