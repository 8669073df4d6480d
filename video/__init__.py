"""Exact, parallel, streaming video decoding that does no work it need not do.

The frame at time t is the one on screen then: the last with pts <= t, or the first frame for any earlier t.
In AVI, which has no presentation times, frame n in order of display begins at n / rate, counted from 0.
"""

from epd.types import FrameGroup, Frames
from video.child_stream import ChildStream
from video.children import ChildLimits, MediaChildren
from video.data_uri import read_data_uri
from video.download import Download
from video.fetch import fetch
from video.images import load_image, media_kind
from video.info import VideoInfo
from video.limits import Limits
from video.local_files import FileIdentity, OpenFile, allowed_file, open_allowed, open_file
from video.look import MediaFacts, look
from video.policy import FetchPolicy, Sink
from video.probe import probe
from video.reading import MediaReader, OwnReader
from video.reference import reference_decode
from video.sampling import sample_times
from video.source import Media
from video.stream import GroupStream, decode, stream

__all__ = [
    "ChildLimits",
    "ChildStream",
    "Download",
    "FetchPolicy",
    "FileIdentity",
    "FrameGroup",
    "Frames",
    "GroupStream",
    "Limits",
    "Media",
    "MediaChildren",
    "MediaFacts",
    "MediaReader",
    "OpenFile",
    "OwnReader",
    "Sink",
    "VideoInfo",
    "allowed_file",
    "decode",
    "fetch",
    "load_image",
    "look",
    "media_kind",
    "open_allowed",
    "open_file",
    "probe",
    "read_data_uri",
    "reference_decode",
    "sample_times",
    "stream",
]
