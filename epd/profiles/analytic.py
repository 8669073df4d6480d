"""Computes profiles of devices that are not at hand from FLOPs, bytes and stated efficiencies.

`DEVICES` and `MODELS` list what they can be computed for, as their makers describe it.
"""

from __future__ import annotations

from dataclasses import dataclass

from epd.errors import RequestError
from epd.profiles.cost import StageCost, StageTable, ValidRange
from epd.profiles.media import MediaRule
from epd.profiles.memory import MemoryNeeds
from epd.profiles.parallel import ParallelStack, ShardedModel
from epd.profiles.profile import Profile

_BYTES_PER_VALUE, _BYTES_PER_LOGIT = 2, 4
# Context of the device and workspaces of matrix products: an assumption.
_RUNTIME_BYTES = 10**9
_MAX_CONTEXT = 131_072


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


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Sets the shares of the data sheet that are reached, and overheads in seconds.

    compute: of FLOPs in large matrix products
    memory: of bandwidth while weights or keys are read
    link: of bandwidth between devices
    launch_s: of one pass of the language model
    call_s: of one call of the tower
    transfer_s: of one transfer
    reduce_s: of one all-reduce between devices that share layers
    pixels_per_s: decoded by a CPU thread from H.264
    image_pixels_per_s: the same from JPEG
    """

    compute: float = 0.5
    memory: float = 0.7
    link: float = 0.6
    launch_s: float = 0.002
    call_s: float = 0.003
    transfer_s: float = 0.001
    reduce_s: float = 15e-6
    pixels_per_s: float = 1.5e8
    image_pixels_per_s: float = 6e7

    def __post_init__(self) -> None:
        if not all(0 < share <= 1 for share in (self.compute, self.memory, self.link)):
            raise ValueError(f"efficiencies are shares, above 0 and at most 1, got {self}")


def analytic_profile(device: str, model: str, efficiency: Efficiency | None = None) -> Profile:
    """Returns a profile marked as analytic. Raises RequestError for names outside the catalogue."""
    efficiency = efficiency or Efficiency()
    on, of = device_named(device), model_named(model)
    return Profile(
        name=f"{of.name}@{on.name}",
        model=of.name,
        device=on.name,
        is_analytic=True,
        media=of.media,
        memory=_memory(on, of),
        encode=_encode(on, of, efficiency),
        prefill=_prefill(on, of, efficiency),
        decode=_decode(on, of, efficiency),
        transfer=_transfer(on, efficiency),
        video={"h264": _per_pixel(1 / efficiency.pixels_per_s, "source pixels", "frames")},
        images=_per_pixel(1 / efficiency.image_pixels_per_s, "pixels", "images"),
        price_per_hour=on.price_per_hour,
        assumptions=_assumptions(efficiency),
        parallel=_parallel(on, of, efficiency),
    )


def _parallel(on: Device, of: ModelShape, efficiency: Efficiency) -> ShardedModel:
    vision, language = (
        ParallelStack(each.num_layers, each.hidden, each.num_heads, each.num_kv_heads)
        for each in (of.vision, of.language)
    )
    link_bytes_per_s = on.link_bytes_per_s * efficiency.link
    return ShardedModel(vision, language, _BYTES_PER_VALUE, link_bytes_per_s, efficiency.reduce_s)


def _memory(on: Device, of: ModelShape) -> MemoryNeeds:
    return MemoryNeeds(
        device_bytes=on.memory_bytes,
        vision_weight_bytes=of.vision.num_parameters * _BYTES_PER_VALUE,
        language_weight_bytes=of.language.num_parameters * _BYTES_PER_VALUE,
        kv_bytes_per_token=of.language.kv_values_per_token * _BYTES_PER_VALUE,
        embedding_bytes_per_token=of.language.hidden * of.embeddings_per_token * _BYTES_PER_VALUE,
        encode_bytes_per_patch=(of.vision.live_values_per_token + of.media.values_per_patch)
        * _BYTES_PER_VALUE,
        prefill_bytes_per_token=of.language.live_values_per_token * _BYTES_PER_VALUE,
        logits_bytes_per_sequence=of.language.vocabulary * _BYTES_PER_LOGIT,
        fixed_bytes=_RUNTIME_BYTES,
    )


def _reading_s(on: Device, num_parameters: int, efficiency: Efficiency) -> float:
    return num_parameters * _BYTES_PER_VALUE / (on.memory_bytes_per_s * efficiency.memory)


def _encode(on: Device, of: ModelShape, efficiency: Efficiency) -> StageTable:
    cost = StageCost(
        efficiency.call_s,
        _reading_s(on, of.vision.num_parameters, efficiency),
        of.vision.flops_per_token / (on.flops_per_s * efficiency.compute),
    )
    return StageTable("patches", "groups", cost, ValidRange(1, 262_144), ValidRange(1, 256))


def _prefill(on: Device, of: ModelShape, efficiency: Efficiency) -> StageTable:
    per_flop_s = 1 / (on.flops_per_s * efficiency.compute)
    cost = StageCost(
        efficiency.launch_s,
        _reading_s(on, of.language.num_parameters, efficiency),
        of.language.flops_per_token * per_flop_s,
        of.language.flops_per_pair * per_flop_s,
    )
    return StageTable(
        "new tokens", "token pairs", cost, ValidRange(1, _MAX_CONTEXT), ValidRange(1, _MAX_CONTEXT**2)
    )


def _decode(on: Device, of: ModelShape, efficiency: Efficiency) -> StageTable:
    kv_bytes = of.language.kv_values_per_token * _BYTES_PER_VALUE
    cost = StageCost(
        efficiency.launch_s,
        _reading_s(on, of.language.num_parameters, efficiency),
        of.language.flops_per_token / (on.flops_per_s * efficiency.compute),
        kv_bytes / (on.memory_bytes_per_s * efficiency.memory),
    )
    return StageTable(
        "sequences", "context tokens", cost, ValidRange(1, 1024), ValidRange(1, 1024 * _MAX_CONTEXT)
    )


def _transfer(on: Device, efficiency: Efficiency) -> StageTable:
    cost = StageCost(efficiency.transfer_s, 0.0, 1 / (on.link_bytes_per_s * efficiency.link))
    return StageTable("bytes", "transfers", cost, ValidRange(0, 2**36), ValidRange(0, 1))


def _per_pixel(per_pixel_s: float, units: str, items: str) -> StageTable:
    return StageTable(
        units, items, StageCost(per_unit_s=per_pixel_s), ValidRange(1, 2**33), ValidRange(0, 2**20)
    )


def _assumptions(efficiency: Efficiency) -> tuple[str, ...]:
    return (
        "analytic: computed from FLOPs and bytes, nothing was measured",
        f"{efficiency.compute:.0%} of dense 16-bit FLOPs, {efficiency.memory:.0%} of memory bandwidth, "
        f"{efficiency.link:.0%} of link bandwidth",
        f"{efficiency.launch_s * 1e3:g} ms per pass, {efficiency.call_s * 1e3:g} ms per call of the tower",
        "a batch of the tower and a pass of one worker take twice as long while both run",
        f"activations of one layer at its widest, {_RUNTIME_BYTES / 1e9:g} GB of runtime per device",
        f"one CPU thread decodes {efficiency.pixels_per_s:.2g} pixels/s of H.264, "
        f"{efficiency.image_pixels_per_s:.2g} of JPEG",
    )
