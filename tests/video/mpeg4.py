"""MPEG-4 ASP as encoders of AVI files made it: packed B-frames and frames that are not coded.

decode order        I0  P3  B1  B2  P6  B4  B5      P3 is shown after B1 and B2
chunks, plain       I0 |P3 |B1 |B2 |P6 |B4 |B5
chunks, packed      I0 |P3 B1 |B2 |N |P6 B4 |B5 |N      N: a P-VOP that is not coded, for the clock of AVI
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av

VOP, VOL, USER_DATA = b"\0\0\1\xb6", b"\0\0\1\x20", b"\0\0\1\xb2"
I_VOP, P_VOP, B_VOP = 0, 1, 2
PACKED = USER_DATA + b"XviD0050" + USER_DATA + b"DivX503b1393p"


@dataclass(frozen=True)
class Vop:
    """One coded picture with the headers before it. number: in display order."""

    data: bytes
    number: int

    @property
    def coding_type(self) -> int:
        return self.data[self.data.index(VOP) + 4] >> 6


Chunk = tuple[bytes, bool]  # and whether it is a keyframe
Chunks = Callable[[list[Vop], int], Iterator[Chunk]]


def rewrite(source: Path, path: Path, chunks: Chunks, rate: int) -> Path:
    """The pictures of an MPEG-4 video in an AVI file of other chunks. rate: frames per second."""
    with av.open(str(source)) as container, av.open(str(path), "w") as out:
        stream = container.streams.video[0]
        packets = [packet for packet in container.demux(stream) if packet.size]
        order = sorted(packet.pts or 0 for packet in packets)
        vops = [Vop(bytes(packet), order.index(packet.pts or 0)) for packet in packets]
        copy = out.add_stream_from_template(stream)
        copy.time_base = Fraction(1, rate)
        for index, (data, is_key) in enumerate(chunks(vops, rate)):
            packet = av.Packet(data)
            packet.stream, packet.time_base = copy, Fraction(1, rate)
            packet.pts = packet.dts = index
            packet.is_keyframe = is_key
            out.mux(packet)
    return path


def plain(vops: list[Vop], _rate: int) -> Iterator[Chunk]:
    """A chunk for each picture."""
    for vop in vops:
        yield vop.data, vop.coding_type == I_VOP


def packed(vops: list[Vop], rate: int) -> Iterator[Chunk]:
    """The first B-VOP of a run in the chunk of its reference, and at the end a picture that is not coded."""
    vops = [Vop(_marked(vop), vop.number) for vop in vops]
    index = 0
    while index < len(vops):
        reference, index = vops[index], index + 1
        run = []
        while index < len(vops) and vops[index].coding_type == B_VOP:
            run.append(vops[index])
            index += 1
        first = run[0].data if run else b""
        yield reference.data + first, reference.coding_type == I_VOP
        for vop in run[1:]:
            yield vop.data, False
        if run:
            yield not_coded(reference.data[reference.data.index(VOP) :], rate, P_VOP), False


def with_gaps(numbers: set[int]) -> Chunks:
    """A chunk for each picture; those of these numbers, in display order, are not coded."""

    def chunks(vops: list[Vop], rate: int) -> Iterator[Chunk]:
        for vop in vops:
            is_left_out = vop.number in numbers
            data = not_coded(vop.data, rate, vop.coding_type) if is_left_out else vop.data
            yield data, vop.coding_type == I_VOP

    return chunks


def not_coded(vop: bytes, rate: int, coding_type: int) -> bytes:
    """The picture's header up to its time, and that nothing is coded of it."""
    at = vop.index(VOP) + 4
    bits = "".join(f"{byte:08b}" for byte in vop[at : at + 8])
    end_of_modulo = bits.index("0", 2) + 1
    num_time_bits = max(1, (rate - 1).bit_length())
    header = f"{coding_type:02b}" + bits[2 : end_of_modulo + 1 + num_time_bits + 1] + "0"
    header += "0" + "1" * (-(len(header) + 1) % 8)
    return VOP + bytes(int(header[i : i + 8], 2) for i in range(0, len(header), 8))


def _marked(vop: Vop) -> bytes:
    """A keyframe with the user data of an encoder that packs; others as they are."""
    at = vop.data.index(VOP)
    return vop.data if vop.coding_type != I_VOP else vop.data[:at] + PACKED + vop.data[at:]


def without_control(data: bytes) -> bytes:
    """An AVI file whose stream does not say that it has B-VOPs: its headers lack the control parameters."""
    start = data.index(VOL)
    end = data.index(b"\0\0\1", start + 4)
    header = data[start:end]
    bits = "".join(f"{byte:08b}" for byte in header[4:])
    at = 1 + 8
    at += 8 if bits[at] == "1" else 1
    at += 4 + (16 if bits[at : at + 4] == "1111" else 0)
    assert bits[at] == "1", "it has none"
    bits = bits[:at] + "0" + bits[at + 5 :] + "1111"
    return data.replace(header, VOL + bytes(int(bits[i : i + 8], 2) for i in range(0, len(bits), 8)))
