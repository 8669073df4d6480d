"""Decides about fields that clients add inside of messages, parts, calls and functions.

What is not defined there is ignored: histories carry fields of other servers, and none of them can change the
answer. Three kinds are refused, as ignoring them could change it: names one slip away from a field that is
missing, fields of another kind of part, and options of media that belong to the request.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

_MAX_NAME = 24  # longer names resemble none
_MAX_FIELDS = 64  # of one object that are not defined: each is looked at
_LOOKED = "mm_processor_kwargs, media_io_kwargs or epd of the request"
# Where clients of other servers put what this one takes elsewhere, and where it belongs.
_ELSEWHERE = {
    **dict.fromkeys(
        (
            "fps", "nframes", "num_frames", "max_frames", "min_frames", "sample_fps", "do_sample_frames",
            "video_start", "video_end", "start_s", "end_s", "min_pixels", "max_pixels", "total_pixels",
            "resized_height", "resized_width", "min_dynamic_patch", "max_dynamic_patch",
        ),
        _LOOKED,
    ),
    "input_schema": "parameters",
}  # fmt: skip
# What holds the content of parts and messages: ignored where it does not belong, something would be lost.
_CONTENT = frozenset({
    "text", "image", "images", "image_url", "video", "videos", "video_url", "audio_url", "input_audio",
    "file", "file_id", "tool_calls", "function_call",
})  # fmt: skip


class Sent(BaseModel):
    """An object inside of a message as clients send it: with more fields than the defined ones.

    Fields whose value is null or empty ask for nothing, whatever their name.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    # Fields whose names may be misspelt, as they change nothing or are missed at once.
    harmless: ClassVar[frozenset[str]] = frozenset({"id", "uuid", "type", "role", "strict"})
    # Fields that are ignored, though others of their name are content.
    ignored: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="after")
    def _leave_out_others(self) -> Self:
        others = self.__pydantic_extra__
        if others:
            if len(others) > _MAX_FIELDS:
                raise _refused(
                    f"received {len(others)} fields that are not known; send {_MAX_FIELDS} at most"
                )
            for name, value in others.items():
                if name not in self.ignored and value not in (None, "", [], {}):
                    self._check(name)
            others.clear()
        return self

    def _check(self, name: str) -> None:
        """Raises for a field that could change the answer."""
        if name in _CONTENT:
            raise _refused(f"received the field {name!r}, which does not belong here; move or leave it out")
        if name in _ELSEWHERE:
            raise _refused(f"received the field {name!r}; allowed: in {_ELSEWHERE[name]}; move it")
        if len(name) <= _MAX_NAME:
            for slip in _slips(_bare(name)):
                for meant in _by_slip(type(self)).get(slip, ()):
                    if getattr(self, meant) is None:
                        raise _refused(f"received the field {name!r}; did you mean {meant}?")


def _refused(message: str) -> PydanticCustomError:
    return PydanticCustomError("sent_field", "{message}", {"message": message})


@cache
def _by_slip(model: type[Sent]) -> dict[str, list[str]]:
    """Returns the fields that may be meant, by each text that a slip leaves of their names."""
    found: dict[str, list[str]] = {}
    for name in model.model_fields.keys() - model.harmless:
        for slip in _slips(_bare(name)):
            found.setdefault(slip, []).append(name)
    return found


def _bare(name: str) -> str:
    """Returns a name as it is in any case, and with any marks between its words."""
    return name.lower().replace("_", "").replace("-", "")


def _slips(name: str) -> Iterator[str]:
    """Yields what names share of which one has a letter more, less, changed or moved by one."""
    yield name
    for place in range(len(name)):
        yield name[:place] + name[place + 1 :]
