"""Draws the time of a frame into it, and reads it with tesseract.

    0083.000 65        seconds with three decimals, and the check digits: the milliseconds modulo 97

A misread digit breaks the check, so what is read is a time that was drawn, or nothing.
"""

from __future__ import annotations

import csv
import io
import os
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from functools import cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from epd.types import UInt8Array

HEIGHT, WIDTH = 64, 320  # of a frame, pixels; the text fills most of it
# Drawn instead of the time of a frame that nobody is to see: it can be told from any time on screen.
HIDDEN_MS = 5_000_000
_FONT_SIZE, _CELL = 40, 25  # pixels: of the letters, and from one digit to the next
_CHECK, _NUM_DIGITS = 97, 9
_LINES = 50  # of a sheet
_WORD = "5"  # tesseract's level of a row that holds a word
_SETTINGS = ("-c", "tessedit_char_whitelist=0123456789.")


def is_installed() -> bool:
    """Reports whether tesseract is on the PATH."""
    return shutil.which("tesseract") is not None


def text_of(time_ms: int) -> str:
    """Returns what is drawn into the frame at a time, 0 to 9,999,999 milliseconds."""
    return f"{time_ms // 1000:04d}.{time_ms % 1000:03d} {time_ms % _CHECK:02d}"


def draw(time_ms: int) -> UInt8Array:
    """Draws a frame, white on black: uint8 [HEIGHT, WIDTH]."""
    glyphs = np.concatenate([_glyph(letter) for letter in text_of(time_ms)], axis=1)
    frame = np.zeros((HEIGHT, WIDTH), np.uint8)
    left = (WIDTH - glyphs.shape[1]) // 2
    frame[:, left : left + glyphs.shape[1]] = glyphs
    return frame


@cache
def _glyph(letter: str) -> UInt8Array:
    width = _CELL if letter.isdigit() else _CELL // 2
    image = Image.new("L", (width, HEIGHT))
    font = ImageFont.load_default(_FONT_SIZE)
    ImageDraw.Draw(image).text((width / 2, HEIGHT / 2 + _FONT_SIZE / 3), letter, 255, font, anchor="ms")
    return np.asarray(image)


def read(frames: Sequence[UInt8Array]) -> list[int | None]:
    """Reads frames of any size, uint8 [h, w]: milliseconds, None for what cannot be read even alone."""
    times: list[int | None] = []
    for start in range(0, len(frames), _LINES):
        times += _read_sheet(frames[start : start + _LINES])
    return [
        _read_alone(frame) if time_ms is None else time_ms
        for frame, time_ms in zip(frames, times, strict=True)
    ]


def _read_sheet(frames: Sequence[UInt8Array]) -> list[int | None]:
    """Reads frames below each other; a word belongs to the frame that its middle lies in."""
    sheet = np.concatenate([_printed(frame, 1) for frame in frames])
    words: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for row in csv.DictReader(io.StringIO(_tesseract(sheet, "6")), delimiter="\t", quoting=csv.QUOTE_NONE):
        if row["level"] == _WORD:
            middle = int(row["top"]) + int(row["height"]) // 2
            words[middle // HEIGHT].append((int(row["left"]), row["text"]))
    lines = ("".join(word for _, word in sorted(words[place])) for place in range(len(frames)))
    return [time_in(line) for line in lines]


def _read_alone(frame: UInt8Array) -> int | None:
    """Reads one frame larger, at several sizes."""
    for scale in (2, 3, 4):
        rows = csv.DictReader(
            io.StringIO(_tesseract(_printed(frame, scale), "7")), delimiter="\t", quoting=csv.QUOTE_NONE
        )
        time_ms = time_in("".join(row["text"] for row in rows if row["level"] == _WORD))
        if time_ms is not None:
            return time_ms
    return None


def time_in(line: str) -> int | None:
    """Returns the time of a line that was read, milliseconds; None where its check digits do not fit."""
    digits = "".join(filter(str.isdigit, line))
    if len(digits) != _NUM_DIGITS:
        return None
    time_ms, check = int(digits[:-2]), int(digits[-2:])
    return time_ms if time_ms % _CHECK == check else None


def _printed(frame: UInt8Array, scale: int) -> UInt8Array:
    """Brings a frame to `scale` times the drawn size, black on white."""
    image = Image.fromarray(255 - frame).resize((WIDTH * scale, HEIGHT * scale), Image.Resampling.BICUBIC)
    return np.asarray(image)


def _tesseract(image: UInt8Array, layout: str) -> str:
    """Returns tesseract's table of words. layout: 6 for lines below each other, 7 for a line."""
    png = io.BytesIO()
    Image.fromarray(image).save(png, "PNG", compress_level=1)
    command = ["tesseract", "stdin", "stdout", "--psm", layout, *_SETTINGS, "tsv"]
    environment = {**os.environ, "OMP_THREAD_LIMIT": "1"}
    run = subprocess.run(command, input=png.getvalue(), capture_output=True, check=True, env=environment)
    return run.stdout.decode()
