"""Computes profiles of devices that are not at hand from FLOPs, bytes and stated efficiencies."""

from __future__ import annotations

from dataclasses import dataclass, replace

from epd.kv.kv_room import SCALE_BYTES
from epd.profiles.accelerators import CATALOGUE, Device, Devices
from epd.profiles.catalogue import model_named
from epd.profiles.cost import StageCost, StageTable, ValidRange
from epd.profiles.memory import MemoryNeeds
from epd.profiles.parallel import ParallelStack, ShardedModel
from epd.profiles.profile import Profile
from epd.profiles.shapes import ModelShape, Transformer, WindowLayers

_BYTES_PER_VALUE, _BYTES_PER_LOGIT, _BYTES_OF_FP8 = 2, 4, 1.0
AS_FAST_IN_FP8 = "products in FP8 are computed as fast as in 16 bits: none has been measured"
# Context of the device and workspaces of matrix products: an assumption.
_RUNTIME_BYTES = 10**9
_MAX_CONTEXT = 131_072
# Of a layer, from prefill of 256 tokens of 28 layers on our H100, which waits for the host.
LAUNCH_S = 18.21e-3 / 28


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Sets the shares of the data sheet that are reached, and overheads in seconds.

    compute: of FLOPs in prefill, from 2,048 tokens of our H100 (benchmarks/results/gpu.md)
    tower: of FLOPs in towers, whose heads and widths are small: an assumption
    memory: of bandwidth while weights or keys are read
    link: of bandwidth between devices
    launch_s: that the host takes to launch a layer of prefill or of a tower kernel by kernel, which a pass
        takes at least: from 256 tokens of our H100
    replay_s: that a layer of a replayed step takes beside its kernels, a dozen of .5 us each (NVIDIA,
        "Getting Started with CUDA Graphs")
    transfer_s: of one transfer
    reduce_s: of one all-reduce between devices that share layers
    pixels_per_s: decoded by a CPU thread from H.264
    image_pixels_per_s: the same from JPEG
    """

    compute: float = 0.63
    tower: float = 0.5
    memory: float = 0.7
    link: float = 0.6
    launch_s: float = LAUNCH_S
    replay_s: float = 6e-6
    transfer_s: float = 0.001
    reduce_s: float = 15e-6
    pixels_per_s: float = 1.5e8
    image_pixels_per_s: float = 6e7

    def __post_init__(self) -> None:
        if not all(0 < share <= 1 for share in (self.compute, self.tower, self.memory, self.link)):
            raise ValueError(f"efficiencies are shares, above 0 and at most 1, got {self}")


def analytic_profile(
    device: str,
    model: str,
    efficiency: Efficiency | None = None,
    devices: Devices = CATALOGUE,
    kv_cache_dtype: str = "auto",
    quantization: str | None = None,
) -> Profile:
    """Returns a profile marked as analytic. Raises RequestError for names that nothing is known of.

    model: a name, a folder with a config.json, or that file
    kv_cache_dtype, quantization: as in `EngineConfig`
    """
    efficiency = efficiency or Efficiency()
    on, of = devices.named(device), model_named(model)
    has_scales = kv_cache_dtype == "int8_values"
    if quantization is not None:  # a scale for each row is left out: .1 %
        of = replace(of, layer_bytes=min(of.layer_bytes, _BYTES_OF_FP8))
    return Profile(
        name=f"{of.name}@{device}",
        model=of.name,
        device=device,
        is_analytic=True,
        media=of.media,
        memory=_memory(on, of, has_scales=has_scales),
        encode=_encode(on, of, efficiency),
        prefill=_prefill(on, of, efficiency),
        decode=_decode(on, of, efficiency, has_scales=has_scales),
        transfer=_transfer(on, efficiency),
        video={"h264": _per_pixel(1 / efficiency.pixels_per_s, "source pixels", "frames")},
        images=_per_pixel(1 / efficiency.image_pixels_per_s, "pixels", "images"),
        price_per_hour=on.price_per_hour,
        currency=on.currency,
        power_w=on.power_w,
        cores_per_device=on.cores,
        context_tokens=of.context_tokens,
        assumptions=_assumptions(of, efficiency, has_scales=has_scales)
        + ((AS_FAST_IN_FP8,) if of.layer_bytes == _BYTES_OF_FP8 else ()),
        kv_cache_dtype=kv_cache_dtype,
        quantization=quantization,
        parallel=_parallel(on, of, efficiency),
    )


def _parallel(on: Device, of: ModelShape, efficiency: Efficiency) -> ShardedModel | None:
    """Returns how layers are shared out; None where they are not."""
    if not of.is_shared:
        return None
    stack = of.language
    language = ParallelStack(stack.num_layers, stack.hidden, stack.num_heads, stack.num_kv_heads)
    link_bytes_per_s = on.link_bytes_per_s * efficiency.link
    return ShardedModel(
        language, _BYTES_PER_VALUE, link_bytes_per_s, efficiency.reduce_s, launch_s=efficiency.launch_s
    )


def _memory(on: Device, of: ModelShape, *, has_scales: bool) -> MemoryNeeds:
    return MemoryNeeds(
        device_bytes=on.memory_bytes,
        vision_weight_bytes=(of.vision.num_parameters + of.num_projector_parameters) * _BYTES_PER_VALUE,
        language_weight_bytes=of.weight_bytes,
        kv_bytes_per_token=_kv_bytes(of.language, has_scales=has_scales),
        embedding_bytes_per_token=of.language.hidden * of.embeddings_per_token * _BYTES_PER_VALUE,
        encode_bytes_per_patch=(of.vision.live_values_per_token + of.media.values_per_patch)
        * _BYTES_PER_VALUE,
        prefill_bytes_per_token=of.language.live_values_per_token * _BYTES_PER_VALUE,
        logits_bytes_per_sequence=of.language.vocabulary * _BYTES_PER_LOGIT,
        fixed_bytes=_RUNTIME_BYTES,
        state_bytes=_state_bytes(of),
        window_bytes_per_token=_kv_bytes(of.language.windowed, has_scales=has_scales),
        window_tokens=of.language.windowed.window,
    )


def _kv_bytes(of: Transformer | WindowLayers, *, has_scales: bool) -> int:
    """Counts the bytes that a token leaves. has_scales: values have 8 bits, each head with a scale."""
    if not has_scales:
        return of.kv_values_per_token * _BYTES_PER_VALUE
    num_heads = of.kv_values_per_token // (2 * of.head_dim)
    return num_heads * (of.head_dim * _BYTES_PER_VALUE + of.head_dim + SCALE_BYTES)


def _state_bytes(of: ModelShape) -> int:
    return 0 if of.language.delta is None else of.language.delta.state_bytes(_BYTES_PER_VALUE)


def _reading_s(on: Device, num_bytes: int, efficiency: Efficiency) -> float:
    return num_bytes / (on.memory_bytes_per_s * efficiency.memory)


def _encode(on: Device, of: ModelShape, efficiency: Efficiency) -> StageTable:
    reading_s = _reading_s(on, of.vision.num_parameters * _BYTES_PER_VALUE, efficiency)
    cost = StageCost(
        floor_s=max(reading_s, of.vision.num_layers * efficiency.launch_s),
        per_unit_s=of.vision.flops_per_token / (on.flops_per_s * efficiency.tower),
    )
    return StageTable("patches", "groups", cost, ValidRange(1, 262_144), ValidRange(1, 256))


def _prefill(on: Device, of: ModelShape, efficiency: Efficiency) -> StageTable:
    passes = _passes(on, of, efficiency)
    cost = replace(
        passes,
        floor_s=max(passes.floor_s, of.language.num_layers * efficiency.launch_s - passes.experts_s),
        per_unit_s=of.language.flops_per_media_token / (on.flops_per_s * efficiency.compute),
        per_item_s=of.language.flops_per_pair / (on.flops_per_s * efficiency.compute),
    )
    return StageTable(
        "new tokens", "token pairs", cost, ValidRange(1, _MAX_CONTEXT), ValidRange(1, _MAX_CONTEXT**2)
    )


def _passes(on: Device, of: ModelShape, efficiency: Efficiency) -> StageCost:
    """Returns the cost of a pass of the language model without attention to all tokens."""
    language = of.language
    expert_bytes = round(of.layer_bytes * language.num_in_experts)
    other_bytes = of.weight_bytes - expert_bytes - language.num_looked_up * _BYTES_PER_VALUE
    return StageCost(
        0.0,
        _reading_s(on, other_bytes, efficiency),
        language.flops_per_token / (on.flops_per_s * efficiency.compute),
        experts_s=_reading_s(on, expert_bytes, efficiency),
        active_share=language.num_active_experts / language.num_experts,
    )


def _decode(on: Device, of: ModelShape, efficiency: Efficiency, *, has_scales: bool) -> StageTable:
    """A step reads the keys and values of all tokens and of full windows, and reads and writes states."""
    values, bytes_per_s = of.language, on.memory_bytes_per_s * efficiency.memory
    window_bytes = values.windowed.window * _kv_bytes(values.windowed, has_scales=has_scales)
    passes = _passes(on, of, efficiency)
    cost = replace(
        passes,
        experts_s=passes.experts_s * values.mlp_hidden / (values.mlp_hidden + values.media_mlp_hidden),
        fixed_s=values.num_layers * efficiency.replay_s,
        per_item_s=_kv_bytes(values, has_scales=has_scales) / bytes_per_s,
        read_s=(window_bytes + 2 * _state_bytes(of)) / bytes_per_s,
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


def _assumptions(of: ModelShape, efficiency: Efficiency, *, has_scales: bool) -> tuple[str, ...]:
    found: tuple[str, ...] = (
        "analytic: a roofline of the data sheet, computed from FLOPs and bytes; nothing was measured",
        f"{efficiency.compute:.0%} of dense 16-bit FLOPs, of towers {efficiency.tower:.0%}, "
        f"{efficiency.memory:.0%} of memory bandwidth, {efficiency.link:.0%} of link bandwidth",
        f"{efficiency.launch_s * 1e3:.2g} ms a layer at least to launch prefill and towers; decoding is "
        "replayed",
        "a batch of the tower and a pass of one worker take twice as long while both run",
        f"activations of one layer at its widest, {_RUNTIME_BYTES / 1e9:g} GB of runtime per device",
        f"one CPU thread decodes {efficiency.pixels_per_s / 1e6:.3g} million pixels/s of H.264, "
        f"{efficiency.image_pixels_per_s / 1e6:.3g} million of JPEG",
    )
    if of.language.num_experts > 1:
        found += ("a pass reads the experts that its tokens choose, drawn evenly: real choices are fewer",)
    if of.language.media_mlp_hidden:
        found += ("prefill computes all tokens by the experts of media, decoding by those of text",)
    if of.media.is_whole:
        found += ("prefill waits for all media of a request; more than a pass of them takes more memory",)
    if of.language.windowed.num_layers:
        found += ("windows are full: prompts that are shorter than one are faster than computed",)
    if has_scales:
        found += ("values in 8 bits are read at the same bandwidth as those in 16",)
    return found
