"""Draws small pictures of media for people, where a browser cannot show the format."""

from __future__ import annotations

import io
from contextlib import closing

import numpy as np
from PIL import Image

from epd import video
from epd.errors import RequestError
from epd.serve_app.media.frame_reader import Decoder
from epd.serve_app.media.media_spool import FetchedFile
from epd.serve_app.media_messages import DecodeOrder, ReadPicture
from epd.types import UInt8Array


def jpeg_of(
    file: FetchedFile, wanted: ReadPicture, reader: video.MediaReader, decoder: Decoder
) -> UInt8Array:
    """Returns a JPEG of an image, or of a video's first frame, upright: uint8 [N]. Blocks.

    Raises MediaError for what cannot be decoded, RequestError for sound.
    """
    if file.facts.kind == "audio":
        raise RequestError(
            f"{file.label} is sound, which has no picture; allowed: images and videos; play it instead"
        )
    if file.facts.kind == "image":
        with file.open() as opened:
            pixels = reader.load_image(opened, file.label)
    else:
        pixels = _first_frame(file, wanted, decoder)
    picture = Image.fromarray(pixels)
    picture.thumbnail((wanted.max_side, wanted.max_side))
    out = io.BytesIO()
    picture.save(out, "JPEG")
    return np.frombuffer(out.getvalue(), np.uint8)


def _first_frame(file: FetchedFile, wanted: ReadPicture, decoder: Decoder) -> UInt8Array:
    """Returns the frame at 0 s, small: uint8 [h, w, 3]."""
    height, width = file.facts.height, file.facts.width
    scale = min(1.0, wanted.max_side / max(height, width))
    size = (max(1, round(height * scale)), max(1, round(width * scale)))
    order = DecodeOrder(wanted.source, (0.0,), (1,), size)
    with closing(decoder(file.open(), file.label, order)) as frames:
        pixels: UInt8Array = frames.read().data[0]
        return pixels
