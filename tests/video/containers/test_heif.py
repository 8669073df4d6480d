"""HEIC and AVIF whole: tiles joined, alpha on white, cropped, turned and mirrored; or refused by name.

Modules: `video/containers/heif_boxes.py`.
"""

from __future__ import annotations

import io
import struct
from contextlib import suppress

import numpy as np
import pytest
from PIL import Image, ImageOps

from epd import video
from epd.errors import CorruptMediaError, MediaError, MediaLimitError, UnsupportedMediaError
from epd.types import UInt8Array
from tests.video.pictures import Item, box, coded, full, heif, ispe

NEAR = 12  # levels that the codec may change
ALPHA = full(b"auxC", b"urn:mpeg:mpegB:cicp:systems:auxiliary:alpha\0")


@pytest.fixture(scope="module")
def scene() -> UInt8Array:
    """Four flat quarters of 64 x 64, each of its own colour."""
    colours = np.array([[[200, 30, 30], [30, 200, 30]], [[30, 30, 200], [200, 200, 40]]], np.uint8)
    return colours.repeat(64, 0).repeat(64, 1)


@pytest.fixture(scope="module")
def picture(scene: UInt8Array) -> Item:
    return item(scene)


def item(
    pixels: UInt8Array, *properties: bytes, codec: str = "libx265", pixel_format: str = "yuv444p"
) -> Item:
    configuration, data = coded(pixels, codec, pixel_format)
    kind, name = (b"hvc1", b"hvcC") if codec == "libx265" else (b"av01", b"av1C")
    height, width = pixels.shape[:2]
    return Item(kind, data, (ispe(width, height), box(name, configuration), *properties))


def cut(pixels: UInt8Array, side: int = 64) -> list[UInt8Array]:
    rows = [pixels[top : top + side] for top in range(0, pixels.shape[0], side)]
    return [row[:, left : left + side] for row in rows for left in range(0, pixels.shape[1], side)]


def tiles(pixels: UInt8Array) -> list[Item]:
    return [item(part) for part in cut(pixels)]


def grid(rows: int, columns: int, width: int, height: int, *properties: bytes, first: int = 2) -> Item:
    data = struct.pack(">BBBBHH", 0, 0, rows - 1, columns - 1, width, height)
    sources = tuple(range(first, first + rows * columns))
    return Item(b"grid", data, (ispe(width, height), *properties), ((b"dimg", sources),))


def irot(turns: int) -> bytes:
    return box(b"irot", bytes([turns]))


def imir(mode: int) -> bytes:
    return box(b"imir", bytes([mode]))


def clap(width: int, height: int, right: int, down: int) -> bytes:
    return box(b"clap", struct.pack(">IIIIiIiI", width, 1, height, 1, right, 2, down, 2))


def is_near(found: UInt8Array, expected: UInt8Array, percent: float = 100) -> bool:
    """percent: of the samples; chroma of half the size blurs the borders between colours."""
    if found.shape != expected.shape:
        return False
    return float(np.percentile(np.abs(found.astype(int) - expected), percent)) <= NEAR


def test_a_single_picture(picture: Item, scene: UInt8Array) -> None:
    data = heif([picture])
    assert video.look(data) == video.MediaFacts("image", 128, 128)
    assert video.media_kind(data) == "image"
    assert is_near(video.load_image(data), scene)


@pytest.mark.parametrize("pixel_format", ["yuv420p", "yuv420p10le", "yuvj420p"])
def test_samples_of_8_and_10_bits_and_both_ranges(scene: UInt8Array, pixel_format: str) -> None:
    assert is_near(video.load_image(heif([item(scene, pixel_format=pixel_format)])), scene, 90)


def test_tiles_are_joined_and_what_reaches_beyond_is_cut(scene: UInt8Array) -> None:
    data = heif([grid(2, 2, 120, 100), *tiles(scene)])
    assert (video.look(data).height, video.look(data).width) == (100, 120)
    assert is_near(video.load_image(data), scene[:100, :120])


