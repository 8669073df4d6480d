"""Lists the model families that load, who computes each, and those that are refused.

`epd models` and docs/models.md show these tables. Tests prove each row with a tiny checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from epd.types import MediaKind

FamilyImpl = Literal["native", "transformers"]
_SEES: tuple[MediaKind, ...] = ("image", "video")


@dataclass(frozen=True, slots=True)
class Family:
    """Describes a family by its `model_type`.

    name: of its best known checkpoints.
    impl: native for an adapter of this project, transformers for its own processor and tower.
    takes: kinds of media.
    frames_per_unit: that a video is cut into; None for no videos.
    limit: what it cannot do here, for people.
    """

    model_type: str
    name: str
    impl: FamilyImpl
    takes: tuple[MediaKind, ...] = _SEES
    frames_per_unit: int | None = None
    limit: str = ""

    def __post_init__(self) -> None:
        if ("video" in self.takes) != (self.frames_per_unit is not None):
            raise ValueError(f"{self.model_type} needs frames_per_unit if it takes videos, and only then")


def _native(model_type: str, name: str, unit: int, limit: str = "") -> Family:
    return Family(model_type, name, "native", _SEES, unit, limit)


def _images(model_type: str, name: str, limit: str = "") -> Family:
    return Family(model_type, name, "transformers", ("image",), None, limit)


def _videos(model_type: str, name: str, unit: int, limit: str = "") -> Family:
    return Family(model_type, name, "transformers", _SEES, unit, limit)


_UNSCALED = "logit_scale is left out, which acts as a lower temperature"

_ALL = (
    _images("aria", "Aria"),
    _images("aya_vision", "Aya Vision", _UNSCALED),
    _images("cohere2_vision", "Command A Vision", _UNSCALED),
    _images("deepseek_vl", "DeepSeek-VL"),
    _native("ernie4_5_vl_moe", "ERNIE 4.5 VL", 2),
    _videos("exaone4_5", "EXAONE 4.5", 2),
    Family("gemma3", "Gemma 3", "native", ("image",), None, "no videos: its processor has none"),
    _native("gemma4", "Gemma 4", 1, "no sound"),
    _native("glm46v", "GLM-4.6V", 2),
    _native("glm4v", "GLM-4.1V", 2),
    _native("glm4v_moe", "GLM-4.5V", 2),
    _native("glm_ocr", "GLM-OCR", 2),
    _videos("hyperclovax_vision_v2", "HyperCLOVA X Vision", 2),
    _images("idefics3", "Idefics3, SmolVLM"),
    _native("internvl", "InternVL3, 3.5", 1),
    _images("lighton_ocr", "LightOnOCR"),
    _images("llava", "LLaVA-1.5"),
    _images("llava_next", "LLaVA-NeXT (1.6)"),
    _videos("llava_next_video", "LLaVA-NeXT-Video", 1),
    _native("llava_onevision", "LLaVA-OneVision", 1),
    _native("minicpmv4_6", "MiniCPM-V 4.6", 1),
    _native("minicpmv4_7", "MiniCPM-V 4.7", 1),
    _videos(
        "molmo2",
        "Molmo 2",
        1,
        "what lies from the first to the last medium of a prompt is computed at once, and shared whole",
    ),
    _images("mistral3", "Mistral Small 3.1"),
    _images("paddleocr_vl", "PaddleOCR-VL"),
    _native("qwen2_5_vl", "Qwen2.5-VL, Qwen2.5-Omni", 2),
    Family("qwen2_audio", "Qwen2-Audio", "native", ("audio",)),
    _native("qwen2_vl", "Qwen2-VL", 2),
    _native("qwen3_5", "Qwen3.5", 2),
    _native("qwen3_5_moe", "Qwen3.5 and 3.6 with experts", 2),
    _native("qwen3_vl", "Qwen3-VL", 2),
    _native("qwen3_vl_moe", "Qwen3-VL with experts", 2),
    _native("smolvlm", "SmolVLM2", 1),
    _native("video_llama_3", "VideoLLaMA3", 1),
    _videos("video_llava", "Video-LLaVA", 1),
    _images("vipllava", "ViP-LLaVA"),
)
FAMILIES: Mapping[str, Family] = {family.model_type: family for family in _ALL}
# Families that would load and answer wrongly, and why.
REFUSED: Mapping[str, str] = {
    "gemma3n": "whose images are attended in both directions",
    "granite4_vision": "whose tower gives features for later layers (deepstack)",
    "kimi_k25": "whose language model has latent attention (MLA)",
    "mllama": "whose text attends images in layers of their own",
    "ovis2": "whose tower embeds tokens of the text too",
    "paligemma": "whose prompt is attended in both directions",
}
