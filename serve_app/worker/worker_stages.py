"""Builds the stages of one worker, each from the checkpoint with only the weights of its role."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from encoders import Adapter, load_adapter
from encoders.names import WeightSet
from epd.encode.encoder_cache import EncoderCacheManager
from epd.kv.scheduling import SchedulerConfig
from epd.transfer.connectors import EncoderConnector, KVConnector
from stages.decode import DecodeStage
from stages.encode.embedding_receiver import EmbeddingReceiver
from stages.encode.encoder import EncodeStage
from stages.encode.encoder_pool import EmbeddingLayout, EncoderPool, EncoderPoolShape
from stages.engine.engine import LanguageEngine
from stages.engine.generation import generation_settings
from stages.engine.kv_pool import KVPools, KVPoolsShape
from stages.engine.setup import BLOCK_SIZE, build_engine, kv_shape
from stages.placement import Placement
from stages.prefill import PrefillStage
from stages.weights import WholeModel, load_role


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Settings that all workers of a model share.

    device, dtype: see `Placement.resolve`; each worker resolves them in its own process
    num_kv_tokens: room for keys and values, None as in `ColocatedPipeline.load`
    max_draft: see `LanguageEngine`
    num_embeddings: room for embeddings, at an encoder and at its receivers
    max_batch_patches: that an encoder batches
    skip_static: see `encoders.batch.FrameEncoder`; affects embeddings, so workers that share them must agree
    decode_scheduler: of workers that only decode, None for `scheduler`
    num_kv_pools: that share the machine's memory if num_kv_tokens is not set
    is_alone: whether it is the model's only worker, which shares its weights with none
    """

    model_path: Path
    device: str = "auto"
    dtype: str = "auto"
    num_kv_tokens: int | None = None
    block_size: int = BLOCK_SIZE
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    enable_prefix_caching: bool = True
    max_draft: int = 0
    num_embeddings: int = 65_536
    embeddings_per_block: int = 16
    max_batch_patches: int = 4096
    skip_static: float | None = None
    decode_scheduler: SchedulerConfig | None = None
    num_kv_pools: int = 1
    is_alone: bool = False

    def placement(self) -> Placement:
        """Returns where the models of this process run. Raises RequestError for what the machine lacks."""
        return Placement.resolve(self.device, self.dtype, self.model_path)


class Transport(Protocol):
    """Gives a worker its ends of the connectors; names are those of `serve_app.messages.endpoint`."""

    def embeddings(
        self, name: str, shape: EncoderPoolShape, device: torch.device
    ) -> tuple[EncoderPool, EncoderConnector]:
        """Creates a pool on a device, where others can reach it, and the end that moves its embeddings."""
        ...

    def kv(self, name: str, shape: KVPoolsShape, device: torch.device) -> tuple[KVPools, KVConnector]:
        """Creates the same for keys and values."""
        ...

    def weights(self, path: Path, placement: Placement) -> Path | None:
        """Returns a file of the model's weights in memory shared by a machine's workers; None if not shared.

        Raises ModelError.
        """
        ...

    def close(self, name: str) -> None:
        """Closes the ends of that name. Unknown names are ignored."""
        ...


class StageBuilder:
    """Builds stages for one worker; weights that two of them share are loaded once."""

    def __init__(self, settings: WorkerSettings, transport: Transport) -> None:
        self.settings = settings
        self.transport = transport
        self.adapter: Adapter = load_adapter(settings.model_path)
        self.placement = settings.placement()
        self.generation = generation_settings(settings.model_path, self.adapter)
        self.weights_s = 0.0  # spent on weights so far
        self._whole = self._mapped()
        self._language: Any = None

    def encode(self, name: str) -> EncodeStage:
        model = self._load("encode")
        cache, pool, connector = self._embeddings(name, model.config)
        tower = self.adapter.vision_tower(model)
        return EncodeStage(
            self.adapter,
            tower,
            cache,
            pool,
            connector,
            max_batch_patches=self.settings.max_batch_patches,
            skip_static=self.settings.skip_static,
        )

    def receiver(self, name: str) -> EmbeddingReceiver:
        cache, pool, connector = self._embeddings(name, self._language_model().config)
        return EmbeddingReceiver(cache, pool, connector)

    def prefill(self, name: str) -> PrefillStage:
        engine, connector = self._engine(name, self.settings.scheduler)
        return PrefillStage(engine, connector)

    def decode(self, name: str) -> DecodeStage:
        engine, connector = self._engine(name, self.settings.decode_scheduler or self.settings.scheduler)
        return DecodeStage(engine, connector)

    def drop_language_model(self) -> None:
        """Frees the weights that neither prefill nor decode needs now."""
        self._language = None

    def _engine(self, name: str, scheduler: SchedulerConfig) -> tuple[LanguageEngine, KVConnector]:
        settings, model = self.settings, self._language_model()
        shape = kv_shape(model, settings.num_kv_tokens, settings.block_size, settings.num_kv_pools)
        pools, connector = self.transport.kv(name, shape, self.placement.device)
        engine = build_engine(
            model,
            self.adapter,
            self.generation,
            pools,
            config=scheduler,
            enable_prefix_caching=settings.enable_prefix_caching,
            max_draft=settings.max_draft,
        )
        return engine, connector

    def _embeddings(
        self, name: str, config: Any
    ) -> tuple[EncoderCacheManager, EncoderPool, EncoderConnector]:
        size = self.settings.embeddings_per_block
        num_blocks = self.settings.num_embeddings // size
        shape = EncoderPoolShape(num_blocks, size, embedding_layout(config, self.placement.dtype))
        pool, connector = self.transport.embeddings(name, shape, self.placement.device)
        return EncoderCacheManager(num_blocks, size), pool, connector

    def _language_model(self) -> Any:
        if self._language is None:
            self._language = self._load("language")
        return self._language

    def _load(self, role: WeightSet) -> Any:
        start_s = time.perf_counter()
        if self._whole is not None:
            model = self._whole.part(role)
        else:
            model = load_role(self.settings.model_path, role, self.placement).model
        self.weights_s += time.perf_counter() - start_s
        return model

    def _mapped(self) -> WholeModel | None:
        """Returns the whole model if workers share its weights: parts that are not run take no memory."""
        path = self.settings.model_path
        weights = None if self.settings.is_alone else self.transport.weights(path, self.placement)
        if weights is None:
            return None
        return WholeModel(path, self.placement, weights)


def embedding_layout(config: Any, dtype: torch.dtype) -> EmbeddingLayout:
    """Returns the layout of one visual token from an encoder of this transformers configuration."""
    deepstack = getattr(config.vision_config, "deepstack_visual_indexes", None) or ()
    return EmbeddingLayout(config.get_text_config().hidden_size, dtype, len(deepstack))
