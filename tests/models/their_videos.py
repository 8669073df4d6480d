"""What transformers' own processor of a checkpoint makes of a video or image, without a pixel of it.

It samples and resizes itself; frames are tensors that have a shape and no memory.
"""

from __future__ import annotations

from typing import Any

import torch

import tests.encoders.tiny_tiles  # noqa: F401 # has SmolVLM's processor do without num2words
from epd.encoders import VideoFacts
from epd.encoders.sampling import DEFAULT_FPS, source_metadata

# Tokens of a frame that has one size, by what decides it.
_LLAVA_POOLED = 14 * 14


def their_frames(processor: Any, facts: VideoFacts) -> int:
    """How many frames it samples, at two a second where its files name no rate."""
    processor = processor.video_processor
    chosen = {"num_frames": processor.num_frames} if processor.num_frames else {}
    if "SmolVLM" in type(processor).__name__ or not chosen:
        chosen["fps"] = processor.fps or DEFAULT_FPS
    return len(processor.sample_frames(source_metadata(facts), **chosen))


def their_video(processor: Any, facts: VideoFacts, **call: Any) -> tuple[int, int]:
    """(frames, tokens) of the whole video. call: arguments of the processor's call."""
    num_frames = their_frames(processor, facts)
    name = type(processor.video_processor).__name__
    if name.startswith("Qwen"):
        return num_frames, _qwen_tokens(processor.video_processor, facts, num_frames, call)
    if name.startswith("Llava"):
        return num_frames, num_frames * _LLAVA_POOLED + 1
    each = processor.image_seq_length if name.startswith("Intern") else processor.image_seq_len
    return num_frames, num_frames * int(each)


def _qwen_tokens(processor: Any, facts: VideoFacts, num_frames: int, call: dict[str, Any]) -> int:
    frames = torch.empty(1, num_frames, 3, facts.height, facts.width, dtype=torch.uint8, device="meta")
    factor = processor.patch_size * processor.merge_size
    size = type(processor.size)(**(call.get("size") or dict(processor.size)))
    resized = processor.resize(
        frames,
        size=size,
        resample=processor.resample,
        factor=factor,
        temporal_factor=processor.temporal_patch_size,
        cap_pixels_per_frame=call.get("cap_pixels_per_frame", False),
    )
    num_units = -(-num_frames // processor.temporal_patch_size)
    return num_units * (resized.shape[-2] // factor) * (resized.shape[-1] // factor)
