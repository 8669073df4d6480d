"""The truth for the pipeline: transformers' own processor, fed every frame of each video, and `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.video_utils import VideoMetadata

from epd import video
from epd.encoders import FrameSampling
from tests.colocated import ColocatedPipeline
from tests.positions import has_authors_layout, skip_where_seconds_are_cut, trained_positions_in
from tests.video.plain_decoder import reference_decode

MAX_TOKENS = 24
DEFAULT_SAMPLING = FrameSampling()


@dataclass(frozen=True, slots=True)
class Subject:
    """One checkpoint under test, ours and theirs."""

    name: str
    path: Path
    pipeline: ColocatedPipeline
    model: Any
    processor: Any


def processor_inputs(
    processor: Any,
    media: Sequence[Path],
    question: str,
    sampling: FrameSampling = DEFAULT_SAMPLING,
    **more: Any,
) -> Any:
    """What the processor makes of the media: it samples, resizes, normalises and lays out by itself.

    more: further arguments of its call.
    """
    kinds = [video.media_kind(path) for path in media]
    content = [*({"type": kind} for kind in kinds), {"type": "text", "text": question}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    images = [video.load_image(path) for path, kind in zip(media, kinds, strict=True) if kind == "image"]
    clips = [_all_frames(path) for path, kind in zip(media, kinds, strict=True) if kind == "video"]
    options: dict[str, Any] = {"images": images} if images else {}
    options |= more
    if clips:
        options |= {
            "videos": [frames for frames, _ in clips],
            "video_metadata": [metadata for _, metadata in clips],
            "do_sample_frames": True,
            "fps": sampling.fps or (None if sampling.num_frames else processor.video_processor.fps),
            "num_frames": sampling.num_frames,
        }
    return processor(text=[text], return_tensors="pt", **options)


def generated(model: Any, inputs: Any, **settings: Any) -> tuple[int, ...]:
    """Greedy tokens of `model.generate`, up to and with the one that ends the answer.

    At the positions that the checkpoint was trained with; skips the test where the release cuts seconds.
    """
    if not has_authors_layout(model):
        skip_where_seconds_are_cut(model, inputs)
    with trained_positions_in(model):
        return generated_as_it_is(model, inputs, **settings)


def generated_as_it_is(model: Any, inputs: Any, **settings: Any) -> tuple[int, ...]:
    """The same at the positions that the installed transformers has."""
    with torch.inference_mode():
        sequences = model.generate(**inputs, max_new_tokens=MAX_TOKENS, do_sample=False, **settings)
    return tuple(sequences[0, inputs["input_ids"].shape[1] :].tolist())


def gap_to_best(model: Any, inputs: Any, tokens: Sequence[int]) -> float:
    """How far the logits of an answer's tokens are below the best ones at their places, of the largest logit.

    The model reads the answer as it stands: 0 if `generate` would give the same tokens.
    """
    read = dict(inputs)
    answer = torch.tensor([tokens])
    read["input_ids"] = torch.cat([inputs["input_ids"], answer], 1)
    read["attention_mask"] = torch.ones_like(read["input_ids"])
    if "mm_token_type_ids" in inputs:
        read["mm_token_type_ids"] = torch.cat([inputs["mm_token_type_ids"], torch.zeros_like(answer)], 1)
    with torch.inference_mode(), trained_positions_in(model):
        logits = model(**read).logits[0, -len(tokens) - 1 : -1]
    chosen = logits.gather(1, answer.t())[:, 0]
    return float((logits.amax(-1) - chosen).max() / logits.abs().max())


def _all_frames(path: Path) -> tuple[torch.Tensor, VideoMetadata]:
    """Every frame of a video, uint8 [T, 3, H, W] at its own size, and what a decoder would say of it."""
    info = video.probe(path)
    times_s = [(index + 0.5) / info.fps for index in range(info.num_frames)]
    frames = torch.from_numpy(reference_decode(path, times_s).data).permute(0, 3, 1, 2)
    metadata = VideoMetadata(
        total_num_frames=info.num_frames,
        fps=info.fps,
        width=info.width,
        height=info.height,
        duration=info.duration_s,
    )
    return frames, metadata
