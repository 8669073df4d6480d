"""Defines the JSON of the messages of a conversation: roles, and parts of text, images, videos or sound.

A message may have fields that are not defined here, see `Sent`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from epd.serve_app.http.requests.request_fields import Sent

MAX_UUID_CHARS = 256

_T = TypeVar("_T")
MediaUuid = Annotated[str, Field(min_length=1, max_length=MAX_UUID_CHARS)]
# A list whose validation stops at the first wrong element.
Listed = Annotated[list[_T], Field(fail_fast=True)]


class TextPart(Sent):
    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(Sent):
    """A model's refusal to answer, treated as ordinary text."""

    type: Literal["refusal"]
    refusal: str


class ThoughtPart(Sent):
    """What a model thought before its answer, as clients send it back: ignored, as `reasoning` is."""

    type: Literal["thinking", "redacted_thinking", "reasoning", "reasoning_content"]
    ignored = frozenset({"text"})


# Of a file that was uploaded.
FileId = Annotated[str, Field(pattern=r"^file-[0-9a-f]+$")]
ImageDetail = Literal["auto", "low", "high", "original"]
VideoDetail = Literal["auto", "high", "original"]


class ImageUrl(Sent):
    """A medium's URL: http(s), data: with base64, or file: within the folder that the server allows.

    url: left out with the uuid of a medium that was sent before
    """

    url: str | None = None
    detail: ImageDetail | None = Field(
        default=None, description="low: at most 512 x 512 pixels, or one tile; others change nothing."
    )


class VideoUrl(Sent):
    """A video's URL, as an image's, or frames of one as data:video/jpeg;base64,F1,F2,..."""

    url: str | None = None
    detail: VideoDetail | None = Field(default=None, description="Changes nothing; low is for images.")


class ImagePart(Sent):
    """An image, its URL in `image_url` or as its text, or the file in `file_id`.

    detail: as of `image_url`, which comes first
    uuid: a name for it; with one that was sent before, `image_url` may be null or empty
    """

    type: Literal["image_url", "input_image"]
    image_url: ImageUrl | str | None = None
    file_id: FileId | None = None
    detail: ImageDetail | None = None
    uuid: MediaUuid | None = None


class VideoPart(Sent):
    """A video, its URL in `video_url` or as its text, or the file in `file_id`. uuid: as of an image."""

    type: Literal["video_url", "input_video"]
    video_url: VideoUrl | str | None = None
    file_id: FileId | None = None
    detail: VideoDetail | None = None
    uuid: MediaUuid | None = None


class AudioUrl(Sent):
    """The URL of sound, as an image's: of a file of audio, or of a video, whose sound alone is taken."""

    url: str | None = None


class AudioPart(Sent):
    """Sound, as vLLM's clients send it. uuid: as of an image."""

    type: Literal["audio_url"]
    audio_url: AudioUrl | str | None = None
    uuid: MediaUuid | None = None


class InputAudio(Sent):
    """Sound in base64, or as a data: URL. format: of the file; what it holds counts."""

    data: str
    format: Literal["wav", "mp3"]


class InputAudioPart(Sent):
    """Sound, as OpenAI's clients send it."""

    type: Literal["input_audio"]
    input_audio: InputAudio


# A part may be a text without more, as LangChain sends it.
UserPart = (
    Annotated[TextPart | ImagePart | VideoPart | AudioPart | InputAudioPart, Field(discriminator="type")]
    | str
)
AssistantPart = Annotated[TextPart | RefusalPart | ThoughtPart, Field(discriminator="type")] | str


class FunctionText(Sent):
    """A called function. arguments: JSON, as a text or as it is."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCallText(Sent):
    """A call of a function that the assistant wrote."""

    id: str | None = None
    type: Literal["function"] | None = "function"
    function: FunctionText


class SystemMessage(Sent):
    role: Literal["system", "developer"]
    content: str | Listed[TextPart | str] | None
    name: str | None = None


class UserMessage(Sent):
    role: Literal["user"]
    content: str | Listed[UserPart] | None
    name: str | None = None


class AssistantMessage(Sent):
    """An answer as clients send it back. refusal: replaces a content of null."""

    ignored = frozenset({"audio", "images"})

    role: Literal["assistant"]
    content: str | Listed[AssistantPart] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: Listed[ToolCallText] | None = None
    function_call: FunctionText | None = None


class ToolMessage(Sent):
    """What a called function returned: texts, and media to look at."""

    role: Literal["tool"]
    content: str | Listed[UserPart] | None
    tool_call_id: str | None = None
    name: str | None = None


class FunctionMessage(Sent):
    role: Literal["function"]
    content: str | None
    name: str


Message = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage | FunctionMessage,
    Field(discriminator="role"),
]
