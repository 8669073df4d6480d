"""Measures the size of a request and checks it against ceilings before any work is done.

    door     the JSON alone           RequestBudget.check(limits)           before a byte of media is fetched
    probe    what containers claim    check_num_frames, check_num_pixels    before a frame is listed
    plan     visual tokens            check_visual_tokens                   before a prompt is laid out

Pure arithmetic: nothing here is allocated, listed or looped from a number that a client chose.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import ClassVar, NamedTuple, Self

from epd.errors import RequestBudgetError, RequestError
from epd.reduction import LEAST_RETENTION
from epd.sampling_params import MAX_CHOICES, MAX_STOP_STRINGS

# No family gives more than two frames one visual token: a unit of the Qwen families is two frames.
_FRAMES_PER_TOKEN = 2
# Kept tokens are rounded for each window, which keeps one at least: never to less than half the share.
_ROUNDING = 2
_JSON_WINDOW_BYTES = 1 << 20
_JSON_MARKS = (b",", b"[", b"{")


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Sets the ceilings of one request; more is refused with 400 before work on it begins.

    max_text_bytes: of all messages, in UTF-8
    max_json_values: members and elements of its JSON
    max_json_bytes: of its JSON beside the URLs of media
    max_messages, max_parts, max_media: of the conversation, parts and media of all messages together
    max_prompts: of a completion, each counted n times
    max_frames: sampled from all its videos
    max_image_pixels: of all its images, before they are resized or as they are enlarged
    max_resize_pixels: that it may ask for by min_pixels, max_pixels and size, above the model's own limit;
        None for that limit
    max_answer_tokens: max_tokens times n, None for the limit of the model's context
    max_stop_strings, max_stop_chars, max_stop_token_ids: characters of all stop strings together
    """

    max_text_bytes: int = 1 << 21
    max_json_values: int = 1 << 18
    max_json_bytes: int = 1 << 24
    max_messages: int = 1024
    max_prompts: int = 1024
    max_parts: int = 4096
    max_media: int = 64
    max_frames: int = 1 << 16
    max_image_pixels: int = 1 << 28
    max_resize_pixels: int | None = None
    max_answer_tokens: int | None = None
    max_stop_strings: int = MAX_STOP_STRINGS
    max_stop_chars: int = 4096
    max_stop_token_ids: int = 1024

    __pydantic_config__: ClassVar[Mapping[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            if type(value) is not int or value < 1:
                raise RequestError(
                    f"received the limit {field.name}={value!r}; allowed: an integer of at least 1; "
                    "change it or leave it out"
                )

    def record(self) -> dict[str, int | None]:
        """Returns the ceilings by name, for people and machines."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def line(self) -> str:
        """Returns the ceilings that requests meet first, for a log."""
        answers = "any number of" if self.max_answer_tokens is None else f"{self.max_answer_tokens:,}"
        return (
            f"{self.max_text_bytes:,} bytes of text, {self.max_media:,} media, {self.max_frames:,} frames, "
            f"{self.max_image_pixels:,} pixels of images, {answers} tokens of answers"
        )

    def for_model(self, context_tokens: int, longest_token_bytes: int) -> Self:
        """Lowers the ceilings to the most that can fit the context of a model.

        longest_token_bytes: of its vocabulary, in UTF-8. A text of N bytes has at least N divided by that
        many tokens.
        """
        most_frames = int(context_tokens * _FRAMES_PER_TOKEN / LEAST_RETENTION)
        most_tokens = context_tokens * MAX_CHOICES
        return replace(
            self,
            max_text_bytes=min(self.max_text_bytes, context_tokens * longest_token_bytes),
            max_frames=min(self.max_frames, most_frames),
            max_answer_tokens=min(self.max_answer_tokens or most_tokens, most_tokens),
        )


class _Ceiling(NamedTuple):
    """Maps a field of RequestBudget to its limit.

    amount: a field of RequestBudget
    limit: a field of RequestLimits
    what, advice: for the error
    """

    amount: str
    limit: str
    what: str
    advice: str


_CEILINGS = (
    _Ceiling("num_messages", "max_messages", "messages", "send fewer"),
    _Ceiling("num_prompts", "max_prompts", "prompts times n", "send fewer or lower n"),
    _Ceiling("num_parts", "max_parts", "parts of messages", "send fewer"),
    _Ceiling("num_media", "max_media", "media", "send fewer"),
    _Ceiling("num_json_bytes", "max_json_bytes", "bytes of JSON beside media", "shorten the request"),
    _Ceiling("num_text_bytes", "max_text_bytes", "bytes of text", "shorten the messages"),
    _Ceiling("num_frames", "max_frames", "frames of all videos", "lower num_frames or fps"),
    _Ceiling("num_answer_tokens", "max_answer_tokens", "tokens of answers", "lower n or max_tokens"),
    _Ceiling("num_stop_strings", "max_stop_strings", "stop strings", "send fewer"),
    _Ceiling("num_stop_chars", "max_stop_chars", "characters of stop strings", "shorten them"),
    _Ceiling("num_stop_token_ids", "max_stop_token_ids", "stop_token_ids", "send fewer"),
)


@dataclass(frozen=True, slots=True)
class RequestBudget:
    """Measures a request as far as its JSON shows.

    num_prompts: of a completion, times n
    num_json_bytes: beside the URLs of media
    num_text_bytes: of all messages, in UTF-8
    num_frames: asked for by number, of all its videos
    num_answer_tokens: max_tokens times n, 0 where max_tokens is left to the server
    """

    num_messages: int = 0
    num_prompts: int = 0
    num_parts: int = 0
    num_media: int = 0
    num_json_bytes: int = 0
    num_text_bytes: int = 0
    num_frames: int = 0
    num_answer_tokens: int = 0
    num_stop_strings: int = 0
    num_stop_chars: int = 0
    num_stop_token_ids: int = 0

    def check(self, limits: RequestLimits) -> None:
        """Raises RequestBudgetError for the first amount above its ceiling."""
        for ceiling in _CEILINGS:
            allowed: int | None = getattr(limits, ceiling.limit)
            if allowed is not None:
                _check(getattr(self, ceiling.amount), allowed, ceiling)


def check_json_size(body: bytes | bytearray, limits: RequestLimits) -> None:
    """Raises RequestBudgetError for JSON with more members and elements than allowed, before it is parsed.

    Counts the marks that begin one, those within texts too, and stops above the limit.
    """
    count = 0
    for start in range(0, len(body), _JSON_WINDOW_BYTES):
        count += sum(body.count(mark, start, start + _JSON_WINDOW_BYTES) for mark in _JSON_MARKS)
        if count > limits.max_json_values:
            raise RequestBudgetError(
                f"received JSON with more than {limits.max_json_values:,} members and elements; allowed "
                f"{limits.max_json_values:,} (max_json_values); shorten lists and texts"
            )


def check_num_frames(num_frames: float, max_frames: int) -> None:
    """Refuses to sample more frames than allowed. Must run before they are listed.

    num_frames: wanted of one video, a float where a rate gives it. max_frames: left by the other videos of
    the request.
    Raises RequestBudgetError.
    """
    if not num_frames <= max_frames:  # a rate may give infinity
        raise RequestBudgetError(
            f"received a video of which {num_frames:,.0f} frames are to be sampled; allowed {max_frames:,} "
            "beside the other videos (max_frames); lower num_frames or fps, or set start_s and end_s"
        )


def check_num_pixels(num_pixels: int, limits: RequestLimits) -> None:
    """Refuses images with more pixels in total than allowed. Must run before one is decoded.

    Raises RequestBudgetError.
    """
    if num_pixels > limits.max_image_pixels:
        raise RequestBudgetError(
            f"received images of {num_pixels:,} pixels in all; allowed {limits.max_image_pixels:,} "
            "(max_image_pixels); send fewer or smaller ones"
        )


def check_visual_tokens(num_tokens: int, retention: float, context_tokens: int) -> None:
    """Refuses media that cannot fit the context. Must run before their prompt is laid out.

    num_tokens: of all media before reduction. retention: share of them that is kept.
    Raises RequestBudgetError.
    """
    least = num_tokens * retention / (_ROUNDING if retention < 1 else 1)
    if least >= context_tokens:
        raise RequestBudgetError(
            f"the media have {num_tokens:,} visual tokens, of which {retention:g} is kept; allowed: fewer "
            f"than the {context_tokens:,} tokens of the model's context; ask for fewer frames or media"
        )


def _check(received: int, allowed: int, ceiling: _Ceiling) -> None:
    if received > allowed:
        raise RequestBudgetError(
            f"received {received:,} {ceiling.what}; allowed {allowed:,} ({ceiling.limit}); {ceiling.advice}"
        )
