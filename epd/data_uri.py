"""Reads the heads of `data:` URIs: of what type they are, and whether they list the frames of a video."""

from __future__ import annotations

from dataclasses import dataclass

_BASE64 = "base64"
# How vLLM's clients send extracted frames: the images follow, separated by commas.
_LIST = "video/jpeg"


@dataclass(frozen=True, slots=True)
class Head:
    """Holds what stands before the bytes. kind: the media type, in lower case. start: where they begin."""

    kind: str
    is_base64: bool
    start: int

    @property
    def lists_frames(self) -> bool:
        """Whether images follow, which are the frames of a video."""
        return self.is_base64 and self.kind == _LIST


def head_of(uri: str) -> Head | None:
    """Returns the head of a `data:` URI, which may be in capitals; None without a comma."""
    colon, comma = uri.find(":"), uri.find(",")
    if comma < 0:
        return None
    kind, *parameters = uri[colon + 1 : comma].lower().split(";")
    is_base64 = bool(parameters) and parameters[-1].strip() == _BASE64
    return Head(kind.strip(), is_base64, comma + 1)


def num_listed_frames(uri: str) -> int:
    """Returns the number of frames in a `data:` URI that lists them; 0 for any other medium."""
    head = head_of(uri) if uri[:5].lower() == "data:" else None
    return uri.count(",") if head is not None and head.lists_frames else 0