def test_a_grid_of_three_rows_by_two(scene: UInt8Array) -> None:
    tall = np.concatenate([scene, scene[:64, ::-1]])
    assert is_near(video.load_image(heif([grid(3, 2, 128, 192), *tiles(tall)])), tall)


def test_the_primary_item_counts_and_not_the_first(picture: Item, scene: UInt8Array) -> None:
    thumbnail = item(np.zeros((64, 64, 3), np.uint8))
    assert is_near(video.load_image(heif([thumbnail, picture], primary=2)), scene)


@pytest.mark.parametrize("turns", range(4))
def test_rotation_is_anticlockwise(scene: UInt8Array, turns: int) -> None:
    wide = scene[:64]
    found = video.load_image(heif([item(wide, irot(turns))]))
    assert is_near(found, np.ascontiguousarray(np.rot90(wide, turns)))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_turns_and_mirrors_are_those_of_avif(scene: UInt8Array, orientation: int) -> None:
    """Pillow writes the orientation of EXIF as irot and imir: its boxes and its pixels are the truth."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    Image.fromarray(scene).save(file, "AVIF", exif=exif, quality=100)
    found = {
        kind: data[at + 4]
        for data in [file.getvalue()]
        for kind in (b"irot", b"imir")
        if (at := data.find(kind)) > 0
    }
    boxes = [box(kind, bytes([found[kind]])) for kind in (b"irot", b"imir") if kind in found]
    image = Image.fromarray(scene)
    image.getexif()[0x0112] = orientation
    expected = np.asarray(ImageOps.exif_transpose(image))
    assert is_near(video.load_image(heif([item(scene, *boxes)])), expected)
    assert is_near(video.load_image(file.getvalue()), expected, 90)


def test_crop_turn_and_mirror_in_the_order_of_the_file(scene: UInt8Array) -> None:
    data = heif([grid(2, 2, 128, 128, clap(100, 60, -8, 4), irot(1), imir(1)), *tiles(scene)])
    left, top = (128 - 100) // 2 - 4, (128 - 60) // 2 + 2
    expected = np.rot90(scene[top : top + 60, left : left + 100])[:, ::-1]
    assert is_near(video.load_image(data), np.ascontiguousarray(expected))
    with pytest.raises(CorruptMediaError, match="cropped to what is not there"):
        video.load_image(heif([item(scene, clap(100, 60, 400, 0))]))


def test_exif_orientation_is_not_applied_again(scene: UInt8Array) -> None:
    turned = b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"  # orientation 6
    exif = Item(b"Exif", bytes(4) + turned, ())
    assert is_near(video.load_image(heif([item(scene[:64]), exif])), scene[:64])


@pytest.mark.parametrize("is_premultiplied", [False, True])
def test_alpha_is_on_white(scene: UInt8Array, is_premultiplied: bool) -> None:
    levels = np.zeros((128, 128, 3), np.uint8)
    levels[:, 64:] = 255
    levels[64:, :64] = 128
    stored = (scene * (levels / 255)).astype(np.uint8) if is_premultiplied else scene
    alpha = item(levels, ALPHA)
    premultiplied = ((b"prem", (2,)),) if is_premultiplied else ()
    master = item(stored)
    data = heif([
        Item(master.kind, master.data, master.properties, premultiplied),
        Item(alpha.kind, alpha.data, alpha.properties, ((b"auxl", (1,)),)),
    ])  # fmt: skip
    share = levels / 255
    expected = np.rint(scene * share + 255 * (1 - share)).astype(np.uint8)
    assert is_near(video.load_image(data), expected)
    on_black = np.rint(scene * share).astype(np.uint8)
    assert is_near(video.load_image(data, background=(0, 0, 0)), on_black)


def test_colours_by_the_files_own_box(scene: UInt8Array) -> None:
    """The same data read as BT.709 and full range: a matrix written out here."""
    plain = item(scene, pixel_format="yuv444p")
    nclx = box(b"colr", b"nclx", struct.pack(">HHHB", 1, 13, 1, 0x80))
    found = video.load_image(heif([Item(plain.kind, plain.data, (*plain.properties, nclx))]))
    red, green, blue = (scene[..., channel].astype(float) for channel in range(3))
    luma = 16 + (65.738 * red + 129.057 * green + 25.064 * blue) / 256  # BT.601, limited, as it was coded
    blueness = (-37.945 * red - 74.494 * green + 112.439 * blue) / 256
    redness = (112.439 * red - 94.154 * green - 18.285 * blue) / 256
    expected = np.stack(
        [luma + 1.5748 * redness, luma - 0.1873 * blueness - 0.4681 * redness, luma + 1.8556 * blueness], -1
    )
    assert np.abs(found - np.clip(expected, 0, 255)).max() <= NEAR


def test_a_grid_of_av1_tiles_in_heif_and_in_avif(scene: UInt8Array) -> None:
    parts = [item(part, codec="libsvtav1", pixel_format="yuv420p") for part in cut(scene)]
    pixi = full(b"pixi", bytes([3, 8, 8, 8]))
    parts = [Item(part.kind, part.data, (*part.properties, pixi)) for part in parts]
    in_heif = heif([grid(2, 2, 128, 128, pixi), *parts], brand=b"mif1")
    assert is_near(video.load_image(in_heif), scene, 90)
    in_avif = heif([grid(2, 2, 128, 128, pixi, irot(1)), *parts], brand=b"avif")
    assert is_near(video.load_image(in_avif), np.ascontiguousarray(np.rot90(scene)), 90)


# What cannot be read, and what is damaged


@pytest.mark.parametrize("kind", [b"j2k1", b"vvc1", b"unci", b"iovl"])
def test_other_images_are_refused_by_name(kind: bytes) -> None:
    data = heif([Item(kind, b"1234", (ispe(64, 64),))])
    with pytest.raises(UnsupportedMediaError, match=f"type '{kind.decode()}'.*convert it to JPEG or PNG"):
        video.load_image(data)


def test_grids_that_do_not_add_up_are_damaged(scene: UInt8Array) -> None:
    parts = tiles(scene)
    for broken, words in (
        ([grid(2, 2, 120, 100), *parts[:3]], "names an image that is not there"),
        ([grid(2, 1, 120, 100), *parts], "do not fill"),
        ([grid(2, 2, 0, 100), *parts], "without a size"),
        ([Item(b"grid", b"\0\0\1", (ispe(120, 100),), ((b"dimg", (2,)),)), *parts], "damaged grid"),
        ([grid(2, 2, 128, 128), *parts[:3], item(scene)], "several sizes"),
    ):
        with pytest.raises(CorruptMediaError, match=words):
            video.load_image(heif(broken))


def test_sizes_are_checked_before_anything_is_decoded(scene: UInt8Array) -> None:
    small = item(scene[:64, :64])
    with pytest.raises(MediaLimitError, match="60000 x 60000"):
        video.load_image(heif([grid(2, 2, 60000, 60000), *[small] * 4]))
    with pytest.raises(MediaLimitError, match="128 x 128 pixels; allowed 16383"):
        video.load_image(heif([item(scene)]), max_pixels=128 * 128 - 1)
    lying = Item(small.kind, item(scene).data, (ispe(32, 32), item(scene).properties[1]))
    with pytest.raises(CorruptMediaError):
        video.load_image(heif([lying]))
    huge = grid(256, 256, 128, 128)
    many = Item(huge.kind, huge.data, huge.properties, ((b"dimg", (2,) * 65535),))
    with pytest.raises(CorruptMediaError, match="65535 tiles"):
        video.load_image(heif([many, small]))


def test_damage_anywhere_ends_in_a_typed_error(scene: UInt8Array) -> None:
    data = heif([grid(2, 2, 120, 100, irot(1)), *tiles(scene)])
    rng = np.random.default_rng(4)
    for place in [*rng.integers(0, 900, 60).tolist(), *rng.integers(0, len(data), 20).tolist()]:
        for broken in (data[: place + 1], data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :]):
            with suppress(MediaError):
                video.look(broken)
                video.load_image(broken)
