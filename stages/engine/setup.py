"""Builds an engine for a loaded model, with room for keys and values.

`LeadingRunner` runs the passes of rank 0, which the other ranks of a worker repeat.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from epd.encoders import Adapter, Embeddings
from epd.encoders.device import device_of, to_device
from epd.encoders.kernels.dispatch import uses_kernels
from epd.engine_config import DEFAULT_ENGINE, EngineConfig
from epd.kv.drafting import Drafting
from epd.kv.kv_room import state_slots, window_blocks
from epd.kv.pass_limits import SchedulerConfig
from epd.lora_modules import LoRAModule
from epd.machine import memory_limit_bytes
from epd.sampling_params import SamplingParams
from epd.stages.attention.support import adds_embeddings
from epd.stages.engine.engine import LanguageEngine
from epd.stages.engine.generation import GenerationSettings
from epd.stages.engine.graphs import ALL_PASSES, Capturing, CudaGraphMaker, GraphMaker, PassKind
from epd.stages.engine.kv_pool import KVGroupShape, KVPools, KVPoolsShape, StorageOrder
from epd.stages.engine.model_runner import ModelRunner, kv_layouts
from epd.stages.engine.packed_pass import Segment, visual_of
from epd.stages.engine.state_pool import StatesShape, state_layout
from epd.stages.rank import RankGroup
from epd.stages.sampling.sampler import SamplingRow, SamplingState, sample
from epd.topology import Stage

BLOCK_SIZE = 16
# KV caches take together at most this share of the memory, and each no more tokens than this.
_KV_MEMORY_SHARE = 0.25
_MAX_KV_TOKENS = 2**18
DEFAULT_SCHEDULER = SchedulerConfig()


@dataclass(frozen=True, slots=True)
class ServeAdapters:
    """Has a rank read its part of adapters, too."""

    modules: tuple[LoRAModule, ...]


class LeadingRunner(ModelRunner):
    """Tells the other ranks each pass before it computes its own part."""

    def __init__(self, model: Any, pools: KVPools, ranks: RankGroup) -> None:
        """Takes rank 0's part of a model, see `cut_model`."""
        super().__init__(model, None, pools, ranks=ranks)
        self.followers: RankGroup = ranks

    def serve_adapters(self, model: Any, modules: Sequence[LoRAModule]) -> None:
        super().serve_adapters(model, modules)  # raises before any rank is told
        self.followers.tell(ServeAdapters(tuple(modules)))

    def run(self, segments: Sequence[Segment]) -> Tensor:
        """Computes all segments as `ModelRunner.run` does. Raises RankLostError."""
        packed, visual = self.packed(segments), visual_of(segments)
        if visual is not None:
            visual = visual.mapped(lambda rows: to_device(rows, self._device).to(self._dtype))
        self.followers.tell(packed)
        with self.followers.computing():
            share_visual(self.followers, visual)
            return self.run_packed(packed, visual)


def share_visual(ranks: RankGroup, visual: Embeddings | None) -> None:
    for rows in () if visual is None else (visual.rows, *visual.deepstack):
        ranks.share(rows.contiguous())


def largest_prefill(model: Any, chunk_tokens: int) -> int:
    """Returns the most tokens of a pass: of a model whose media attend each other, all that it takes."""
    config = model.get_decoder().config
    return max(chunk_tokens, config.max_position_embeddings) if adds_embeddings(config) else chunk_tokens


def captured_kinds(roles: Collection[Stage], options: EngineConfig) -> frozenset[PassKind]:
    """Returns the kinds of passes that a worker with such roles captures: those that it runs."""
    has_chunks = "prefill" in roles or ("decode" in roles and options.draft != "none")
    has: dict[PassKind, bool] = {"decodes": "decode" in roles, "chunks": has_chunks}
    return frozenset(kind for kind, is_there in has.items() if is_there and not options.enforce_eager)


