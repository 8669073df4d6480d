"""Lists the clips: every container and rate, and what other people's files have besides."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

from benchmarks.witness.clips import Clip, Encoding
from benchmarks.witness.files import cut_off, restart_at, trim

RATES = {
    name: Fraction(rate)
    for name, rate in (
        ("5", 5), ("10", 10), ("12.5", "25/2"), ("15", 15), ("23.976", "24000/1001"), ("24", 24), ("25", 25),
        ("29.97", "30000/1001"), ("30", 30), ("50", 50), ("59.94", "60000/1001"), ("60", 60), ("120", 120),
    )
}  # fmt: skip
# Those that MPEG-1 and MPEG-2 can state.
_MPEG_RATES = ("23.976", "24", "25", "29.97", "30", "50", "59.94", "60")
# Between frames of variable rate: milliseconds, which all containers can state. The mean ends the turn.
VARIABLE = tuple(Fraction(gap, 1000) for gap in (33, 67, 20, 100, 25, 400, 33, 40, 120, 27, 96, 80, 87))

_X264 = {"preset": "ultrafast"}
_LIVE = {"deadline": "realtime", "cpu-used": "8"}
_X265 = "log-level=none:pools=none:frame-threads=1:bframes=3"
H264 = Encoding("libx264", "no B-frames", {**_X264, "bf": "0", "g": "48"})
H264_B = Encoding("libx264", "B-frames", {**_X264, "bf": "3", "g": "60", "x264-params": "b-pyramid=normal"})
H264_OPEN = Encoding(
    "libx264", "open GOP", {**_X264, "x264-params": "open-gop=1:keyint=40:min-keyint=40:scenecut=0:bframes=3"}
)
H264_LONG = Encoding("libx264", "one GOP", {**_X264, "bf": "2", "g": "100000", "sc_threshold": "0"})
H264_INTRA = Encoding("libx264", "keyframes alone", {**_X264, "g": "1"})
HEVC = Encoding(
    "libx265", "closed GOP", {"preset": "ultrafast", "x265-params": f"{_X265}:keyint=50:open-gop=0"}
)
HEVC_OPEN = Encoding("libx265", "open GOP", {"preset": "ultrafast", "x265-params": f"{_X265}:keyint=40"})
VP8 = Encoding("libvpx", "", {**_LIVE, "g": "60"})
VP8_ALT = Encoding("libvpx", "alt-ref", {**_LIVE, "g": "60", "auto-alt-ref": "1", "lag-in-frames": "12"})
VP9 = Encoding("libvpx-vp9", "", {**_LIVE, "g": "60"})
VP9_ALT = Encoding("libvpx-vp9", "alt-ref", {**_LIVE, "g": "90", "auto-alt-ref": "1", "lag-in-frames": "16"})
AV1 = Encoding("libsvtav1", "", {"preset": "12", "g": "60", "svtav1-params": "lp=1"})
MPEG4 = Encoding("mpeg4", "no B-frames", {"g": "30", "bf": "0"})
MPEG4_B = Encoding("mpeg4", "B-frames", {"g": "30", "bf": "2"})
MPEG2 = Encoding("mpeg2video", "B-frames", {"g": "15", "bf": "2"})
MPEG1 = Encoding("mpeg1video", "B-frames", {"g": "15", "bf": "2"})
MJPEG = Encoding("mjpeg", "", pixel_format="yuvj420p")
PRORES = Encoding("prores", "", pixel_format="yuv422p10le")
FLV1 = Encoding("flv", "", {"g": "30"})
WMV2 = Encoding("wmv2", "", {"g": "30"})
FFV1 = Encoding("ffv1", "")

# Container: FFmpeg's name of its muxer, what is encoded in it.
_CONTAINERS: dict[str, tuple[str, tuple[Encoding, ...]]] = {
    "mp4": ("mp4", (H264_B, HEVC, H264_OPEN, VP9, H264_LONG, AV1, HEVC_OPEN, MPEG4_B, H264)),
    "mov": ("mov", (H264_B, MJPEG, H264_LONG, PRORES, HEVC, H264_INTRA)),
    "m4v": ("mp4", (H264, MPEG4_B, H264_OPEN)),
    "3gp": ("3gp", (MPEG4, H264_B)),
    "mkv": ("matroska", (H264_B, VP9, HEVC_OPEN, AV1, H264_OPEN, FFV1, H264_LONG, MPEG4_B)),
    "webm": ("webm", (VP9, VP8, AV1, VP9_ALT, VP8_ALT)),
    "avi": ("avi", (MPEG4_B, H264_B, MJPEG, MPEG4, H264_LONG)),
    "ts": ("mpegts", (H264_B, HEVC_OPEN, H264_OPEN, H264_LONG, HEVC)),
    "flv": ("flv", (H264_B, FLV1, H264_LONG)),
    "asf": ("asf", (H264_B, WMV2, H264, MPEG4_B)),
    "nut": ("nut", (H264_B, VP8)),
    "ogv": ("ogg", (VP8, VP8_ALT)),
    "ivf": ("ivf", (VP9, VP8, AV1)),
    "h264": ("h264", (H264_B, H264, H264_OPEN)),
    "hevc": ("hevc", (HEVC, HEVC_OPEN)),
}
_MPEG_CONTAINERS = {
    "ts": ("mpegts", (MPEG2,)),
    "mpg": ("mpeg", (MPEG2, MPEG1)),
    "vob": ("vob", (MPEG2,)),
    "mkv": ("matroska", (MPEG2,)),
    "mxf": ("mxf", (MPEG2,)),
}
_FIXED_RATE = ("avi", "h264", "hevc", "mpg", "vob", "mxf", "ivf", "ogv", "3gp")
_MXF_RATES = ("23.976", "24", "25", "29.97", "30", "50", "59.94", "60")


FEW = ("mp4 23.976", "mov 29.97", "mkv 25", "webm 15", "avi 12.5", "ts 50", "flv 30", "mpg 24")


def few(rng: random.Random) -> list[Clip]:
    """Returns a short clip of eight containers, each with a rate of its own."""
    chosen = [clip for clip in plain(rng) if f"{clip.container} {clip.rate}" in FEW]
    return [replace(clip, num_frames=min(clip.num_frames, 240)) for clip in chosen]


def clips(rng: random.Random) -> Iterator[Clip]:
    """Yields all clips; their lengths are drawn."""
    yield from plain(rng)
    yield from special(rng)
    yield from long()


def plain(rng: random.Random) -> Iterator[Clip]:
    """Yields a clip of every container and rate; the codecs of a container take turns."""
    for container, (muxer, encodings) in _CONTAINERS.items():
        names = [*RATES, *(() if container in _FIXED_RATE else ("variable",))]
        for place, name in enumerate(names):
            gaps = VARIABLE if name == "variable" else (1 / RATES[name],)
            yield _clip(rng, container, muxer, encodings[place % len(encodings)], gaps)
    for container, (muxer, encodings) in _MPEG_CONTAINERS.items():
        for place, name in enumerate(_MPEG_RATES):
            yield _clip(rng, container, muxer, encodings[place % len(encodings)], (1 / RATES[name],))


def _clip(
    rng: random.Random, container: str, muxer: str, encoding: Encoding, gaps_s: tuple[Fraction, ...]
) -> Clip:
    """Draws the length of a clip: 2 to 60 s, of at most 1,500 frames."""
    mean_s = sum(gaps_s) / len(gaps_s)
    num_frames = round(min(rng.uniform(2, 60) / mean_s, 1500))
    num_frames -= num_frames % len(gaps_s)
    return Clip(container, muxer, encoding, gaps_s, max(num_frames, len(gaps_s)))


def special(rng: random.Random) -> Iterator[Clip]:
    """Yields what files of other people have: edits, clocks, sound, turned pictures, no length."""
    yield from _fragmented(rng)
    yield from _turned(rng)
    yield from _late(rng)
    yield from _with_sound(rng)
    yield from _trimmed()
    yield from _without_length(rng)
    yield from _jumping(rng)


def _fragmented(rng: random.Random) -> Iterator[Clip]:
    flags = {"movflags": "frag_keyframe+empty_moov+default_base_moof"}
    for encoding, rate in ((H264_B, "25"), (H264_B, "29.97"), (HEVC, "60"), (AV1, "24")):
        clip = _clip(rng, "mp4", "mp4", encoding, (1 / RATES[rate],))
        yield replace(clip, kind="fragments", container_options=flags)
    yield replace(_clip(rng, "mp4", "mp4", H264_B, VARIABLE), kind="fragments", container_options=flags)


def _turned(rng: random.Random) -> Iterator[Clip]:
    for container, muxer, turns in (
        ("mp4", "mp4", (90, 180, 270)),
        ("mov", "mov", (90, 270)),
        ("mkv", "matroska", (90,)),
    ):
        for turn in turns:
            clip = _clip(rng, container, muxer, H264_B, (1 / RATES["29.97"],))
            yield replace(clip, rotation_deg=turn, kind=f"turned by {turn} degrees")
    yield replace(
        _clip(rng, "mov", "mov", H264_LONG, VARIABLE), rotation_deg=270, kind="turned by 270 degrees"
    )


def _late(rng: random.Random) -> Iterator[Clip]:
    for container, encoding, rate, start_s in (
        ("mp4", H264_B, "30", 5), ("mov", H264_OPEN, "24", 2), ("mkv", H264_B, "25", 7),
        ("webm", VP9, "30", 3),
        ("ts", H264_B, "29.97", 3600), ("ts", MPEG2, "25", 95_435), ("mpg", MPEG2, "25", 900),
        ("flv", H264_B, "15", 12), ("mkv", H264_OPEN, "23.976", 4000), ("nut", H264_B, "50", 9),
    ):  # fmt: skip
        muxer = {**_CONTAINERS, **_MPEG_CONTAINERS}[container][0]
        gap = 1 / RATES[rate]
        start = round(start_s / gap) * gap
        yield replace(_clip(rng, container, muxer, encoding, (gap,)), start_s=start, kind="starts late")


def _with_sound(rng: random.Random) -> Iterator[Clip]:
    """Draws sound that begins and ends with the frames, that is longer, that begins before them or later."""
    for container, encoding, rate in (
        ("mp4", H264_B, "30"), ("mov", H264_B, "29.97"), ("mkv", H264_B, "25"), ("webm", VP9, "30"),
        ("avi", MPEG4_B, "25"), ("ts", H264_B, "25"), ("flv", H264_B, "30"), ("mpg", MPEG2, "25"),
    ):  # fmt: skip
        muxer, gap = {**_CONTAINERS, **_MPEG_CONTAINERS}[container][0], 1 / RATES[rate]
        clip = _clip(rng, container, muxer, encoding, (gap,))
        length_s = float(clip.duration_s)
        yield replace(clip, sound=(0.0, length_s), kind="with sound")
        yield replace(clip, sound=(0.0, 1.6 * length_s), kind="sound longer")
        yield replace(clip, sound=(0.0, 0.4 * length_s), kind="sound shorter")
        if container != "avi":  # whose tracks all begin at once
            yield replace(clip, sound=(1.0, length_s), kind="sound begins later")
            late = round(Fraction(3, 2) / gap) * gap
            yield replace(clip, start_s=late, sound=(0.0, length_s + 1.5), kind="sound begins earlier")


def _trimmed() -> Iterator[Clip]:
    """Hides stored frames by edit lists: the end, the start, both, a part between; in the middle of GOPs."""
    for container, encoding, rate in (
        ("mp4", H264_B, "30"), ("mov", H264_LONG, "29.97"), ("mp4", H264_OPEN, "25"), ("m4v", HEVC, "24"),
        ("mp4", H264_B, "60"), ("mov", MJPEG, "15"),
    ):  # fmt: skip
        muxer = _CONTAINERS[container][0]
        clip = Clip(container, muxer, encoding, (1 / RATES[rate],), 600, finish=trim)
        yield replace(clip, shown=((0, 160),), kind="end cut away")
        yield replace(clip, shown=((245, 600),), kind="start cut away")
        yield replace(clip, shown=((130, 331),), kind="both ends cut away")
        yield replace(clip, shown=((50, 150), (400, 520)), kind="middle cut away")


def _without_length(rng: random.Random) -> Iterator[Clip]:
    for container, muxer, encoding, rate in (
        ("mkv", "matroska", H264_B, "30"), ("mkv", "matroska", VP9, "25"), ("webm", "webm", VP8, "30"),
        ("webm", "webm", VP9, "15"), ("flv", "flv", H264_B, "30"),
    ):  # fmt: skip
        yield replace(
            _clip(rng, container, muxer, encoding, (1 / RATES[rate],)), is_piped=True, kind="recorded live"
        )
    yield replace(_clip(rng, "webm", "webm", VP8, VARIABLE), is_piped=True, kind="recorded live")
    for container, muxer, encoding, rate in (
        ("mkv", "matroska", H264, "30"), ("webm", "webm", VP8, "24"), ("ts", "mpegts", H264, "25"),
        ("flv", "flv", H264, "30"), ("mkv", "matroska", H264, "60"),
    ):  # fmt: skip
        gap = (1 / RATES[rate],)
        yield Clip(
            container, muxer, encoding, gap, 700, is_piped=container != "ts", kind="cut off", finish=cut_off
        )


def _jumping(rng: random.Random) -> Iterator[Clip]:
    for encoding, rate in ((H264_B, "25"), (MPEG2, "29.97"), (HEVC, "30")):
        clip = _clip(rng, "ts", "mpegts", encoding, (1 / RATES[rate],))
        yield replace(clip, kind="clock starts again", finish=restart_at(0))
        yield replace(clip, kind="clock jumps on", finish=restart_at(1000))


def long() -> Iterator[Clip]:
    """Yields clips of minutes, of which few frames are taken."""
    for container, muxer, encoding, rate, seconds in (
        ("mp4", "mp4", H264_B, "10", 1200), ("mkv", "matroska", H264_OPEN, "5", 1200),
        ("ts", "mpegts", H264_B, "10", 900), ("avi", "avi", MPEG4_B, "12.5", 600),
        ("webm", "webm", VP8, "5", 900), ("flv", "flv", H264_B, "15", 600),
        ("mov", "mov", H264_LONG, "29.97", 300), ("mp4", "mp4", HEVC, "23.976", 240),
        ("mpg", "mpeg", MPEG2, "25", 600), ("mp4", "mp4", H264_B, "59.94", 400),
        ("mkv", "matroska", VP9, "23.976", 300), ("avi", "avi", H264_B, "25", 600),
    ):  # fmt: skip
        gap = 1 / RATES[rate]
        yield Clip(container, muxer, encoding, (gap,), round(seconds / gap), kind="long")
    gap = sum(VARIABLE) / len(VARIABLE)
    yield Clip("mp4", "mp4", H264_B, VARIABLE, round(900 / gap) // len(VARIABLE) * len(VARIABLE), kind="long")
    yield Clip(
        "mkv", "matroska", H264_B, VARIABLE, round(600 / gap) // len(VARIABLE) * len(VARIABLE), kind="long"
    )
