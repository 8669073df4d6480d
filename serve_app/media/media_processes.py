"""Owns the child processes of a media worker: some look at media and decode images, others decode videos."""

from __future__ import annotations

import logging
import platform
from dataclasses import replace

from epd.colour import WHITE, Colour
from epd.errors import InfeasibleError
from epd.machine import memory_limit_bytes
from epd.serve_app.media.frame_reader import ChildDecoder, Decoder
from epd.video import ChildLimits, MediaChildren, MediaReader
from epd.video.children.walls import REQUIRED_WALLS, WALLS

logger = logging.getLogger(__name__)

_MIN_CHILDREN, _MAX_CHILDREN = 4, 32
# Of a GPU: each has a context there, of some 500 MB, and decoders for one video at a time.
_CHILDREN_OF_GPU = 2


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
        requires_walls: bool = False,
        device: str = "cpu",
    ) -> None:
        """Starts nothing yet.

        readers: for looking and images; decoders: of videos; by default with the `background` that shows
        through the transparency of pictures
        requires_walls: whether they may not start without `REQUIRED_WALLS`
        device: that decodes videos beside the CPU, such as "cuda", in children that have fewer walls
        """
        self._requires_walls = requires_walls
        self._readers = readers or MediaChildren(background=background)
        self._decoders = decoders or MediaChildren(
            video_child_limits(), decodes_video=True, background=background
        )
        self._of_gpu: MediaChildren | None = None
        if device != "cpu":
            limits = replace(video_child_limits(), max_children=_CHILDREN_OF_GPU)
            self._of_gpu = MediaChildren(limits, decodes_video=True, background=background, device=device)
        self.decoder: Decoder = ChildDecoder(self._decoders, self._of_gpu)

    @property
    def reader(self) -> MediaReader:
        return self._readers

    def start(self) -> None:
        """Starts the servers of both kinds, so that the first medium need not wait for them. Blocks.

        Raises UnavailableError, and InfeasibleError where walls that are required are missing.
        """
        if self._requires_walls and self._of_gpu is not None:
            raise InfeasibleError(
                f"received --video-device {self._of_gpu.device} and --require-media-sandbox; processes that "
                "reach a GPU have no landlock and no seccomp; leave one of the two out"
            )
        self._readers.server.start()
        self._decoders.server.start()
        if self._of_gpu is not None:
            self._of_gpu.server.start()
        missing = [wall for wall in REQUIRED_WALLS if wall not in self.walls]
        if missing and self._requires_walls:
            raise InfeasibleError(
                f"media processes get no {' and no '.join(missing)} from this kernel ({platform.release()}, "
                f"{platform.machine()}); --require-media-sandbox allows none without; use Linux 5.13 or "
                "later on x86_64 or aarch64, in a container that permits both, or leave the option out"
            )
        level = logging.WARNING if missing else logging.INFO
        logger.log(level, "walls around media processes: %s", ", ".join(self.walls) or "none")

    @property
    def walls(self) -> tuple[str, ...]:
        """Returns the walls around all of them; none before the first has started."""
        both = self._readers.server.walls & self._decoders.server.walls
        return tuple(wall for wall in WALLS if wall in both)

    def close(self) -> None:
        """Ends all children."""
        self._readers.close()
        self._decoders.close()
        if self._of_gpu is not None:
            self._of_gpu.close()
