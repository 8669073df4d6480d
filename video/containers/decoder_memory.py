"""Estimates how much memory a decoder will take, from a stream's headers, before a frame is decoded.

frames held for reference and for reordering  +  some in work   of stored pixels
one being converted, one upright                                of RGB
"""

from __future__ import annotations

from collections.abc import Iterator

from av.video.codeccontext import VideoCodecContext

from epd.errors import MediaLimitError

# Frames that other codecs hold: VP9 and AV1 have eight slots, HEVC as many at most of its larger frames.
_SLOTS = 8
_FRAMES_IN_WORK = 4
_MAX_REFERENCES = 16
_RGB_COPIES = 2
_SPS = 7
# Profiles whose sequence parameter sets give the format of their pixels (H.264, 7.3.2.1.1).
_WITH_FORMAT = frozenset({100, 110, 122, 244, 44, 83, 86, 118, 128, 138, 139, 134, 135})


def decoder_bytes(context: VideoCodecContext) -> int:
    """Estimates the memory of one decoder with one thread, without what the codec itself needs besides."""
    pixels = context.width * context.height
    bits = max(8, context.format.padded_bits_per_pixel) if context.format else 12
    slots = references(context.extradata) if context.name == "h264" else _SLOTS
    return pixels * bits // 8 * (slots + _FRAMES_IN_WORK) + _RGB_COPIES * 3 * pixels


def check_memory(name: str, context: VideoCodecContext, max_bytes: int) -> None:
    """Raises MediaLimitError for a stream that a single decoder needs more memory for."""
    needed = decoder_bytes(context)
    if needed > max_bytes:
        raise MediaLimitError(
            f"{name} needs {needed} bytes to decode frames of {context.width} x {context.height} pixels; "
            f"allowed {max_bytes}; encode it again, smaller or with fewer reference frames"
        )


def references(extradata: bytes | None) -> int:
    """Returns how many frames an H.264 stream may refer to, by its parameter set; 16 if it does not say."""
    try:
        return min(_MAX_REFERENCES, _references(_Bits(_first_sps(extradata or b""))))
    except (IndexError, ValueError):
        return _MAX_REFERENCES


def _first_sps(extradata: bytes) -> bytes:
    """Returns the payload of the first parameter set, from the profile on. Raises ValueError without one."""
    if extradata[:1] == b"\x01":  # avcC: 5 bytes of configuration, their number, then length and unit
        unit = extradata[8 : 8 + int.from_bytes(extradata[6:8])]
    else:
        units = extradata.split(b"\0\0\1")[1:]
        unit = next((each for each in units if each[:1] and each[0] & 31 == _SPS), b"")
    if not unit or unit[0] & 31 != _SPS:
        raise ValueError("no sequence parameter set")
    return unit[1:].replace(b"\0\0\3", b"\0\0")


class _Bits:
    """Reads bits. IndexError at the end."""

    def __init__(self, data: bytes) -> None:
        self._bits: Iterator[int] = (byte >> shift & 1 for byte in data for shift in range(7, -1, -1))

    def bit(self) -> int:
        for bit in self._bits:
            return bit
        raise IndexError

    def fixed(self, num_bits: int) -> int:
        value = 0
        for _ in range(num_bits):
            value = value << 1 | self.bit()
        return value

    def golomb(self) -> int:
        """Reads ue(v) of the standard."""
        zeros = 0
        while not self.bit():
            zeros += 1
            if zeros > 32:
                raise ValueError("no such number")
        return (1 << zeros) - 1 + self.fixed(zeros)

    def signed(self) -> int:
        """Reads se(v) of the standard."""
        value = self.golomb()
        return (value + 1) // 2 if value % 2 else -(value // 2)


def _references(bits: _Bits) -> int:
    """Reads max_num_ref_frames (H.264, 7.3.2.1.1)."""
    profile = bits.fixed(8)
    bits.fixed(16)  # constraints, level
    bits.golomb()
    if profile in _WITH_FORMAT:
        _skip_format(bits)
    bits.golomb()
    order = bits.golomb()
    if order == 0:
        bits.golomb()
    elif order == 1:
        bits.bit()
        bits.signed()
        bits.signed()
        for _ in range(min(255, bits.golomb())):
            bits.signed()
    return bits.golomb()


def _skip_format(bits: _Bits) -> None:
    chroma = bits.golomb()
    if chroma == 3:
        bits.bit()
    bits.golomb()
    bits.golomb()
    bits.bit()
    if bits.bit():
        for number in range(12 if chroma == 3 else 8):
            if bits.bit():
                _skip_scaling(bits, 16 if number < 6 else 64)


def _skip_scaling(bits: _Bits, size: int) -> None:
    last = following = 8
    for _ in range(size):
        if following:
            following = (last + bits.signed()) % 256
        last = following or last
