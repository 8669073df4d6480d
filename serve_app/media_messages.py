"""Defines the messages to media workers.

    FetchMedia, then for images and sound PlanImages and ReadImage, for videos ReadFrames and CloseStream,
    before them CompressVideo where pixels decide which tokens there are; ReleaseMedia. ReadPicture for
    people who want to see what it is
    ReadFile at one worker and StoreFile at another give the second what the first has

A hold keeps the media of one request. Ids of holds and streams begin with their owner, as those of attempts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from epd.encoders import MediaPlan
from epd.errors import UnavailableError
from epd.serve_app.messages import Message
from epd.serve_app.service import FetchedItem, HeldItem, MediaReference
from epd.types import MediaKind

FILE_CHUNK_BYTES = 4 << 20


class NotHeldError(UnavailableError):
    """Raised by a media worker for media that it does not keep, or not any more."""


@dataclass(frozen=True, slots=True)
class FetchMedia(Message[tuple[FetchedItem, ...]]):
    """Asks for the media of a request to be fetched, checked and kept until `ReleaseMedia`.

    hold: a new id, unique among all holds of the fleet, by which the media are named afterwards
    """

    hold: str
    references: tuple[MediaReference, ...]


@dataclass(frozen=True, slots=True)
class PlanImages(Message[tuple[MediaPlan, ...]]):
    """Asks for images to be decoded, resized to their planned sizes and kept with their hold, and for clips.

    items: numbers of the images and clips among the references of the hold
    """

    hold: str
    items: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CompressVideo(Message[MediaPlan]):
    """Asks for the plan of a video to be completed by its frames, which are decoded once for that."""

    source: HeldItem
    plan: MediaPlan


@dataclass(frozen=True, slots=True)
class ReadImage(Message[int]):
    """Asks for units [start, stop) of a planned image, the bulk of the reply: uint8 [N, h, w, 3].

    Of a clip of sound, the bytes of its samples, uint8 [1, B].

    The reply is the number of frames that show a neighbour, as for `ReadFrames`: 0.
    """

    source: HeldItem
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class ReadPicture(Message[int]):
    """Asks for a small picture of an image, or of a video's first frame: the reply's bulk, a JPEG, uint8 [N].

    The reply is the number of its bytes.

    max_side: of the picture, pixels
    """

    source: HeldItem
    max_side: int


@dataclass(frozen=True, slots=True)
class ReadFile(Message[int]):
    """Asks for the bytes of a medium from `start`, at most FILE_CHUNK_BYTES: the reply's bulk, uint8 [N].

    The reply is the number of bytes of the whole file.
    """

    source: HeldItem
    start: int


@dataclass(frozen=True, slots=True)
class StoreFile(Message[FetchedItem | None]):
    """Gives a medium to one more media worker, chunk by chunk: the bytes from `start` are the bulk.

    The reply, once all `num_bytes` are there, is what the worker found out about it, as for `FetchMedia`.

    hold: a new id; the medium is its item 0
    """

    hold: str
    kind: MediaKind
    label: str
    num_bytes: int
    start: int


@dataclass(frozen=True, slots=True)
class ReleaseMedia(Message[None]):
    """Drops a hold with its files, images and streams, or the fetch for it. May come before the fetch."""

    hold: str


@dataclass(frozen=True, slots=True)
class DecodeOrder:
    """A video and the frames of it that a stream gives, in groups.

    times_s: of all frames, in order
    group_sizes: frames of each group
    size: (height, width) of the frames
    """

    source: HeldItem
    times_s: tuple[float, ...]
    group_sizes: tuple[int, ...]
    size: tuple[int, int]

    def groups(self, start: int, stop: int | None = None) -> DecodeOrder:
        """Returns an order for groups [start, stop), by default to the end."""
        sizes = self.group_sizes[start:stop]
        first = sum(self.group_sizes[:start])
        return replace(self, times_s=self.times_s[first : first + sum(sizes)], group_sizes=sizes)


@dataclass(frozen=True, slots=True)
class ReadFrames(Message[int]):
    """Asks for the frames of one group, which is the bulk of the reply: uint8 [N, h, w, 3].

    The reply is the number of them that could not be decoded and show a neighbour.

    stream_id: one for each item of a request; asked in order, frames are decoded ahead.
    index: the group that is wanted.
    order: what the stream is; None in all messages but the first.
    """

    stream_id: str
    index: int
    order: DecodeOrder | None = None


@dataclass(frozen=True, slots=True)
class CloseStream(Message[None]):
    """Closes a stream whose frames are no longer needed. Unknown streams are ignored."""

    stream_id: str
