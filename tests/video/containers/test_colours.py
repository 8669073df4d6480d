"""What a picture means in RGB: transparency on white, deep samples rescaled. Pixels are computed by hand.

Modules: `video/containers/images.py`, `video/containers/orientation.py`.
"""

from __future__ import annotations

import io
import struct

import numpy as np
import pytest
from PIL import Image
from transformers.image_transforms import convert_to_rgb

from epd import video
from epd.colour import Colour
from epd.types import UInt8Array
from epd.video.containers.images import upright_size
from tests.video.pictures import GREY, GREY_ALPHA, PALETTE, RGB, RGBA, Part, gif, png, webp

NOISE = np.random.default_rng(7).integers(0, 256, (31, 37, 4), np.uint8)


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def colours(data: bytes, **options: Colour) -> list[list[int]]:
    """The pixels of the first row."""
    found: list[list[int]] = video.load_image(data, **options)[0].tolist()
    return found


@pytest.mark.parametrize(
    "image",
    [
        Image.fromarray(NOISE),
        Image.fromarray(NOISE[..., :2].copy(), "LA"),
        Image.fromarray(NOISE[..., :3].copy()),
        Image.fromarray(NOISE[..., 0].copy()),
        Image.fromarray(NOISE).quantize(16),
        Image.fromarray(NOISE[..., 0].copy()).convert("1"),
    ],
    ids=["RGBA", "LA", "RGB", "L", "palette with alphas", "1 bit"],
)
def test_the_pixels_of_transformers_own_conversion(image: Image.Image) -> None:
    data = saved(image, "PNG")
    expected = convert_to_rgb(Image.open(io.BytesIO(data)), return_numpy=True)
    assert np.array_equal(video.load_image(data), expected)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF", "AVIF"])
def test_transparency_is_on_white_and_colours_under_it_never_show(kind: str) -> None:
    pixels = NOISE.copy()
    pixels[..., 3] = np.where(np.arange(37) < 20, 0, 255)
    options = {"lossless": True, "exact": True} if kind == "WEBP" else {}
    found = video.load_image(saved(Image.fromarray(pixels), kind, **options))
    assert (found[:, :16] == 255).all()
    if kind != "AVIF":
        assert np.array_equal(found[:, 20:], pixels[:, 20:, :3])


def test_half_transparent_by_arithmetic_on_any_background() -> None:
    data = png((2, 1), 8, RGBA, [bytes([200, 100, 0, 128, 50, 60, 70, 0])])
    on_white = [round(colour * 128 / 255 + 255 * 127 / 255) for colour in (200, 100, 0)]
    assert np.abs(np.array(colours(data)) - [on_white, [255] * 3]).max() <= 1
    on_blue = colours(data, background=(0, 0, 200))
    assert np.abs(np.array(on_blue) - [[100, 50, round(200 * 127 / 255)], [0, 0, 200]]).max() <= 1


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (png((2, 1), 8, GREY, [b"\x40\x41"], (b"tRNS", b"\0\x40")), [[255] * 3, [65] * 3]),
        (png((2, 1), 4, GREY, [b"\x56"], (b"tRNS", b"\0\x05")), [[255] * 3, [102] * 3]),
        (png((4, 1), 2, GREY, [b"\x1b"], (b"tRNS", b"\0\x00")), [[255] * 3, [85] * 3, [170] * 3, [255] * 3]),
        (png((8, 1), 1, GREY, [b"\x0f"], (b"tRNS", b"\0\x00")), [[255] * 3] * 8),
        (png((8, 1), 1, GREY, [b"\x0f"]), [[0] * 3] * 4 + [[255] * 3] * 4),
        (
            png((2, 1), 8, RGB, [bytes([1, 2, 3, 1, 2, 4])], (b"tRNS", bytes([0, 1, 0, 2, 0, 3]))),
            [[255] * 3, [1, 2, 4]],
        ),
        (
            png((2, 1), 16, GREY, [struct.pack(">2H", 0x4040, 0x4041)], (b"tRNS", b"\x40\x40")),
            [[255] * 3, [64] * 3],
        ),
        (
            png(
                (2, 1),
                16,
                RGB,
                [struct.pack(">6H", 514, 514, 514, 514, 514, 515)],
                (b"tRNS", b"\2\2\2\2\2\2"),
            ),
            [[255] * 3, [2, 2, 2]],
        ),
        (
            png(
                (2, 1), 8, PALETTE, [b"\0\1"], (b"PLTE", bytes([9, 9, 9, 200, 100, 0])), (b"tRNS", b"\0\x80")
            ),
            [[255] * 3, [227, 177, 127]],
        ),
        (png((1, 1), 16, GREY_ALPHA, [struct.pack(">2H", 0, 0)]), [[255] * 3]),
        (
            png((2, 1), 16, RGBA, [struct.pack(">8H", 0, 0, 0, 0, 0x8080, 0, 0, 0xFFFF)]),
            [[255] * 3, [128, 0, 0]],
        ),
    ],
    ids=[
        "grey key",
        "grey key of 4 bits",
        "grey key of 2 bits",
        "1-bit key",
        "1 bit",
        "RGB key",
        "16-bit grey key",
        "16-bit RGB key",
        "palette with alphas",
        "16-bit grey with alpha",
        "16-bit RGBA",
    ],
)
def test_png_as_its_standard_says(data: bytes, expected: list[list[int]]) -> None:
    assert np.abs(np.array(colours(data)) - expected).max() <= 1


