"""Reads what the processor's files of a checkpoint say of how its media are sized and sampled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from epd.errors import RequestError
from epd.profiles.media import MediaRule

Config = Mapping[str, Any]
# What processors that cap frames hold a video and a frame to, where their file does not say.
_FILE_VIDEO_TOKENS, _FILE_SHARE, _FILE_FRAME_TOKENS = 128_000, 0.9, 768
# The processor of GLM-4.6V, and the text around its frames, their times and marks, about.
_BY_LENGTH, GLM46V_FRAME_TEXT = "Glm46VVideoProcessor", 3


def with_files(rule: MediaRule, folder: Path) -> MediaRule:
    """Returns the rule with what the processor's files of a folder say, those for videos last."""
    image, video = _settings(folder)
    if rule.kind == "crops":
        return replace(
            rule,
            max_tiles=int(image.get("max_crops") or rule.max_tiles),
            overlap=sum(image.get("overlap_margins") or (rule.overlap,)),
            max_frames=int(video.get("num_frames") or rule.max_frames),
            video_fps=float(video.get("max_fps") or rule.video_fps),
        )
    if rule.kind == "slices":
        scale = int(image.get("scale_resolution") or 448)
        return replace(
            rule,
            tile_patches=(scale // rule.patch) ** 2,
            max_tiles=_num_slices(image, rule),
            max_frame_tiles=_num_slices(video, rule),
            max_frames=int(video.get("max_num_frames") or rule.max_frames),
        )
    if rule.kind == "pooled":
        return replace(
            rule,
            tile_tokens=int(image.get("max_soft_tokens") or rule.tile_tokens),
            frame_tokens=int(video.get("max_soft_tokens") or rule.frame_tokens or 0),
            num_frames=video.get("num_frames") or rule.num_frames,
        )
    if rule.sampling == "pairs" and video.get("video_processor_type") == _BY_LENGTH:
        rule = replace(rule, sampling="length", frame_text_tokens=GLM46V_FRAME_TEXT)
    least, most = _sizes(image, (rule.min_pixels, rule.max_pixels))
    frame_least, frame_most = _sizes(video, (rule.min_frame_pixels, rule.max_frame_pixels))
    rule = replace(
        rule,
        min_pixels=least,
        max_pixels=most,
        min_frame_pixels=frame_least if rule.is_timed or rule.has_frame_patches else least,
        video_fps=float(video.get("fps") or rule.video_fps),
        min_frames=int(video.get("min_frames") or rule.min_frames),
        max_frames=int(video.get("max_frames") or rule.max_frames),
        num_frames=video.get("num_frames") or rule.num_frames,
        max_seconds=video.get("max_duration") or rule.max_seconds,
    )
    if rule.has_frame_patches:
        return replace(rule, max_frame_pixels=frame_most)
    if rule.image_merge is not None:
        most = _sizes(video, (0, 768 * 28**2))[1]
        return replace(
            rule, min_frame_pixels=frame_least, max_video_tokens=most // (rule.patch * rule.merge) ** 2
        )
    return _of_all_frames(rule, video) if rule.is_timed else _of_each_frame(rule, video)


def _num_slices(processor: Config, rule: MediaRule) -> int:
    """Returns the most slices of a picture; one stands for none."""
    return int(processor.get("max_slice_nums") or rule.max_tiles) if processor.get("slice_mode", True) else 1


def _settings(folder: Path) -> tuple[Config, Config]:
    """Returns what the processor's files of a folder say of images, and of videos."""
    whole, images, videos = (
        read_object(folder / name) if (folder / name).exists() else {}
        for name in ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
    )
    image = {**images, **whole.get("image_processor", {})}
    return image, {**images, **videos, **whole.get("video_processor", {})}


def _of_each_frame(rule: MediaRule, video: Config) -> MediaRule:
    """Returns the rule of Qwen2.5-VL, whose file limits each frame, and may cap it or leave the caps out."""
    _, most = _sizes(video, (0, rule.max_pixels))
    if "cap_pixels_per_frame" not in video:
        return replace(rule, max_frame_pixels=min(most, rule.max_frame_pixels))
    tokens = int(video.get("max_video_tokens", _FILE_VIDEO_TOKENS) * _FILE_SHARE)
    is_capped = video["cap_pixels_per_frame"]
    return replace(rule, max_frame_pixels=most, max_video_tokens=tokens if is_capped else None)


def _of_all_frames(rule: MediaRule, video: Config) -> MediaRule:
    """Returns the rule of Qwen3-VL, whose file limits all frames together, and may cap each."""
    side = rule.patch * rule.merge
    _, most = _sizes(video, (0, 0))
    if most:
        rule = replace(rule, max_video_tokens=most // (side**2 * rule.frames_per_unit))
    if "cap_pixels_per_frame" not in video:
        return rule
    tokens = video.get("max_video_tokens", _FILE_FRAME_TOKENS)
    return replace(rule, max_frame_pixels=tokens * side**2 if video["cap_pixels_per_frame"] else most)


def _sizes(processor: Config, default: tuple[int, int]) -> tuple[int, int]:
    """Returns the least and the most pixels that a processor's file names."""
    size = processor.get("size") or {}
    least = size.get("shortest_edge") or processor.get("min_pixels") or default[0]
    return int(least), int(size.get("longest_edge") or processor.get("max_pixels") or default[1])


def read_object(file: Path) -> Config:
    """Reads an object. Raises RequestError for anything else."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:120]
        raise RequestError(
            f"{str(file)!r} cannot be read: {reason}; give a folder with a config.json, or that file"
        ) from None
    if not isinstance(found, dict):
        raise RequestError(f"{str(file)!r} holds a {type(found).__name__}; allowed: a JSON object")
    return found
