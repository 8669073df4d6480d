"""Exact, parallel, streaming video decoding that does no work it need not do.

The frame at time t is the one on screen then: the last with pts <= t, or the first frame for any earlier t.
"""

from epd.types import FrameGroup, Frames
from video.fetch import FetchPolicy, fetch
from video.images import load_image, media_kind
from video.info import VideoInfo
from video.limits import Limits
from video.local_files import allowed_file
from video.look import MediaFacts, look
from video.probe import probe
from video.reference import reference_decode
from video.sampling import sample_times
from video.source import Media
from video.stream import GroupStream, decode, stream

__all__ = [
    "FetchPolicy",
    "FrameGroup",
    "Frames",
    "GroupStream",
    "Limits",
    "Media",
    "MediaFacts",
    "VideoInfo",
    "allowed_file",
    "decode",
    "fetch",
    "load_image",
    "look",
    "media_kind",
    "probe",
    "reference_decode",
    "sample_times",
    "stream",
]
