"""Defines what a worker is started with: its settings, and the ends by which data reaches others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from epd.engine_config import DEFAULT_ENGINE, EngineConfig
from epd.kv.pass_limits import PassLimits
from epd.stages.encode.encoder_pool import EncoderPool, EncoderPoolShape
from epd.stages.engine.kv_pool import KVPools, KVPoolsShape
from epd.stages.placement import Placement
from epd.stages.ranks.group_pools import PoolSharing
from epd.topology import Stage, TensorParallel
from epd.transfer.connectors import EncoderConnector, KVConnector


class WorkerPace(Protocol):
    """Lets the passes of workers last as long as on other devices; see `epd.serve_app.local.pacing`."""

    def slow(self, stage: Stage, role: Any) -> None:
        """Changes a stage that was just built."""
        ...

    def started(self, start_s: float) -> None:
        """Waits for new roles. start_s: when they were asked for, by `time.perf_counter`."""
        ...


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Settings that all workers of a model share.

    engine: see `EngineConfig`; each worker resolves device and dtype in its own process, and workers that
    share embeddings must agree on what changes them
    num_embeddings: room for embeddings, at an encoder and at its receivers; None for DEFAULT_EMBEDDINGS, or
    EMBEDDING_SHARE of a GPU if the engine's num_kv_tokens is not set either
    max_batch_patches: that an encoder batches, None for BATCH_PATCHES of its device
    max_resize_pixels: that a request may ask for an image, above the model's own limit
    decode_scheduler: of workers that only decode, None for `scheduler`
    num_kv_pools: that share the machine's memory if num_kv_tokens is not set
    is_alone: whether it is the model's only worker, which shares its weights with none
    num_sharing: workers of this process, which share its GPU
    tensor_parallel: processes that share the language model of a worker
    encode_beside: in workers with other stages too, the tower runs in a thread of its own
    num_threads: of torch, for this worker's thread alone; None for the process' number
    encoded_in, embeddings_in: types that encoders compute in and language models take, where workers are of
    several classes; None for the placement's
    image_background: colour behind transparent images, which changes what is kept of them
    keeps_weights: a GPU worker copies the weights of other roles from its machine's memory: see `HostWeights`
    samples_load: reports have samples by which load is estimated: where roles or replicas may follow it
    switchable: sets of roles that workers may get; on a GPU there is room to encode besides, if one has it
    pace: of passes that last as on other devices; None, and always None beyond this process, for no other
    """

    model_path: Path
    engine: EngineConfig = DEFAULT_ENGINE
    scheduler: PassLimits = field(default_factory=PassLimits)
    enable_prefix_caching: bool = True
    num_embeddings: int | None = None
    max_batch_patches: int | None = None
    max_resize_pixels: int | None = None
    decode_scheduler: PassLimits | None = None
    num_kv_pools: int = 1
    is_alone: bool = False
    num_sharing: int = 1
    tensor_parallel: TensorParallel = field(default_factory=TensorParallel)
    encode_beside: bool = True
    num_threads: int | None = None
    encoded_in: torch.dtype | None = None
    embeddings_in: torch.dtype | None = None
    image_background: str = ""
    keeps_weights: bool = False
    samples_load: bool = True
    switchable: tuple[frozenset[Stage], ...] = ()
    pace: WorkerPace | None = None

    def placement(self) -> Placement:
        """Returns where the models of this process run. Raises RequestError for what the machine lacks."""
        options = self.engine
        return Placement.resolve(options.device, options.dtype, self.model_path, options.quantization)


class Transport(Protocol):
    """Gives a worker its ends of the connectors; names are those of `epd.serve_app.messages.endpoint`."""

    def embeddings(
        self, name: str, shape: EncoderPoolShape, device: torch.device
    ) -> tuple[EncoderPool, EncoderConnector]:
        """Creates a pool on a device, where others can reach it, and the end that moves its embeddings."""
        ...

    def kv(
        self, name: str, shape: KVPoolsShape, device: torch.device, sharing: PoolSharing | None = None
    ) -> tuple[KVPools, KVConnector]:
        """Creates the same for keys and values. sharing: where workers have several ranks."""
        ...

    def weights(self, path: Path, placement: Placement) -> Path | None:
        """Returns a file of the model's weights in memory shared by a machine's workers; None if not shared.

        Raises ModelError.
        """
        ...

    def routes(self) -> Mapping[str, str]:
        """Returns the way that data last took to other workers, by name: see `network.routes`."""
        ...

    def close(self, name: str) -> None:
        """Closes the ends of that name. Unknown names are ignored."""
        ...
