"""Decodes videos exactly, in parallel and as a stream, and does no work that is not needed; images and sound.

The frame at time t is the one on screen then: the last with pts <= t, or the first frame for any earlier t.
In AVI, which has no presentation times, frame n in order of display begins at n / rate, counted from 0.
"""

from epd.types import FrameGroup, Frames, MediaFacts
from epd.video.children.children import ChildLimits, MediaChildren
from epd.video.children.stream import ChildStream
from epd.video.containers.audio import AudioSlice, load_audio
from epd.video.containers.images import load_image, media_kind
from epd.video.containers.info import VideoInfo
from epd.video.containers.limits import Limits
from epd.video.containers.look import MediaReader, OwnReader, look
from epd.video.containers.probe import probe
from epd.video.decoding.device import VideoDevice
from epd.video.decoding.stream import GroupStream, decode, stream
from epd.video.sampling import sample_times
from epd.video.sources.data_uri import read_data_uri
from epd.video.sources.download import Download, fetch
from epd.video.sources.local_files import FileIdentity, OpenFile, allowed_file, open_allowed, open_file
from epd.video.sources.policy import FetchPolicy, Sink
from epd.video.sources.source import Media

__all__ = [
    "AudioSlice",
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
    "VideoDevice",
    "VideoInfo",
    "allowed_file",
    "decode",
    "fetch",
    "load_audio",
    "load_image",
    "look",
    "media_kind",
    "open_allowed",
    "open_file",
    "probe",
    "read_data_uri",
    "sample_times",
    "stream",
]