def build_engine(
    model: Any,
    adapter: Adapter,
    settings: GenerationSettings,
    pools: KVPools | None = None,
    *,
    options: EngineConfig = DEFAULT_ENGINE,
    config: SchedulerConfig | None = None,
    block_size: int = BLOCK_SIZE,
    enable_prefix_caching: bool = False,
    by_modules: bool = False,
    ranks: RankGroup | None = None,
    graphs: GraphMaker | None = None,
    captures: frozenset[PassKind] = ALL_PASSES,
) -> LanguageEngine:
    """Builds an engine over these pools, by default over its own, where the model is: see `kv_shape`.

    by_modules: see `ModelRunner`.
    ranks: that share the model; they build pools of the same blocks, and the engine before is theirs no more.
    graphs: makes graphs of the passes in `captures`, by default on a GPU alone; ranks are not captured.
    """
    config = config or DEFAULT_SCHEDULER
    if pools is None:
        num_pools = 1 if ranks is None else ranks.rank.size
        seqs, chunk = config.max_num_seqs, config.max_chunk_tokens
        sizes = options.num_kv_tokens, block_size, num_pools, seqs, chunk
        shape = kv_shape(model, *sizes, int8_values=options.int8_values)
        pools = shape.build(device=device_of(model))
    if ranks is None:
        runner = ModelRunner(
            model,
            adapter,
            pools,
            by_modules=by_modules or options.model_impl == "transformers",
            capturing=None if options.enforce_eager else _capturing(model, config, graphs, captures),
        )
    else:
        ranks.tell(pools.shape)
        with ranks.computing():
            runner = LeadingRunner(model, pools, ranks)
    if options.adapters:
        runner.serve_adapters(model, options.adapters)
    return LanguageEngine(
        runner,
        adapter.tokenizer,
        settings.eos_ids,
        config,
        enable_prefix_caching=enable_prefix_caching,
        drafting=None if options.draft == "none" else Drafting(options.drafting, _num_token_ids(model)),
        runs_ahead=_is_on_gpu(model) if options.async_scheduling is None else options.async_scheduling,
    )


def _is_on_gpu(model: Any) -> bool:
    return device_of(model).type != "cpu"


def _capturing(
    model: Any, config: SchedulerConfig, maker: GraphMaker | None, kinds: frozenset[PassKind]
) -> Capturing | None:
    """Returns which passes are captured where the model is; None where nothing can be."""
    weight = model.get_input_embeddings().weight
    if maker is None and uses_kernels(weight):
        maker = CudaGraphMaker(weight.device)
    if maker is None:
        return None
    return Capturing(maker, config.max_num_seqs, config.max_num_batched_tokens, kinds)


def _num_token_ids(model: Any) -> int:
    return int(model.get_output_embeddings().out_features)


@torch.inference_mode()
def run_sampling(model: Any, num_seqs: int) -> None:
    """Draws the next tokens of num_seqs answers, and weighs the whole vocabulary for each."""
    head = model.get_output_embeddings()
    logits = torch.zeros(num_seqs, head.out_features, dtype=head.weight.dtype, device=device_of(model))
    state = SamplingState(SamplingParams(temperature=1.0, top_p=0.9), 0, np.empty(0, np.int64))
    sample(logits, [SamplingRow(state)] * num_seqs)


def kv_shape(
    model: Any,
    num_kv_tokens: int | None = None,
    block_size: int = BLOCK_SIZE,
    num_pools: int = 1,
    max_num_seqs: int = DEFAULT_SCHEDULER.max_num_seqs,
    max_chunk_tokens: int = DEFAULT_SCHEDULER.max_chunk_tokens,
    *,
    int8_values: bool = False,
) -> KVPoolsShape:
    """Describes pools for a model, in the order that suits its device.

    num_kv_tokens: their room; by default `default_kv_tokens`.
    max_num_seqs: answers that grow at once. max_chunk_tokens: of a prompt in one pass.
    int8_values: see `KVLayout`.
    """
    layouts = kv_layouts(model, int8_values=int8_values)
    num_tokens = num_kv_tokens or default_kv_tokens(layouts[0][0].bytes_per_token, num_pools)
    order: StorageOrder = "blocks" if _is_on_gpu(model) else "heads"
    num_blocks = num_tokens // block_size
    groups = [KVGroupShape(num_blocks, *each) for each in layouts]
    for number, group in enumerate(groups):
        if group.window is not None:
            most = window_blocks(group.window, block_size, max_num_seqs, max_chunk_tokens)
            groups[number] = replace(group, num_blocks=min(num_blocks, most))
    return KVPoolsShape(tuple(groups), block_size, order, states=states_shape(model, max_num_seqs))


def states_shape(model: Any, max_num_seqs: int) -> StatesShape | None:
    """Describes the slots for recurrent states of so many answers; None without any, of either."""
    layout = state_layout(model)
    if layout is None or not max_num_seqs:
        return None
    return StatesShape(state_slots(max_num_seqs), layout)


def default_kv_tokens(bytes_per_token: int, num_pools: int = 1) -> int:
    """Returns the tokens of one of num_pools pools that share a quarter of our usable memory, or less."""
    share_bytes = int(memory_limit_bytes() * _KV_MEMORY_SHARE) // num_pools
    return min(share_bytes // bytes_per_token, _MAX_KV_TOKENS)
