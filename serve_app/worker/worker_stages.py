"""Builds the stages of one worker, each from the checkpoint with only the weights of its role."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import nn

from epd.encode.encoder_cache import EncoderCacheManager
from epd.encode.sharding import BATCH_PATCHES
from epd.encoders import Adapter, load_adapter, num_deepstack
from epd.encoders.checkpoint import read_config
from epd.encoders.groups import FrameEncoder
from epd.encoders.names import WeightSet
from epd.engine_config import RECURRENT_FAMILIES, WINDOWED_FAMILIES
from epd.errors import InfeasibleError, RequestError
from epd.kv.pass_limits import PassLimits, SchedulerConfig
from epd.serve_app.worker.worker_settings import Transport, WorkerSettings
from epd.serve_app.worker_info import MemoryUse
from epd.stages.decode import DecodeStage
from epd.stages.device_memory import total_bytes
from epd.stages.encode.encoder import EncodeStage
from epd.stages.encode.encoder_pool import EmbeddingLayout, EmbeddingReceiver, EncoderPool, EncoderPoolShape
from epd.stages.engine.engine import LanguageEngine
from epd.stages.engine.generation import EngineCounts, generation_settings
from epd.stages.engine.graphs import PassKind
from epd.stages.engine.kv_pool import KVPoolsShape
from epd.stages.engine.kv_store import kv_files
from epd.stages.engine.setup import BLOCK_SIZE, build_engine, captured_kinds, kv_shape
from epd.stages.kept_files import EMBEDDINGS_KIND, kept_files
from epd.stages.loading.host_weights import HostWeights
from epd.stages.loading.weights import WholeModel, load_role
from epd.stages.memory_sizing import (
    DEFAULT_EMBEDDINGS,
    GPUMemory,
    LargestPasses,
    MemoryShare,
    PassBytes,
    capture_tower,
    captures_tower,
    embeddings_within,
    measured_kv_tokens,
)
from epd.stages.prefill import PrefillStage
from epd.stages.ranks.communicator import EngineRanks
from epd.stages.ranks.group import ProcessRanks, load_with_ranks
from epd.stages.ranks.group_pools import PoolSharing
from epd.store.write_behind import read_paces
from epd.topology import Stage, role_letters
from epd.transfer.connectors import EncoderConnector, KVConnector

logger = logging.getLogger(__name__)

_EMBEDDINGS_PER_BLOCK = 16
# Workers of one process measure and fill its GPU one after another.
_BUILDING = threading.Lock()


class StageBuilder:
    """Builds stages for one worker; weights that two of them share are loaded once."""

    def __init__(
        self, settings: WorkerSettings, transport: Transport, roles: AbstractSet[Stage] = frozenset()
    ) -> None:
        """Loads nothing yet. roles: that the worker is started with."""
        self.settings = settings
        sizes = settings.tensor_parallel
        self._num_ranks = sizes.size if sizes.is_uniform else sizes.num_ranks(roles)
        self.transport = transport
        self.adapter: Adapter = load_adapter(settings.model_path, pixels=settings.engine.pixels)
        self.placement = settings.placement()
        self.generation = generation_settings(settings.model_path, self.adapter)
        self.weights_s = 0.0  # spent on weights so far
        self._whole: WholeModel | None = None
        self._kept: HostWeights | None = None
        self._share_weights()
        self._language: Any = None
        self._encoder: Any = None
        self._ranks: ProcessRanks | None = None
        self._max_batch_patches = settings.max_batch_patches or BATCH_PATCHES[self.placement.device.type]
        self._kv_tokens = settings.engine.num_kv_tokens
        self._num_embeddings = settings.num_embeddings or DEFAULT_EMBEDDINGS
        self._pools: dict[str, EncoderPoolShape | KVPoolsShape] = {}  # by endpoint and kind
        self._pass_bytes: PassBytes = {}
        self._use: MemoryUse | None = None  # until something changes
        self._read_paces = read_paces()  # of what is kept, whatever it is

    @contextmanager
    def building(self) -> Iterator[None]:
        """Encloses the building of stages. Raises InfeasibleError if a GPU has no room for them."""
        if not self.placement.is_cuda:
            yield
            return
        with _BUILDING:
            try:
                yield
            except torch.OutOfMemoryError as error:
                held = f"{self._held_bytes() / 1e9:.1f} GB"
                raise InfeasibleError(
                    f"the stages do not fit beside the {held} of the worker on {self.placement.device}: "
                    f"{error}; lower gpu_memory_utilization or num_kv_tokens, or give the roles to another"
                ) from error

    def size(self, roles: AbstractSet[Stage], missing: AbstractSet[Stage]) -> None:
        """Sizes the pools of the missing stages of a worker of these roles, before any of them is built.

        Raises InfeasibleError if a GPU has no room for them.
        """
        settings = self.settings
        if not self.placement.is_cuda or settings.engine.num_kv_tokens:
            return
        if missing & {"prefill", "decode"} and self._may_encode(roles):
            roles, missing = roles | {"encode"}, missing | {"encode"}
        encoder = self._encoder_model() if "encode" in roles else None
        config = encoder.config if encoder is not None else self._language_model().config
        layout = embedding_layout(config, self._embeddings_in)
        if settings.num_embeddings is None:
            num_pools = len(roles & {"encode", "prefill"})
            device_bytes = self._memory(self.placement.device).device_bytes
            allowed = int(device_bytes * settings.engine.gpu_memory_utilization)
            self._num_embeddings = embeddings_within(allowed, layout.bytes_per_embedding, num_pools)
        if not missing & {"prefill", "decode"}:
            return
        num_missing = len(missing & {"encode", "prefill"})
        language = self._language_model()
        kinds = captured_kinds(roles, settings.engine)
        captured = self.decode_limits if "decode" in roles else self.limits
        tower = None if encoder is None else self.adapter.vision_tower(encoder)
        is_captured = tower is not None and captures_tower(tower, self.placement, settings.engine)
        self._kv_tokens = measured_kv_tokens(
            language,
            tower,
            self.adapter,
            self.generation,
            self.placement,
            LargestPasses(
                self._max_batch_patches,
                self.limits.max_num_batched_tokens,
                captured.max_num_seqs if kinds else 0,
                settings.max_resize_pixels,
                settings.encode_beside,
                max(self.limits.max_num_seqs, self.decode_limits.max_num_seqs),
                kinds | ({"tower"} if is_captured else set()),
            ),
            MemoryShare(
                settings.engine,
                num_missing * self._num_embeddings * layout.bytes_per_embedding,
                settings.model_path.name,
                role_letters(roles),
            ),
            memory_of=self._memory,
            ranks=self._ranks,
            known=self._pass_bytes,
        )

    def _may_encode(self, roles: AbstractSet[Stage]) -> bool:
        """Returns whether a switch may add encode to these roles."""
        return "encode" not in roles and any(each >= roles | {"encode"} for each in self.settings.switchable)

    def memory(self) -> MemoryUse:
        """Returns what the worker has on its device; asked with every report, so it is kept."""
        if self._use is None:
            self._use = self._current_use()
        return self._use

    def _current_use(self) -> MemoryUse:
        embeddings = [each for each in self._pools.values() if isinstance(each, EncoderPoolShape)]
        kv = [each for each in self._pools.values() if isinstance(each, KVPoolsShape)]
        return MemoryUse(
            str(self.placement),
            self._allowed_bytes,
            self._weight_bytes(),
            sum(each.num_bytes for each in embeddings),
            sum(each.num_bytes for each in kv),
            sum(each.num_blocks * each.block_size for each in embeddings),
            sum(group.num_blocks * each.block_size for each in kv for group in each.groups),
        )

    @cached_property
    def limits(self) -> SchedulerConfig:
        """Returns the limits of a pass, for workers that prefill."""
        return self._limits(self.settings.scheduler)

    @cached_property
    def decode_limits(self) -> SchedulerConfig:
        """Returns the limits of workers that only decode."""
        return self._limits(self.settings.decode_scheduler or self.settings.scheduler)

    def _limits(self, limits: PassLimits) -> SchedulerConfig:
        """Returns limits, with those of the device in the place of what is not set."""
        at = self.placement.device
        family = read_config(self.settings.model_path).model_type
        gpu_bytes = self._memory(at).device_bytes if self.placement.is_cuda else 0
        return limits.on(gpu_bytes, keeps_states=family in (*RECURRENT_FAMILIES, *WINDOWED_FAMILIES))

    @cached_property
    def _allowed_bytes(self) -> int:
        device = self.placement.device
        if not self.placement.is_cuda:
            return total_bytes(device)
        return int(self._memory(device).device_bytes * self.settings.engine.gpu_memory_utilization)

    def _memory(self, device: torch.device) -> GPUMemory:
        """Returns the memory of the GPU, or of the part of it that is this worker's."""
        return GPUMemory.part_of(GPUMemory.now(device), self.settings.num_sharing, self._held_bytes())

    def _held_bytes(self) -> int:
        return self._weight_bytes() + sum(each.num_bytes for each in self._pools.values())

    def _weight_bytes(self) -> int:
        models = [model for model in (self._language, self._encoder) if model is not None]
        return sum(each.nbytes for model in models for each in model.parameters() if not each.is_meta)

    def encode(self, name: str) -> EncodeStage:
        model = self._encoder_model()
        cache, pool, connector = self._embeddings(name, model.config)
        tower = self.adapter.vision_tower(model)
        options, most = self.settings.engine, self._max_batch_patches
        encoder = FrameEncoder(
            self.adapter, tower, options.skip_static, options.tower_merge, most, self._captured(tower, most)
        )
        stage = EncodeStage(encoder, cache, pool, connector)
        if options.cache_dir is not None:
            facts = {"layout": str(pool.layout), **self._facts}
            files = kept_files(self.settings.model_path, options, EMBEDDINGS_KIND, facts)
            stage.keep_in(files, self._read_paces)
        return stage

    def _captured(self, tower: nn.Module, max_patches: int) -> nn.Module | None:
        """Returns what replays small calls of a tower, and says what it takes."""
        if not captures_tower(tower, self.placement, self.settings.engine):
            return None
        found, num_bytes = capture_tower(self.adapter, tower, max_patches, self.placement.device)
        if found is not None:
            most, num_gb = found.max_patches, num_bytes / 1e9
            logger.info("captured: calls of the tower of at most %d patches, %.2f GB", most, num_gb)
        return found

    def receiver(self, name: str) -> EmbeddingReceiver:
        cache, pool, connector = self._embeddings(name, self._language_model().config)
        return EmbeddingReceiver(cache, pool, connector)

    def prefill(self, name: str, *, decodes: bool = False) -> PrefillStage:
        """Returns the stage. decodes: whether it completes answers."""
        options = self.settings.engine
        kinds = captured_kinds({"prefill", "decode"} if decodes else {"prefill"}, options)
        engine, connector = self._engine(name, self.limits, kinds)
        if options.cache_dir is not None and self._keeps_kv(engine):
            files = kv_files(self.settings.model_path, options, engine.pools.shape, self._facts)
            layout = embedding_layout(self._language_model().config, self._embeddings_in)
            engine.keep_in(files, embedding_bytes=layout.bytes_per_embedding, paces=self._read_paces)
        return PrefillStage(engine, connector)

    @property
    def _facts(self) -> Mapping[str, str]:
        """Returns what changes pictures besides the engine's options."""
        settings, facts = self.settings, {"image_background": self.settings.image_background}
        is_cast = settings.encoded_in != settings.embeddings_in
        return facts | ({"encoded_in": str(settings.encoded_in)} if is_cast else {})

    @property
    def _embeddings_in(self) -> torch.dtype:
        return self.settings.embeddings_in or self.placement.dtype

    def _keeps_kv(self, engine: LanguageEngine) -> bool:
        """Returns whether keys and values are all that is kept of a prompt, and all in this process."""
        is_shared = self.settings.tensor_parallel.max_size > 1
        return self.settings.enable_prefix_caching and not is_shared and not engine.kv.spec.keeps_states

    def decode(self, name: str) -> DecodeStage:
        kinds = captured_kinds({"decode"}, self.settings.engine)
        engine, connector = self._engine(name, self.decode_limits, kinds)
        return DecodeStage(engine, connector)

    def close(self, name: str) -> None:
        """Closes the ends of that name, whose pools are no longer used."""
        self.transport.close(name)
        self._use = None
        if self._ranks is not None and f"{name} kv" in self._pools:
            EngineRanks(self._ranks, name).close()
        for kind in ("embeddings", "kv"):
            self._pools.pop(f"{name} {kind}", None)

    def drop_models(self, stages: AbstractSet[Stage]) -> None:
        """Frees the weights that none of these stages needs."""
        self._use = None
        if not stages & {"prefill", "decode"}:
            self._language = None
            self.end_ranks()
        if "encode" not in stages:
            self._encoder = None

    def check_roles(self, missing: AbstractSet[Stage]) -> None:
        """Raises RequestError if the worker cannot be given stages that it does not have."""
        sizes = self.settings.tensor_parallel
        if missing and not sizes.is_uniform:
            raise RequestError(
                f"received roles that need {', '.join(sorted(missing))} where {sizes.decode_size} processes "
                f"share the language model of a decode worker and {sizes.size} that of others; allowed: the "
                "roles that the worker was started with; start the application with one size for all"
            )

    def check_ranks(self) -> None:
        """Raises RankLostError if a process that shares the language model is lost."""
        if self._ranks is not None:
            self._ranks.check()

    def release(self) -> None:
        """Ends what runs beside the worker, and unpins its machine's weights."""
        self.end_ranks()
        if self._kept is not None:
            self._kept.close()

    def end_ranks(self) -> None:
        """Ends the processes that share the language model, if there are any."""
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None

    def _engine(
        self, name: str, scheduler: SchedulerConfig, captures: frozenset[PassKind]
    ) -> tuple[LanguageEngine, KVConnector]:
        settings, model = self.settings, self._language_model()
        options = settings.engine
        sizes = self._kv_tokens, BLOCK_SIZE, settings.num_kv_pools
        limits = scheduler.max_num_seqs, scheduler.max_chunk_tokens
        shape = kv_shape(model, *sizes, *limits, int8_values=options.int8_values)
        max_ranks = settings.tensor_parallel.max_size
        ranks = None if self._ranks is None else EngineRanks(self._ranks, name)
        sharing = PoolSharing(ranks, max_ranks) if max_ranks > 1 else None
        pools, connector = self.transport.kv(name, shape, self.placement.device, sharing)
        self._pools[f"{name} kv"], self._use = shape, None
        engine = build_engine(
            model,
            self.adapter,
            self.generation,
            pools,
            options=options,
            config=scheduler,
            enable_prefix_caching=settings.enable_prefix_caching,
            ranks=ranks,
            captures=captures,
        )
        return engine, connector

    def _embeddings(
        self, name: str, config: Any
    ) -> tuple[EncoderCacheManager, EncoderPool, EncoderConnector]:
        size = _EMBEDDINGS_PER_BLOCK
        num_blocks = self._num_embeddings // size
        shape = EncoderPoolShape(num_blocks, size, embedding_layout(config, self._embeddings_in))
        pool, connector = self.transport.embeddings(name, shape, self.placement.device)
        self._pools[f"{name} embeddings"], self._use = shape, None
        return EncoderCacheManager(num_blocks, size), pool, connector

    def _language_model(self) -> Any:
        if self._language is None:
            self._language = self._load("language")
        return self._language

    def _encoder_model(self) -> Any:
        if self._encoder is None:
            self._encoder = self._load("encode")
        return self._encoder

    def _load(self, role: WeightSet) -> Any:
        start_s, path, placement = time.perf_counter(), self.settings.model_path, self.placement
        has_head = self.settings.engine.has_draft_head
        if self._whole is not None:
            model = self._whole.part(role)
        elif self._kept is not None:
            model = load_role(path, role, placement, self._kept, with_draft_head=has_head).model
        else:
            size = self._num_ranks if role == "language" else 1
            model, ranks = load_with_ranks(path, role, placement, size, with_draft_head=has_head)
            self._ranks = ranks or self._ranks
        self.weights_s += time.perf_counter() - start_s
        return model

    def _share_weights(self) -> None:
        """Maps the weights that a machine's workers share: parts that are not run take no memory of a CPU.

        A GPU gets copies of its parts, so there they are kept for other roles alone. Ranks read their own.
        """
        settings, path = self.settings, self.settings.model_path
        is_apart = settings.is_alone or settings.tensor_parallel.max_size > 1
        if is_apart or (self.placement.is_cuda and not settings.keeps_weights):
            return
        weights = self.transport.weights(path, self.placement)
        if weights is None:
            return
        if self.placement.is_cuda:
            self._kept = HostWeights(weights, self.placement.device)
            return
        has_head = settings.engine.has_draft_head
        self._whole = WholeModel(path, self.placement, weights, with_draft_head=has_head)


def embedding_layout(config: Any, dtype: torch.dtype) -> EmbeddingLayout:
    """Returns the layout of one visual token from an encoder of this transformers configuration."""
    return EmbeddingLayout(config.get_text_config().hidden_size, dtype, num_deepstack(config))


def drafting_counters(counts: EngineCounts) -> dict[str, int]:
    """Returns what was drafted and accepted, under the names of vLLM's metrics."""
    return {
        "spec_decode_num_drafts": counts.num_drafts,
        "spec_decode_num_draft_tokens": counts.num_drafted_tokens,
        "spec_decode_num_accepted_tokens": counts.num_accepted_tokens,
    }
