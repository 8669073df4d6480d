"""Turns options of questions, as commands and Python have them, into fields of requests. Imports no torch."""

from __future__ import annotations

import mimetypes
from dataclasses import replace
from pathlib import Path
from typing import Any

from epd import video
from epd.client.conversation import Medium
from epd.types import MediaKind

# Options of `epd ask` that are fields of our own in a request, and their names there.
_OWN_FIELDS = {
    "fps": "fps",
    "frames": "num_frames",
    "start": "start_s",
    "end": "end_s",
    "retention": "retention",
    "reduction": "reduction",
    "compute_share": "compute_share",
    "max_visual_tokens": "max_visual_tokens",
}


def request_fields(**options: Any) -> dict[str, Any]:
    """Returns the fields of a request that options mean, without those that are None and a `start` of 0."""
    given = {name: value for name, value in options.items() if value is not None}
    own = {field: given.pop(name) for name, field in _OWN_FIELDS.items() if name in given}
    if own.get("start_s") == 0:
        del own["start_s"]
    return given | ({"epd": own} if own else {})


def kind_of(name: str) -> MediaKind:
    """Returns what a file is, or what the ending of a URL says; a video where it says nothing."""
    if "://" not in name and not name.startswith("data:"):
        return video.media_kind(name)
    guessed, _ = mimetypes.guess_type(name.partition("?")[0])
    kinds: dict[str, MediaKind] = {"image": "image", "audio": "audio"}
    return kinds.get((guessed or "").partition("/")[0], "video")


def medium_of(name: str | Path, *, is_audio: bool = False) -> Medium:
    """Returns a medium by its URL: a file is read where it is. Raises MediaError."""
    medium = Medium("audio" if is_audio else kind_of(str(name)), str(name))
    return medium if medium.is_url else replace(medium, name=Path(name).resolve().as_uri())