def test_transparent_gif_and_webp_are_on_white() -> None:
    pixels = np.array([[[10, 20, 30, 0], [200, 0, 0, 255]]], np.uint8)
    assert colours(gif((2, 1), [Part(pixels)])) == [[255] * 3, [200, 0, 0]]
    assert colours(webp((2, 1), [Part(pixels), Part(pixels)])) == [[255] * 3, [200, 0, 0]]


def test_premultiplied_tiff_is_divided_by_its_alpha() -> None:
    """Associated alpha, ExtraSamples 1: 100 at alpha 128 is a colour of 199, half of it on white."""
    file = bytearray(saved(Image.new("RGBA", (1, 1), (100, 50, 0, 128)), "TIFF"))
    at = file.index(struct.pack("<HHI", 338, 3, 1)) + 8
    file[at : at + 2] = struct.pack("<H", 1)
    assert np.abs(np.array(colours(bytes(file))) - [[227, 177, 127]]).max() <= 1


LEVELS = np.array([[0, 0x1234, 0x8000, 0xFFFF]], np.uint16)
SCALED = [round(level / 257) for level in (0, 0x1234, 0x8000, 0xFFFF)]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (saved(Image.fromarray(LEVELS), "PNG"), SCALED),
        (saved(Image.fromarray(LEVELS), "TIFF"), SCALED),
        (saved(Image.fromarray(LEVELS.astype(">u2")), "TIFF"), SCALED),
        (b"P5 4 1 65535\n" + LEVELS.astype(">u2").tobytes(), SCALED),
        (b"P5 2 1 1023\n" + struct.pack(">2H", 512, 1023), [128, 255]),
        (png((2, 1), 16, RGB, [struct.pack(">6H", *[0x8000] * 3, *[0xFFFF] * 3)]), [128, 255]),
        (b"P6 2 1 65535\n" + struct.pack(">6H", *[0x8000] * 3, *[0xFFFF] * 3), [128, 255]),
        (saved(Image.fromarray(np.array([[0, 0.5, 1]], np.float32)), "TIFF"), [0, 128, 255]),
        (saved(Image.fromarray(np.array([[-50, 0, 50]], np.float32)), "TIFF"), [0, 128, 255]),
        (saved(Image.fromarray(np.array([[np.nan, 2, 4, np.inf]], np.float32)), "TIFF"), [0, 0, 255, 255]),
        (saved(Image.fromarray(np.array([[0, 500_000, 1_000_000]], np.int32)), "TIFF"), [0, 128, 255]),
        (saved(Image.fromarray(np.array([[7, 7]], np.int32)), "TIFF"), [0, 0]),
    ],
    ids=[
        "PNG",
        "TIFF, little-endian",
        "TIFF, big-endian",
        "PGM",
        "PGM of 10 bits",
        "RGB PNG",
        "PPM",
        "floats to 1",
        "other floats",
        "not finite",
        "32 bits",
        "all the same",
    ],
)
def test_deep_samples_are_rescaled(data: bytes, expected: list[int]) -> None:
    found = np.array(colours(data))
    assert np.abs(found - np.array(expected)[:, None]).max() <= 1


