"""Which picture an MPEG-4 packet gives, and when it is shown, without a decoder."""

from __future__ import annotations

from collections.abc import Sequence

import av
import pytest

from epd.video.containers.avi_times import MAX_HELD, DisplayTimes, Mpeg4Pictures, is_mpeg_b
from tests.video.mpeg4 import B_VOP, I_VOP, P_VOP, PACKED, VOP

TYPES = {"I": I_VOP, "P": P_VOP, "B": B_VOP, "N": P_VOP}


def packet(pictures: str, dts: int | None) -> av.Packet:
    made = av.Packet(b"".join(VOP + bytes([TYPES[each] << 6, 1]) for each in pictures))
    made.dts = dts
    return made


def shown(chunks: Sequence[str], *, extradata: bytes = b"", skipped: int = 0) -> list[int | None]:
    """When each chunk's picture is shown. Chunks without data take a number; skipped: before the first."""
    times = DisplayTimes(Mpeg4Pictures(extradata).is_b)
    packets = [packet(each, dts + skipped) for dts, each in enumerate(chunks) if each]
    out = [each for one in packets for each in times.push(one)] + list(times.finish())
    assert out == packets
    return [each.pts for each in out]


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ("IPPP", [0, 1, 2, 3]),
        ("IPBBPBB", [0, 3, 1, 2, 6, 4, 5]),
        ("IBBPBB", [2, 0, 1, 5, 3, 4]),
        ("IPBPPB", [0, 2, 1, 3, 5, 4]),
        (["I", "", "", "P", "P"], [0, 3, 4]),
        (["I", "P", "B", "", "P"], [0, 2, 1, 4]),
        ("BIP", [-1, 1, 2]),
        ("", []),
    ],
)
def test_b_pictures_come_before_the_reference_they_follow(chunks: Sequence[str], expected: list[int]) -> None:
    assert shown(chunks) == expected
    assert shown(chunks, skipped=50) == [50 + time for time in expected]


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        (["I", "PB", "N", "PB", "N"], [0, 2, 1, 4, 3]),
        (["I", "PB", "B", "N", "PB", "B", "N"], [0, 3, 1, 2, 6, 4, 5]),
        (["IB", "N", "P"], [1, 0, 2]),
        (["I", "P", "N", "P"], [0, 1, 2, 3]),
    ],
)
def test_packed_pictures_are_shown_as_plain_ones(chunks: Sequence[str], expected: list[int]) -> None:
    assert shown(chunks, extradata=PACKED) == expected


def test_without_a_packing_encoder_nothing_is_kept() -> None:
    assert shown(["I", "PB", "P"]) == [0, 1, 2]
    assert shown(["I", "PB", "P"], extradata=PACKED[:-1]) == [0, 1, 2]


def test_what_no_encoder_makes_is_passed_on_in_bounded_memory() -> None:
    times = DisplayTimes(Mpeg4Pictures(b"").is_b)
    num_out = len(list(times.push(packet("P", 0))))
    for number in range(1, 1000):
        num_out += len(list(times.push(packet("B", None))))
        assert number + 1 - num_out <= MAX_HELD
    assert num_out + len(list(times.finish())) == 1000


@pytest.mark.parametrize("data", [b"", b"\0", VOP, VOP + b"\xff", b"\0\0\1", VOP * 3, b"DivX", b"DivX9Build"])
def test_torn_packets_are_references(data: bytes) -> None:
    pictures = Mpeg4Pictures(data)
    assert [pictures.is_b(data) for _ in range(3)] == [False] * 3
    assert not is_mpeg_b(data)
