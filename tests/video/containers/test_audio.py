"""Sound equals a plain decode of the whole file, and known tones; what is no sound gives one clear line."""

from __future__ import annotations

import wave
from pathlib import Path

import av
import numpy as np
import pytest

from epd import video
from epd.errors import CorruptMediaError, MediaLimitError, RequestError, UnsupportedMediaError
from epd.types import Float32Array
from epd.video.children.children import MediaChildren
from epd.video.sources.local_files import open_file
from tests.tiny_audio import tones, with_sound, write_audio

RATE = 16_000
ALL = video.AudioSlice(RATE, 60 * RATE)
FORMATS = {  # file: codec, rate, channels, and how far from the tone it may be
    "a.wav": ("pcm_s16le", 44_100, 2, 1e-3),
    "a.flac": ("flac", 48_000, 1, 1e-3),
    "a.mp3": ("libmp3lame", 44_100, 2, 0.02),
    "a.m4a": ("aac", 48_000, 2, 0.02),
    "a.ogg": ("libopus", 48_000, 1, 0.02),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("audio")
    return {
        name: write_audio(folder / name, tones(3.3, rate, channels), rate, codec)
        for name, (codec, rate, channels, _) in FORMATS.items()
    }


def plain_decode(path: Path) -> Float32Array:
    """All frames of the file, then all of them resampled, then their channels mixed."""
    with av.open(str(path)) as container:
        frames = list(container.decode(audio=0))
    resampler = av.AudioResampler(format="fltp", rate=RATE)
    made = [out for frame in [*frames, None] for out in resampler.resample(frame) if out is not None]
    return np.concatenate([each.to_ndarray() for each in made], axis=1).mean(axis=0)


@pytest.mark.parametrize("name", FORMATS)
def test_samples_equal_a_plain_decode_of_the_whole(files: dict[str, Path], name: str) -> None:
    """And they are the tone that was written, at half its loudness where the other channel is silent."""
    path, (_, rate, channels, tolerance) = files[name], FORMATS[name]
    whole = plain_decode(path)

    facts = video.look(path)
    assert (facts.kind, facts.fps) == (video.media_kind(path), rate) == ("audio", rate)
    assert facts.num_frames / rate == pytest.approx(3.3, abs=0.1)
    assert np.array_equal(video.load_audio(path, ALL), whole)
    part = video.AudioSlice(RATE, RATE, 1.25, 2.0)
    assert np.array_equal(video.load_audio(path, part), whole[20_000:32_000])
    tone = tones(3.3, RATE)[0] / channels
    errors = np.abs(whole[: len(tone)] - tone[: len(whole)])
    assert np.median(errors) < tolerance


def test_samples_at_the_rate_of_the_model_are_those_of_the_file(tmp_path: Path) -> None:
    written = np.random.default_rng(0).integers(-32768, 32768, 5000).astype(np.int16)
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(written.tobytes())

    assert np.array_equal(video.load_audio(tmp_path / "a.wav", ALL), written.astype(np.float32) / 32768)


@pytest.mark.parametrize("container", ["adts", "mpegts"])
def test_tracks_that_change_their_channels_or_rate(container: str, tmp_path: Path) -> None:
    """As broadcasts do, and podcasts that are put together from several files."""
    tone, joined = tones(2, RATE)[0], b""
    for index, (rate, channels) in enumerate(((48_000, 2), (48_000, 1), (RATE, 1), (44_100, 1))):
        part = tones(2, rate).repeat(channels, axis=0)
        joined += write_audio(tmp_path / f"{index}", part, rate, "aac", container).read_bytes()
    samples = video.load_audio(joined, ALL)

    parts = np.split(samples, [round(at * len(samples) / 4) for at in (1, 2, 3)])
    assert len(samples) == pytest.approx(4 * len(tone), rel=0.05)
    for part in parts:
        heard = np.abs(np.fft.rfft(part[:8000])).argmax()
        assert heard == pytest.approx(np.abs(np.fft.rfft(tone[:8000])).argmax(), abs=3)


def test_children_decode_the_same(files: dict[str, Path], tmp_path: Path) -> None:
    children = MediaChildren()
    try:
        for path in (files["a.wav"], files["a.m4a"]):
            with open_file(path, "it") as file:
                assert children.look(file, "it") == video.look(path)
                assert np.array_equal(children.load_audio(file, "it", ALL), video.load_audio(path, ALL))
                with pytest.raises(MediaLimitError, match=r"^it has more than 1 s of sound"):
                    children.load_audio(file, "it", video.AudioSlice(RATE, RATE))
    finally:
        children.close()


def test_a_video_has_sound_of_its_own(files: dict[str, Path], media: dict[str, Path], tmp_path: Path) -> None:
    both = with_sound(media["video"], files["a.m4a"], tmp_path / "both.mp4")

    assert video.look(both).kind == "video"
    assert video.look(both, as_audio=True).kind == "audio"
    assert np.array_equal(video.load_audio(both, ALL), video.load_audio(files["a.m4a"], ALL))
    with pytest.raises(UnsupportedMediaError, match=r"has no sound, only streams of kind \['video'\]"):
        video.look(media["video"], as_audio=True)


def test_lengths_are_limited(files: dict[str, Path]) -> None:
    with pytest.raises(MediaLimitError, match="more than 2 s of sound from 1 s on; allowed up to that"):
        video.load_audio(files["a.wav"], video.AudioSlice(RATE, 2 * RATE, 1.0))
    assert len(video.load_audio(files["a.wav"], video.AudioSlice(RATE, 2 * RATE, 1.0, 3.0))) == 2 * RATE
    with pytest.raises(RequestError, match=r"received a part from 9 s to the end of .*, which has 3.3 s"):
        video.load_audio(files["a.wav"], video.AudioSlice(RATE, RATE, 9.0))
    with pytest.raises(MediaLimitError, match=r"has 3.3 seconds; allowed 3; cut it"):
        video.look(files["a.wav"], limits=video.Limits(max_duration_s=3))


def riff(samples: bytes, *, rate: int = RATE, bits: int = 32, tag: int = 3) -> bytes:
    """A WAV of one channel; tag 3: float32."""
    size = bits // 8
    form = b"".join(
        number.to_bytes(width, "little")
        for number, width in ((tag, 2), (1, 2), (rate, 4), (rate * size, 4), (size, 2), (bits, 2))
    )
    data = b"data" + len(samples).to_bytes(4, "little") + samples
    body = b"WAVEfmt " + len(form).to_bytes(4, "little") + form + data
    return b"RIFF" + len(body).to_bytes(4, "little") + body


def test_damaged_sound_gives_typed_errors(files: dict[str, Path]) -> None:
    aac = bytearray(files["a.m4a"].read_bytes())
    begin = aac.index(b"mdat") + 4
    aac[begin + 3000 : begin + 5000] = bytes(2000)
    bad = np.zeros(1000, np.float32)
    bad[500] = np.nan
    cases: list[tuple[bytes, type[Exception], str]] = [
        (bytes(aac), CorruptMediaError, "damaged sound"),
        (riff(bad.tobytes()), CorruptMediaError, "not finite"),
        (riff(np.full(1000, 1e30, np.float32).tobytes()), CorruptMediaError, "full scale"),
        (riff(b""), CorruptMediaError, "without samples"),
        (riff(bytes(4000), rate=1), MediaLimitError, "has 1 samples a second; allowed 2000 to"),
        (files["a.m4a"].read_bytes()[:3000], CorruptMediaError, "cannot be opened"),
        (b"no sound, no picture, some text" * 50, UnsupportedMediaError, "has no sound that can be read"),
    ]
    for data, kind, message in cases:
        with pytest.raises(kind, match=message):
            video.load_audio(data, ALL)
