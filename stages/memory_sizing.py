"""Sizes the pools of a GPU: embeddings get a share, keys and values what weights and passes leave.

    device | others | weights | largest pass | embeddings      | keys and values ...... | kept free |
           |          measured               | EMBEDDING_SHARE |  the rest              | 1 - utilization

On a CPU nothing is measured: pools take memory as they are filled, and `default_kv_tokens` bounds them.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from epd.encoders import OWN_LIMITS, Adapter, MediaPlan, PixelLimits
from epd.encoders.families.captured_tower import CapturedTower, captured
from epd.encoders.groups import FrameEncoder
from epd.encoders.kernels.dispatch import uses_kernels
from epd.encoders.prompt.prompt import plan_tokens
from epd.engine_config import DEFAULT_ENGINE, EngineConfig
from epd.errors import InfeasibleError, UnsupportedMediaError
from epd.kv.pass_limits import SchedulerConfig
from epd.kv.prefix_cache import token_identity
from epd.profiles.memory import WorkerMemory
from epd.sampling_params import SamplingParams
from epd.stages.device_memory import total_bytes
from epd.stages.engine.engine import LanguageEngine
from epd.stages.engine.generation import GenerateRequest, GenerationSettings
from epd.stages.engine.graphs import ALL_PASSES, CudaGraphMaker, PassKind
from epd.stages.engine.model_runner import kv_bytes_per_token
from epd.stages.engine.setup import (
    BLOCK_SIZE,
    build_engine,
    kv_shape,
    largest_prefill,
    run_sampling,
    states_shape,
)
from epd.stages.placement import Placement
from epd.stages.rank import RankGroup

logger = logging.getLogger(__name__)

# Where nothing is sized by memory.
DEFAULT_EMBEDDINGS = 65_536
# Of what a worker may use of its GPU, for all of its embedding pools together. Each holds a long video.
EMBEDDING_SHARE = 0.05
_LEAST_EMBEDDINGS = 16_384
# A worker that has less room than this for keys and values is refused when it starts.
_LEAST_KV_TOKENS = 1024
_SIDE = 448  # pixels of the images of the largest batch
# Pixels of an image above the limits of every model, and its shapes: the one with most tiles depends on them.
_LARGEST_SIDE = 16_384
_SHAPES = ((1, 1), (3, 4), (4, 3), (1, 2), (2, 1), (1, 3), (3, 1), (1, 6), (6, 1))


@dataclass(frozen=True, slots=True)
class LargestPasses:
    """Holds what settings allow in one pass.

    encode_patches: of a batch. chunk_tokens: of prefill.
    num_captured: sequences of the largest pass that is captured, 0 where none is.
    resize_pixels: that a request may ask for an image, above the model's own limit; None for no more.
    encode_beside: whether batches are encoded beside prefill.
    num_seqs: answers that grow at once, of which each has logits, and a recurrent state if the model has any.
    captures: kinds of the passes that are captured, if any is, and whether small calls of the tower are.
    """

    encode_patches: int
    chunk_tokens: int
    num_captured: int = 0
    resize_pixels: int | None = None
    encode_beside: bool = False
    num_seqs: int = 0
    captures: frozenset[PassKind | Literal["tower"]] = ALL_PASSES


# What passes take of a GPU beside weights and pools, by their sizes and whether the worker encodes: kept for
# roles that a worker has again.
PassBytes = dict[tuple[LargestPasses, bool], int]


@dataclass(frozen=True, slots=True)
class MemoryShare:
    """Says what a worker may use of a GPU, and what else it is to hold.

    options: whose gpu_memory_utilization is the share of the device
    embedding_bytes: of pools that are still to be built
    name, letters: of the model and of the worker's roles, for messages
    """

    options: EngineConfig = DEFAULT_ENGINE
    embedding_bytes: int = 0
    name: str = "the model"
    letters: str = "epd"


@dataclass(frozen=True, slots=True)
class GPUMemory:
    """Holds the memory of a GPU.

    device_bytes: what this process may have of it
    other_bytes: what others have of that, and what its runtime takes
    held_bytes: of this process's tensors
    """

    device_bytes: int
    other_bytes: int
    held_bytes: int

    @classmethod
    def now(cls, device: torch.device) -> GPUMemory:
        """Asks torch. With a limit for this process, what others have is no part of its share."""
        total, held = total_bytes(device), torch.cuda.memory_allocated(device)
        share = torch.cuda.get_per_process_memory_fraction(device)
        if share < 1:
            return cls(int(total * share), 0, held)
        free, _ = torch.cuda.mem_get_info(device)
        return cls(total, max(0, total - free - torch.cuda.memory_reserved(device)), held)

    @classmethod
    def part_of(cls, whole: GPUMemory, num_sharing: int, held_bytes: int) -> GPUMemory:
        """Returns the part of one of several workers of a process. held_bytes: of its own tensors."""
        if num_sharing == 1:
            return whole
        return cls((whole.device_bytes - whole.other_bytes) // num_sharing, 0, held_bytes)


def embeddings_within(allowed_bytes: int, bytes_per_embedding: int, num_pools: int) -> int:
    """Returns the embeddings of each of a worker's pools. allowed_bytes: that the worker may use in all."""
    share_bytes = int(allowed_bytes * EMBEDDING_SHARE) // max(num_pools, 1)
    return max(_LEAST_EMBEDDINGS, share_bytes // bytes_per_embedding)


def kv_tokens_beside(
    memory: GPUMemory,
    activation_bytes: int,
    embedding_bytes: int,
    bytes_per_token: int,
    utilization: float,
    *,
    model: str,
    device: str,
    letters: str = "epd",
) -> int:
    """Returns the tokens that a KV pool has room for, and logs how the memory is divided.

    activation_bytes: of the largest pass. embedding_bytes: of pools that are still to be built, recurrent
    states included. utilization: the share of the device that may be used. model, device, letters: names
    for the message.
    Raises InfeasibleError with the sizes if hardly any room is left.
    """
    without_kv = WorkerMemory(
        letters,
        memory.device_bytes,
        utilization,
        fixed_bytes=memory.other_bytes,
        weight_bytes=memory.held_bytes,
        activation_bytes=activation_bytes,
        embedding_bytes=embedding_bytes,
        kv_bytes=0,
        kv_bytes_per_token=bytes_per_token,
    )
    without_kv.check(model, device, _LEAST_KV_TOKENS)
    num_tokens = without_kv.free_bytes // bytes_per_token // BLOCK_SIZE * BLOCK_SIZE
    logger.info(
        "memory of %s: %s, keys and values of %d tokens; %.0f%% of %.1f GB may be used",
        device,
        without_kv.parts(num_tokens * bytes_per_token),
        num_tokens,
        100 * utilization,
        memory.device_bytes / 1e9,
    )
    return num_tokens


def measured_kv_tokens(
    model: Any,
    tower: Any,
    adapter: Adapter,
    settings: GenerationSettings,
    placement: Placement,
    passes: LargestPasses,
    share: MemoryShare = MemoryShare(),  # it is frozen
    *,
    memory_of: Callable[[torch.device], GPUMemory] = GPUMemory.now,
    ranks: RankGroup | None = None,
    known: PassBytes | None = None,
) -> int | None:
    """Returns the tokens of a KV pool after one run of each of the largest passes; None on a CPU.

    tower: None for a worker that does not encode. memory_of: asked after the passes. ranks: that share the
    model; what rank 0 has room for, the others have. known: gets what passes take; those there do not run.
    """
    if not placement.is_cuda:
        return None
    device = placement.device
    logger.info(
        "passes on %s: at most %d tokens and %d answers", device, passes.chunk_tokens, passes.num_seqs
    )
    _give_back()  # pools of roles that were given up
    known = {} if known is None else known
    if (kind := (passes, tower is not None)) not in known:
        known[kind] = _pass_bytes(model, tower, adapter, settings, device, passes, share.name, ranks)
    states = states_shape(model, passes.num_seqs)
    memory, fixed_bytes = memory_of(device), share.embedding_bytes + (states.num_bytes if states else 0)

    def num_tokens_beside(num_bytes: int, bytes_per_token: int) -> int:
        return kv_tokens_beside(
            memory,
            known[kind],
            fixed_bytes + num_bytes,
            bytes_per_token,
            share.options.gpu_memory_utilization,
            model=share.name,
            device=str(device),
            letters=share.letters,
        )

    int8_values = share.options.int8_values
    num_tokens = num_tokens_beside(0, kv_bytes_per_token(model, int8_values=int8_values))
    shape = kv_shape(
        model,
        num_tokens,
        max_num_seqs=passes.num_seqs,
        max_chunk_tokens=passes.chunk_tokens,
        int8_values=int8_values,
    )
    bounded = [each for each in shape.groups if each.num_blocks < shape.groups[0].num_blocks]
    if not bounded:
        return num_tokens
    window_bytes = sum(each.num_blocks * BLOCK_SIZE * each.layout.bytes_per_token for each in bounded)
    return num_tokens_beside(window_bytes, shape.groups[0].layout.bytes_per_token)


def _pass_bytes(
    model: Any,
    tower: Any,
    adapter: Adapter,
    settings: GenerationSettings,
    device: torch.device,
    passes: LargestPasses,
    name: str,
    ranks: RankGroup | None,
) -> int:
    """Runs each of the largest passes, and returns what they take at once, with those that are captured."""
    largest = largest_prefill(model, passes.chunk_tokens)
    peaks = [_peak_bytes(device, lambda: run_prefill(model, adapter, settings, largest, ranks))]
    if passes.num_seqs:
        peaks[0] = max(peaks[0], _peak_bytes(device, lambda: run_sampling(model, passes.num_seqs)))
    if tower is not None:
        peaks.append(_peak_bytes(device, lambda: _run_encode(adapter, tower, passes, name, device)))
    graph_bytes = 0
    if passes.num_captured and ranks is None:
        kinds, most = frozenset(each for each in passes.captures if each != "tower"), passes.num_captured
        graph_bytes = _graph_bytes(device, lambda: _capture(model, adapter, settings, kinds, most))
    if tower is not None and "tower" in passes.captures:
        graph_bytes += capture_tower(adapter, tower, passes.encode_patches, device)[1]
        _give_back()
    if graph_bytes:
        logger.info("CUDA graphs on %s: %.2f GB", device, graph_bytes / 1e9)
    return (sum(peaks) if passes.encode_beside else max(peaks)) + graph_bytes


def _peak_bytes(device: torch.device, action: Callable[[], None]) -> int:
    """Returns the most that an action holds on a GPU beside what was there; gives back what torch keeps."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    action()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return peak


def _graph_bytes(device: torch.device, capture: Callable[[], LanguageEngine]) -> int:
    """Returns what captured passes take of a GPU for as long as their engine lives."""
    engine, taken_bytes = _taken_by(device, capture)
    num_bytes: int = taken_bytes - engine.pools.shape.num_bytes
    del engine
    _give_back()
    return max(0, num_bytes)


def captures_tower(tower: nn.Module, placement: Placement, options: EngineConfig) -> bool:
    """Reports whether small calls of a tower are captured: in 16 bits on a GPU."""
    is_wide = placement.dtype.itemsize > 2  # whose attention has no runs of any length
    is_off = options.enforce_eager or options.tower_merge is not None
    return not is_wide and not is_off and uses_kernels(next(tower.parameters()))


def capture_tower(
    adapter: Adapter, tower: Any, max_patches: int, device: torch.device
) -> tuple[CapturedTower | None, int]:
    """Captures small calls of a tower, if that can be done; returns also the bytes that they take."""
    capture = CudaGraphMaker(device).capture
    return _taken_by(device, lambda: captured(adapter, tower, capture, max_patches))


def _taken_by(device: torch.device, action: Callable[[], Any]) -> tuple[Any, int]:
    """Returns what an action returns, and what that takes of a GPU while it lives, the driver's part too."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    held = action()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    left, _ = torch.cuda.mem_get_info(device)
    return held, max(0, free - left)


def _give_back() -> None:
    """Gives back the memory of what is no longer held, and what torch keeps of it."""
    gc.collect()
    torch.cuda.empty_cache()


def _capture(
    model: Any, adapter: Adapter, settings: GenerationSettings, kinds: frozenset[PassKind], num_seqs: int
) -> LanguageEngine:
    config, options = SchedulerConfig(max_num_seqs=num_seqs), EngineConfig(num_kv_tokens=2 * BLOCK_SIZE)
    return build_engine(model, adapter, settings, options=options, config=config, captures=kinds)


def _run_encode(adapter: Adapter, tower: Any, passes: LargestPasses, name: str, device: torch.device) -> None:
    """Runs the largest passes of the tower. Raises InfeasibleError where the device has no room for them."""
    try:
        run_encode(adapter, tower, passes.encode_patches, passes.resize_pixels)
    except torch.OutOfMemoryError as error:
        raise InfeasibleError(
            f"'{name}' does not encode the largest image that is allowed on {device}: there is no room "
            "beside its weights; allow fewer pixels of an image (max_pixels), or use a GPU with more memory"
        ) from error


@torch.inference_mode()
def run_encode(adapter: Adapter, tower: Any, num_patches: int, resize_pixels: int | None = None) -> None:
    """Encodes a batch with at most this number of patches, then the largest image or clip that is allowed.

    resize_pixels: as in `LargestPasses`.
    """
    encoder = FrameEncoder(adapter, tower)
    usual, largest = _usual_and_largest(adapter, resize_pixels)
    count = max(1, num_patches // usual.grid.num_patches)
    encoder.encode([encoder.patches(_blank(usual), usual) for _ in range(count)])
    if largest.grid.num_patches > count * usual.grid.num_patches:
        encoder.encode([encoder.patches(_blank(largest), largest)])


def _usual_and_largest(adapter: Adapter, resize_pixels: int | None) -> tuple[MediaPlan, MediaPlan]:
    """Plans an image of a usual size and the largest one; of a model that hears, its longest clip."""
    limits = (OWN_LIMITS, *([PixelLimits(max_pixels=resize_pixels)] if resize_pixels else []))
    try:
        usual = adapter.plan_image(_SIDE, _SIDE)
    except UnsupportedMediaError:
        clip = adapter.plan_audio(adapter.audio.max_samples)
        return clip, clip
    sizes = [(_LARGEST_SIDE * h // max(h, w), _LARGEST_SIDE * w // max(h, w)) for h, w in _SHAPES]
    plans = [adapter.plan_image(*size, pixels) for size in sizes for pixels in limits]
    return usual, max(plans, key=lambda plan: plan.grid.num_patches)


def _blank(plan: MediaPlan) -> Tensor:
    """Returns an image, or a clip of silence, as an adapter preprocesses it: uint8."""
    if plan.kind == "audio":
        return torch.zeros(plan.resized, dtype=torch.float32).view(torch.uint8)
    return torch.zeros((plan.num_units, *plan.size, 3), dtype=torch.uint8)


def run_prefill(
    model: Any,
    adapter: Adapter,
    settings: GenerationSettings,
    num_tokens: int,
    ranks: RankGroup | None = None,
) -> None:
    """Prefills a prompt of this length in one pass, and samples a token. Its KV pool is its own."""
    config = SchedulerConfig(num_tokens, 1, num_tokens)
    options = EngineConfig(num_kv_tokens=num_tokens + 2 * BLOCK_SIZE, enforce_eager=True)
    engine = build_engine(model, adapter, settings, options=options, config=config, ranks=ranks)
    engine.add(text_request("largest-pass", adapter, num_tokens, max_tokens=1))
    engine.step()


def text_request(name: str, adapter: Adapter, num_tokens: int, max_tokens: int) -> GenerateRequest:
    """Creates a prompt of arbitrary text, whose answer has no early end."""
    token_ids = [number % 97 + 3 for number in range(num_tokens)]
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return GenerateRequest(name, plan_tokens(adapter, token_ids), token_identity(token_ids), sampling)