def with_tag(tiff: bytes, tag: int, value: int) -> bytes:
    """A little-endian TIFF with a short number of its directory changed."""
    at = tiff.index(struct.pack("<HHI", tag, 3, 1)) + 8
    return tiff[:at] + struct.pack("<H", value) + tiff[at + 2 :]


def test_white_is_zero_of_16_bits() -> None:
    data = with_tag(saved(Image.fromarray(LEVELS), "TIFF"), 262, 0)
    assert [red for red, _, _ in colours(data)] == [255 - level for level in SCALED]


def test_cmyk_jpeg_of_adobe_is_inverted_back() -> None:
    """Adobe stores ink inverted: 0 is full ink. Red is no cyan, full magenta and yellow."""
    data = saved(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", quality=100)
    assert b"Adobe" in data
    assert np.abs(np.array(colours(data)) - [255, 0, 0]).max() <= 3


def test_lab_is_converted() -> None:
    """L* 54.3, a* 80.8, b* 69.9 (D50) is the red of sRGB; TIFF keeps L* / 100 * 255 and signed a*, b*."""
    lab = Image.merge("LAB", [Image.new("L", (2, 2), level) for level in (138, 128 + 81, 128 + 70)])
    assert bytes([138, 81, 70]) in saved(lab, "TIFF")
    assert np.abs(np.array(colours(saved(lab, "TIFF"))) - [255, 0, 0]).max() <= 6


QUARTERS: UInt8Array = np.zeros((32, 64, 3), np.uint8)
QUARTERS[:16, :32], QUARTERS[:16, 32:], QUARTERS[16:, :32] = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def quarters(kind: str, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(Image.fromarray(QUARTERS), kind, exif=exif, quality=100)


def assert_upright(found: UInt8Array, orientation: int) -> None:
    corners = {  # of red, then green, as (top, left), by the table of EXIF
        1: "tl tr", 2: "tr tl", 3: "br bl", 4: "bl br", 5: "tl bl", 6: "tr br", 7: "br tr", 8: "bl tl",
    }[orientation].split()  # fmt: skip
    assert found.shape == ((32, 64, 3) if orientation < 5 else (64, 32, 3))
    for corner, channel in zip(corners, (0, 1), strict=True):
        row, column = (4 if corner[0] == "t" else -4), (4 if corner[1] == "l" else -4)
        assert found[row, column].argmax() == channel
        assert found[row, column].max() > 200


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
def test_orientation_is_honoured(kind: str, orientation: int) -> None:
    data = quarters(kind, orientation)
    found = video.load_image(data)
    assert_upright(found, orientation)
    assert upright_size(data) == found.shape[:2]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_of_photos_that_are_a_video(orientation: int) -> None:
    """As `cat *.jpg` makes one. PyAV has no name for the EXIF that FFmpeg gives beside each frame."""
    photos = quarters("JPEG", orientation) * 3
    found = video.decode(photos, [0.1]).data[0]
    assert_upright(found, orientation)
    facts = video.look(photos)
    assert (facts.kind, facts.height, facts.width) == ("video", *found.shape[:2])


def test_bands_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    data = saved(Image.fromarray(NOISE), "PNG")
    whole = video.load_image(data)
    monkeypatch.setattr("epd.video.containers.colours._BAND_PIXELS", 100)
    assert np.array_equal(video.load_image(data), whole)
    deep = np.arange(31 * 37, dtype=np.uint16).reshape(31, 37) * 57
    found = video.load_image(saved(Image.fromarray(deep), "PNG"))
    assert np.array_equal(found[..., 0], np.rint(deep / 257))
