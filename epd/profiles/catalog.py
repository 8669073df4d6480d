"""Lists devices and models that profiles can be computed for, as their makers describe them.

Sources: NVIDIA's data sheets (dense BF16, no sparsity); the config.json of each model.
"""

from __future__ import annotations

from dataclasses import dataclass

from epd.errors import RequestError
from epd.profiles.media import MediaRule


@dataclass(frozen=True, slots=True)
class Device:
    """Describes a device.

    flops_per_s: dense 16 bit
    link: between devices of one machine
    price_per_hour: US dollars, on demand, typical of clouds; an assumption, to be replaced
    """

    name: str
    flops_per_s: float
    memory_bytes: int
    memory_bytes_per_s: float
    link_bytes_per_s: float
    price_per_hour: float


@dataclass(frozen=True, slots=True)
class Transformer:
    """Describes a stack of layers.

    mlp_matrices: 3 if gated
    attended: tokens one attends to in a tower
    is_in_place: queries and keys are rotated, and gates multiplied, where they are
    """

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_hidden: int
    mlp_matrices: int = 3
    vocabulary: int = 0
    attended: int = 0
    is_in_place: bool = False

    @property
    def num_parameters(self) -> int:
        """Counts parameters of the layers and, if there is a vocabulary, its two matrices."""
        attention = self.hidden * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        mlp = self.mlp_matrices * self.hidden * self.mlp_hidden
        return self.num_layers * (attention + mlp) + 2 * self.vocabulary * self.hidden

    @property
    def flops_per_token(self) -> float:
        """Counts the FLOPs of matrix products with weights, and of attention over `attended` tokens."""
        weights = self.num_parameters - self.vocabulary * self.hidden
        return 2.0 * weights + self.attended * self.flops_per_pair

    @property
    def flops_per_pair(self) -> float:
        """Counts the FLOPs of attention of a token to another: score and weighted sum, in all layers."""
        return 4.0 * self.num_layers * self.num_heads * self.head_dim

    @property
    def kv_values_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def live_values_per_token(self) -> int:
        """Counts 16-bit values of a token that a layer holds at once, at its widest; no scores of attention.

        MLP: the residual, its norm, and the output of each matrix but the last beside the activation's.
        Attention: the residual, its norm, queries, keys and values, and those that are rotated. In place:
        what the layer was given too; two of the MLP's width; queries, keys and values, and the attended rows
        twice. Measured for Qwen2.5-VL (`stages/peak_memory.py`): 6 % more, its tower 3 %.
        """
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = 3 * queries + 2 * keys
        if self.is_in_place:
            return 3 * self.hidden + max(2 * self.mlp_hidden, attention)
        return 2 * self.hidden + max(self.mlp_matrices * self.mlp_hidden, attention + keys)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Describes a vision-language model. embeddings_per_token: 1, and one more for each deepstack feature."""

    name: str
    vision: Transformer
    language: Transformer
    media: MediaRule
    embeddings_per_token: int = 1


_GB, _TB = 10**9, 10**12
DEVICES = {
    device.name: device
    for device in (
        Device("a100-80gb", 312 * _TB, 80 * _GB, 2.039 * _TB, 300 * _GB, 1.8),
        Device("h100", 989 * _TB, 80 * _GB, 3.35 * _TB, 450 * _GB, 3.0),
        Device("h200", 989 * _TB, 141 * _GB, 4.8 * _TB, 450 * _GB, 3.8),
    )
}

_QWEN2_7B = Transformer(28, 3584, 28, 4, 128, 18944, vocabulary=152064)
_SIGLIP_400M = Transformer(27, 1152, 16, 16, 72, 4304, mlp_matrices=2, attended=1024)
_INTERNVIT_300M = Transformer(24, 1024, 16, 16, 64, 4096, mlp_matrices=2, attended=1025)
_INTERNVIT_6B = Transformer(45, 3200, 25, 25, 128, 12800, mlp_matrices=2, attended=1025)
_WHISPER_SMALL = Transformer(12, 768, 12, 12, 64, 3072, mlp_matrices=2, attended=1500)
_QWEN25_VISION = Transformer(32, 1280, 16, 16, 80, 3420, attended=128, is_in_place=True)
_QWEN3_VISION = Transformer(27, 1152, 16, 16, 72, 4304, mlp_matrices=2, attended=1024, is_in_place=True)
_MINICPM_MEDIA = MediaRule("tiles", 14, tile_tokens=64, max_tiles=9)
# A clip of sound is a tile: 30 s of it, eight positions of the encoder in a token.
_ULTRAVOX_MEDIA = MediaRule("tiles", 1, tile_patches=1500, tile_tokens=188, max_tiles=1)
# As `epd.pixel_settings` and the models' files have it: all frames of Qwen3-VL are 24,576 * 32 * 32 pixels.
_QWEN25_MEDIA = MediaRule("grid", 14, max_video_tokens=24_576)
_QWEN3_MEDIA = MediaRule(
    "grid", 16, max_pixels=16_777_216, max_frame_pixels=768 * 32 * 32, max_video_tokens=12_288
)
_INTERNVL_MEDIA = MediaRule("tiles", 14, tile_tokens=256, max_tiles=12)

MODELS = {
    model.name: model
    for model in (
        ModelShape("minicpm-v-2.6", _SIGLIP_400M, _QWEN2_7B, _MINICPM_MEDIA),
        ModelShape(
            "internvl2-8b",
            _INTERNVIT_300M,
            Transformer(32, 4096, 32, 8, 128, 14336, vocabulary=92553),
            _INTERNVL_MEDIA,
        ),
        ModelShape(
            "internvl2-26b",
            _INTERNVIT_6B,
            Transformer(48, 6144, 48, 8, 128, 16384, vocabulary=92553),
            _INTERNVL_MEDIA,
        ),
        ModelShape(
            "ultravox-v0.3",
            _WHISPER_SMALL,
            Transformer(32, 4096, 32, 8, 128, 14336, vocabulary=128256),
            _ULTRAVOX_MEDIA,
        ),
        ModelShape("qwen2.5-vl-7b", _QWEN25_VISION, _QWEN2_7B, _QWEN25_MEDIA),
        ModelShape(
            "qwen3-vl-4b",
            Transformer(24, 1024, 16, 16, 64, 4096, mlp_matrices=2, attended=1024, is_in_place=True),
            Transformer(36, 2560, 32, 8, 128, 9728, vocabulary=151936),
            _QWEN3_MEDIA,
            embeddings_per_token=4,
        ),
        ModelShape(
            "qwen3-vl-8b",
            _QWEN3_VISION,
            Transformer(36, 4096, 32, 8, 128, 12288, vocabulary=151936),
            _QWEN3_MEDIA,
            embeddings_per_token=4,
        ),
    )
}


def device_named(name: str) -> Device:
    """Returns a device by name. Raises RequestError for one outside the catalogue."""
    if name not in DEVICES:
        raise RequestError(
            f"device is {name!r}; known are {', '.join(DEVICES)}; measure others with epd profile"
        )
    return DEVICES[name]


def model_named(name: str) -> ModelShape:
    """Returns a model by name. Raises RequestError for one outside the catalogue."""
    if name not in MODELS:
        raise RequestError(
            f"model is {name!r}; known are {', '.join(MODELS)}; measure others with epd profile"
        )
    return MODELS[name]
