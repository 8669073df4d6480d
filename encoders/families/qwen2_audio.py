"""Adapts Qwen2-Audio: a clip of sound is one unit, which its tower attends within, padded to 30 s.

    samples  | clip ........ | silence to 30 s |     480,000 at 16 kHz
    mel      | F columns     |                 |     one for each 10 ms; its floor is the clip's loudest
    tower    | (F - 1) // 2 + 1 attended to    |     padding is masked
    tokens   | about 25 a second               |

Shapes: M mel bins, F columns of a clip, L columns of the longest one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from epd.chat import ChatMessage
from epd.encoders.adapter import BaseAdapter, Embeddings, PatchRun, TowerMerger
from epd.encoders.checkpoint import Checkpoint
from epd.encoders.device import CPU, to_device
from epd.encoders.plans import AudioSpec, Grid, MediaPlan, PromptPlan, VideoFacts
from epd.encoders.prompt.text_layout import ItemText, Markers, plan_text_prompt
from epd.errors import MediaLimitError, UnsupportedMediaError, UnsupportedModelError
from epd.frame_sampling import FrameSampling
from epd.pixel_limits import OWN_LIMITS, PixelLimits, refuse
from epd.reduction import TowerMerge
from epd.types import MediaKind, ceil_div

_HEARS = "received {} for a model that hears (qwen2_audio); allowed: audio and text; use a model that sees"


@dataclass(frozen=True, slots=True)
class ClipPlan(MediaPlan):
    """Describes a clip of sound. num_samples: of it, at the model's rate."""

    num_samples: int = 0

    @property
    def resized(self) -> tuple[int, int]:
        """Returns (1, samples): what the clip is known by besides its start."""
        return 1, self.num_samples

    @property
    def is_joined_whole(self) -> bool:
        return True


class Qwen2AudioAdapter(BaseAdapter):
    """Adapts `model_type` qwen2_audio."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._extractor = checkpoint.processor.feature_extractor
        self._pad = str(checkpoint.processor.audio_token)
        start, end = checkpoint.processor.audio_bos_token, checkpoint.processor.audio_eos_token
        around = f"Audio {{number}}: {start}{{marker}}{end}\n"
        self._markers = Markers({"audio": self._pad}, {"audio": self._pad}, around)

    @property
    def audio(self) -> AudioSpec:
        return AudioSpec(int(self._extractor.sampling_rate), int(self._extractor.n_samples))

    def plan_audio(self, num_samples: int, start_s: float = 0.0) -> MediaPlan:
        num_columns = ceil_div(num_samples, int(self._extractor.hop_length))
        num_tokens = _num_tokens(num_columns)
        if num_tokens < 1:
            raise MediaLimitError(
                f"a clip of {num_samples} samples at {self.audio.rate} a second is too short for the model; "
                f"allowed: {2 * int(self._extractor.hop_length) + 1} and more; send a longer part"
            )
        return ClipPlan(
            kind="audio",
            size=(1, self.audio.max_samples),
            grid=Grid(1, 1, self._num_positions),
            frames_per_unit=1,
            tokens_per_unit=num_tokens,
            times_s=(start_s,),
            num_samples=num_samples,
        )

    @property
    def _num_positions(self) -> int:
        return int(self.checkpoint.config.audio_config.max_source_positions)

    def check_pixels(self, media: Collection[tuple[MediaKind, PixelLimits]], most: int | None) -> None:  # noqa: ARG002
        for name in (name for _, pixels in media for name in pixels.all_named):
            raise refuse(name, "none, this model family hears and has no limits of pixels")

    def plan_image(self, height: int, width: int, pixels: PixelLimits = OWN_LIMITS) -> MediaPlan:  # noqa: ARG002
        raise UnsupportedMediaError(_HEARS.format("an image"))

    def plan_video(
        self,
        video: VideoFacts,  # noqa: ARG002
        frame_sampling: FrameSampling,  # noqa: ARG002
        pixels: PixelLimits = OWN_LIMITS,  # noqa: ARG002
    ) -> MediaPlan:
        raise UnsupportedMediaError(_HEARS.format("a video") + ", or send its sound alone as audio")

    def plan_chat(self, media: Sequence[MediaPlan], messages: Sequence[ChatMessage]) -> PromptPlan:
        texts = [ItemText(self._pad, (plan.num_tokens,)) for plan in media]
        template = self.checkpoint.chat_template
        return plan_text_prompt(self.checkpoint, template, self._markers, media, texts, messages)

    def resize(self, image: Tensor, plan: MediaPlan) -> Tensor:
        raise NotImplementedError("there are no images to resize: plan_image refuses them")

    def preprocess(self, frames: Tensor, plan: MediaPlan, device: torch.device = CPU) -> Tensor:  # noqa: ARG002
        """Turns a clip, uint8 [1, B], into float32 [1, M + 1, L]: mel bins, and 1 for what is no padding."""
        samples = np.frombuffer(frames.contiguous().numpy().tobytes(), np.float32)
        made = self._extractor(
            samples,
            sampling_rate=self.audio.rate,
            padding="max_length",
            return_attention_mask=True,
            return_tensors="np",
        )
        mask = made["attention_mask"][:, None].astype(np.float32)
        return to_device(torch.from_numpy(np.concatenate([made["input_features"], mask], axis=1)), device)

    def vision_tower(self, model: nn.Module) -> nn.Module:
        return model.get_submodule("model")

    def tower_merger(self, tower: nn.Module, merge: TowerMerge) -> TowerMerger:  # noqa: ARG002
        raise UnsupportedModelError(
            "received tower_share for a qwen2_audio model; allowed: models that see; leave tower_share out"
        )

    def encode_batch(self, tower: nn.Module, runs: Sequence[PatchRun]) -> list[Embeddings]:
        model: Any = tower
        values = torch.cat([run.values for run in runs])
        features, is_heard = values[:, :-1], values[:, -1] > 0
        num_columns = is_heard.sum(1)
        is_key = (
            torch.arange(self._num_positions, device=values.device) < ((num_columns - 1) // 2 + 1)[:, None]
        )
        mask = is_key[:, None, None].expand(-1, 1, self._num_positions, -1)
        hidden = model.audio_tower(features, attention_mask=mask).last_hidden_state
        rows = model.multi_modal_projector(hidden)
        return [
            Embeddings(each[:run_tokens])
            for each, run_tokens in zip(rows, map(_num_tokens, num_columns.tolist()), strict=True)
        ]


def _num_tokens(num_columns: int) -> int:
    """Counts the tokens of a clip: two convolutions leave half of its columns, pooling a half of these."""
    return ((num_columns - 1) // 2 + 1 - 2) // 2 + 1
