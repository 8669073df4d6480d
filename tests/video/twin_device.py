"""Stands for a GPU that decodes, on the CPU: it makes NV12 and P010 of libavcodec's frames."""

from __future__ import annotations

import torch
from av.video.frame import VideoFrame

from epd.video.decoding.device import VideoDevice
from epd.video.sources.source import Media, OpenVideo, open_video


def open_here(_device: VideoDevice, media: Media, open_timeout_s: float) -> OpenVideo:
    return open_video(media, open_timeout_s=open_timeout_s)


def planes_here(_device: VideoDevice, frame: VideoFrame) -> tuple[torch.Tensor, torch.Tensor]:
    is_deep = frame.format.components[0].bits > 8
    luma, chroma = frame.reformat(format="p010le" if is_deep else "nv12").planes
    return torch.from_dlpack(luma.__dlpack__()), torch.from_dlpack(chroma.__dlpack__())


def install() -> None:
    """Makes every `VideoDevice` of this process one; a server of media children has its own process."""
    VideoDevice.open = open_here  # type: ignore[method-assign]
    VideoDevice.planes = planes_here  # type: ignore[method-assign]
