"""Holds the common parts of the pipelines of one process: a checkpoint, its encoder and its engine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Self

import torch

from epd.encode.encode_batching import BATCH_PATCHES
from epd.encoders import Adapter, load_adapter
from epd.encoders.batch import FrameEncoder
from epd.encoders.device import device_of
from epd.engine_config import DEFAULT_ENGINE, EngineConfig
from epd.kv.scheduling import SchedulerConfig
from epd.machine import usable_cpus
from epd.stages.engine.generation import GenerationSettings, generation_settings
from epd.stages.engine.setup import build_engine
from epd.stages.loading.weights import OnBytes
from epd.stages.memory_sizing import LargestPasses, MemoryShare, measured_kv_tokens
from epd.stages.placement import Placement
from epd.stages.rank import RankGroup
from epd.stages.ranks.loading import load_with_ranks

# Patches that at most become one visual token, of the families here.
_PATCHES_OF_TOKEN = 16


class Pipeline:
    """Loads one checkpoint to encode media and to answer questions about them."""

    def __init__(
        self,
        model: Any,
        adapter: Adapter,
        *,
        settings: GenerationSettings,
        config: EngineConfig = DEFAULT_ENGINE,
        ranks: RankGroup | None = None,
    ) -> None:
        """Takes ownership of the model: its attention function becomes ours.

        ranks: that share the language model, of which the model has rank 0's part.
        """
        self.adapter = adapter
        self.settings = settings
        self.engine = build_engine(model, adapter, settings, options=config, ranks=ranks)
        tower = adapter.vision_tower(model)
        most = BATCH_PATCHES[device_of(tower).type]
        self.encoder = FrameEncoder(adapter, tower, config.skip_static, config.tower_merge, most)
        self.group_tokens = config.group_tokens

    @classmethod
    def load(
        cls,
        model_path: str | Path,
        config: EngineConfig = DEFAULT_ENGINE,
        *,
        on_progress: OnBytes | None = None,
    ) -> Self:
        """Loads the folder `model_path`, in Hugging Face layout.

        Threads are those of the whole process. Without num_kv_tokens, keys and values have what a quarter of
        the machine's memory holds, or less, taken when it is first used; on a GPU, what the largest passes
        leave of its memory.
        on_progress: called with the bytes of weights that have been read, and with all of them.
        Raises RequestError, ModelNotFoundError, UnsupportedModelError, ModelError, InfeasibleError for
        weights that the memory has no room for, and RankLostError.
        """
        path = Path(model_path)
        adapter = load_adapter(path, pixels=config.pixels)
        use_threads(config.num_threads, config.tensor_parallel_size)
        placement = Placement.resolve(config.device, config.dtype, path)
        model, ranks = load_with_ranks(path, "whole", placement, config.tensor_parallel_size, on_progress)
        settings = generation_settings(path, adapter)
        if config.num_kv_tokens is None:
            scheduler = SchedulerConfig()
            passes = LargestPasses(
                config.group_tokens * _PATCHES_OF_TOKEN,
                scheduler.max_chunk_tokens,
                0 if config.enforce_eager else scheduler.max_num_seqs,
            )
            room = measured_kv_tokens(
                model,
                adapter.vision_tower(model),
                adapter,
                settings,
                placement,
                passes,
                MemoryShare(config, name=path.name),
                ranks=ranks,
            )
            config = config.model_copy(update={"num_kv_tokens": room})
        return cls(model, adapter, settings=settings, config=config, ranks=ranks)


def use_threads(num_threads: int | None, num_processes: int = 1) -> None:
    """Sets torch's number of threads; by default OMP_NUM_THREADS, else the cores we may use.

    num_processes: that share these threads.
    """
    num = num_threads or int(os.environ.get("OMP_NUM_THREADS") or usable_cpus())
    torch.set_num_threads(max(1, num // num_processes))
