"""Owns the child processes of a media worker: some look at media and decode images, others decode videos."""

from __future__ import annotations

from dataclasses import replace

from epd.colour import WHITE, Colour
from epd.machine import memory_limit_bytes
from epd.serve_app.media.frame_reader import Decoder, child_decoder
from epd.video import ChildLimits, MediaChildren, MediaReader

_MIN_CHILDREN, _MAX_CHILDREN = 4, 32


def video_child_limits() -> ChildLimits:
    """Returns the default limits, with as many children as fit in a quarter of the machine's memory."""
    limits = ChildLimits()
    num_children = memory_limit_bytes() // 4 // limits.memory_bytes
    return replace(limits, max_children=min(max(num_children, _MIN_CHILDREN), _MAX_CHILDREN))


class MediaProcesses:
    """Owns children of both kinds, which several media workers of this process may share.

    Probing a medium never waits for a child that decodes a video.
    """

    def __init__(
        self,
        readers: MediaChildren | None = None,
        decoders: MediaChildren | None = None,
        *,
        background: Colour = WHITE,
    ) -> None:
        """Starts nothing yet.

        readers: for looking and images; decoders: of videos; by default with the `background` that shows
        through the transparency of pictures
        """
        self._readers = readers or MediaChildren(background=background)
        self._decoders = decoders or MediaChildren(
            video_child_limits(), decodes_video=True, background=background
        )

    @property
    def reader(self) -> MediaReader:
        return self._readers

    @property
    def decoder(self) -> Decoder:
        return child_decoder(self._decoders)

    def start(self) -> None:
        """Starts the servers of both kinds, so that the first medium need not wait for them. Blocks."""
        self._readers.server.start()
        self._decoders.server.start()

    def close(self) -> None:
        """Ends all children."""
        self._readers.close()
        self._decoders.close()
