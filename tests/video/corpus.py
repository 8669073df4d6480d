"""Damaged videos, each made from a good one by a rule and a number."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.video.recipes import packets_of


@dataclass(frozen=True)
class Variant:
    """One damaged file; `name` says how it was made."""

    name: str
    data: bytes


Damage = Callable[[bytes, random.Random], bytes]


def truncated(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(1, len(data))]


def headless(data: bytes, rng: random.Random) -> bytes:
    return data[rng.randrange(1, len(data) // 2) :]


def flipped(data: bytes, rng: random.Random) -> bytes:
    bad = bytearray(data)
    for _ in range(rng.choice([1, 10, 200])):
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
    return bytes(bad)


def flipped_header(data: bytes, rng: random.Random) -> bytes:
    bad = bytearray(data)
    end = rng.choice([64, 1024, 4096])
    for _ in range(rng.choice([1, 8])):
        bad[rng.randrange(min(end, len(bad)))] ^= 1 << rng.randrange(8)
        bad[-1 - rng.randrange(min(end, len(bad) - 1))] ^= 1 << rng.randrange(8)
    return bytes(bad)


def dropped_packets(data: bytes, rng: random.Random) -> bytes:
    bad = bytearray(data)
    packets = packets_of(data)
    for position, size, _, _ in rng.sample(packets, max(1, len(packets) // 4)):
        bad[position : position + size] = bytes(size)
    return bytes(bad)


def zeroed_header(data: bytes, rng: random.Random) -> bytes:
    start, length = rng.randrange(0, 256), rng.choice([8, 64, 512])
    return data[:start] + bytes(length) + data[start + length :]


def cut_out(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data))
    return data[:start] + data[start + rng.randrange(1, 4096) :]


def huge_numbers(data: bytes, rng: random.Random) -> bytes:
    """32-bit fields of the header that claim four thousand million of something."""
    bad = bytearray(data)
    for _ in range(rng.choice([1, 3])):
        start = (
            rng.randrange(0, len(bad) - 4)
            if rng.random() < 0.3
            else rng.randrange(0, min(2048, len(bad) - 4))
        )
        bad[start : start + 4] = rng.choice([b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x80\x00\x00\x00"])
    return bytes(bad)


def huge_boxes(data: bytes, rng: random.Random) -> bytes:
    """Boxes of an MP4 that claim sizes and times beyond reason; others get huge numbers."""
    names = [
        b"tkhd",
        b"mdhd",
        b"mvhd",
        b"stsz",
        b"stts",
        b"ctts",
        b"stsc",
        b"stco",
        b"avc1",
        b"hvc1",
        b"elst",
        b"trun",
    ]
    found = [name for name in names if name in data]
    if not found:
        return huge_numbers(data, rng)
    bad = bytearray(data)
    start = data.index(rng.choice(found)) + 4
    for _ in range(rng.choice([1, 4])):
        place = start + 4 * rng.randrange(0, 10)
        bad[place : place + 4] = struct.pack(">I", rng.choice([0xFFFFFFFF, 0x7FFFFFFF, 0, 0x10000000]))
    return bytes(bad)


def endless_times(data: bytes, rng: random.Random) -> bytes:
    """Time stamps that leap: in the sample table of an MP4, else in bytes next to the packets."""
    bad = bytearray(data)
    at = data.find(b"stts")
    if at > 0:
        bad[at + 12 : at + 20] = struct.pack(
            ">II", rng.choice([1, 60, 0xFFFFFFF]), rng.choice([0, 0x7FFFFFFF, 0xFFFFFFFF])
        )
        return bytes(bad)
    for position, _, _, _ in rng.sample(packets_of(data), 5):
        start = max(0, position - rng.randrange(1, 14))
        bad[start : start + 4] = b"\xff\x7f\xff\xff"
    return bytes(bad)


DAMAGES: tuple[Damage, ...] = (
    truncated,
    headless,
    flipped,
    flipped_header,
    dropped_packets,
    zeroed_header,
    cut_out,
    huge_numbers,
    huge_boxes,
    endless_times,
)


def corpus(sources: dict[str, Path], per_damage: int) -> Iterator[Variant]:
    """Every source damaged in every way, `per_damage` times each; plus files that are no videos at all."""
    yield from impostors()
    for name, path in sources.items():
        data = path.read_bytes()
        for damage in DAMAGES:
            for seed in range(per_damage):
                rng = random.Random(f"{name} {damage.__name__} {seed}")
                yield Variant(f"{damage.__name__}-{seed}-{name}", damage(data, rng))


def impostors() -> Iterator[Variant]:
    """Wrong extensions and other formats."""
    rng = random.Random(0)
    yield Variant("empty.mp4", b"")
    yield Variant("one_byte.mp4", b"\0")
    yield Variant("text.mp4", b"this is not a video\n" * 50)
    yield Variant("zeros.mkv", bytes(5000))
    yield Variant("noise.ts", rng.randbytes(20_000))
    yield Variant("sync_bytes.ts", b"G" * 188 * 100)
    yield Variant("playlist.mp4", b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n")
    yield Variant("concat.mp4", b"ffconcat version 1.0\nfile /etc/passwd\n")
    yield Variant("page.webm", b"<!doctype html><html><body>404</body></html>")
    yield Variant("archive.mov", b"PK\3\4" + rng.randbytes(500))
    yield Variant("riff.avi", b"RIFF\xff\xff\xff\xffAVI LIST\xff\xff\xff\xffhdrl" + bytes(300))
    yield Variant("ebml.mkv", b"\x1aE\xdf\xa3\x01\xff\xff\xff\xff\xff\xff\xff" + bytes(300))
    yield Variant(
        "boxes.mp4", b"\0\0\0\x18ftypmp42\0\0\0\0mp42isom\0\0\0\1moov\x7f\xff\xff\xff\xff\xff\xff\xff"
    )
