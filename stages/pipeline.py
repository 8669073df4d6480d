"""Holds the common parts of the pipelines of one process: a checkpoint, its encoder and its engine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Self

import torch

from epd.encode.encode_batching import BATCH_PATCHES
from epd.encode.group_cut import GROUP_TOKENS
from epd.encoders import Adapter, load_adapter
from epd.encoders.batch import FrameEncoder
from epd.encoders.device import device_of
from epd.kv.drafting import NO_DRAFTS, DraftConfig
from epd.kv.scheduling import SchedulerConfig
from epd.machine import usable_cpus
from epd.pixel_settings import AUTHORS_LIMITS, PixelSettings
from epd.reduction import TowerMerge
from epd.stages.engine.generation import GenerationSettings, generation_settings
from epd.stages.engine.setup import build_engine
from epd.stages.loading.weights import OnBytes
from epd.stages.memory_sizing import DEFAULT_UTILIZATION, LargestPasses, measured_kv_tokens
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
        group_tokens: int = GROUP_TOKENS,
        num_kv_tokens: int | None = None,
        skip_static: float | None = None,
        merge: TowerMerge | None = None,
        drafting: DraftConfig = NO_DRAFTS,
        ranks: RankGroup | None = None,
        enforce_eager: bool = False,
    ) -> None:
        """Takes ownership of the model: its attention function becomes ours. Options as in `load`.

        ranks: that share the language model, of which the model has rank 0's part.
        """
        self.adapter = adapter
        self.settings = settings
        self.engine = build_engine(
            model,
            adapter,
            settings,
            num_kv_tokens=num_kv_tokens,
            drafting=drafting,
            ranks=ranks,
            enforce_eager=enforce_eager,
        )
        tower = adapter.vision_tower(model)
        most = BATCH_PATCHES[device_of(tower).type]
        self.encoder = FrameEncoder(adapter, tower, skip_static, merge, most)
        self.group_tokens = group_tokens

    @classmethod
    def load(
        cls,
        model_path: str | Path,
        *,
        placement: Placement | None = None,
        num_threads: int | None = None,
        group_tokens: int = GROUP_TOKENS,
        num_kv_tokens: int | None = None,
        gpu_memory_utilization: float = DEFAULT_UTILIZATION,
        skip_static: float | None = None,
        merge: TowerMerge | None = None,
        drafting: DraftConfig = NO_DRAFTS,
        tensor_parallel_size: int = 1,
        enforce_eager: bool = False,
        pixels: PixelSettings = AUTHORS_LIMITS,
        on_progress: OnBytes | None = None,
    ) -> Self:
        """Loads the folder `model_path`, in Hugging Face layout.

        placement: where the model runs, and in which type; by default `Placement.resolve` decides.
        num_threads: of torch, for the whole process; by default OMP_NUM_THREADS or all cores.
        group_tokens: about how many visual tokens are encoded and prefilled at a time.
        num_kv_tokens: room for keys and values; by default what a quarter of the machine's memory holds, or
        less, taken when it is first used. On a GPU, what the largest passes leave of its memory.
        gpu_memory_utilization: the share of a GPU's memory that may be used.
        skip_static: a unit of frames is not encoded if none of its preprocessed values differs by more than
        this from the unit before; by default all are encoded.
        merge: how many tokens the later layers of the tower compute; by default all.
        drafting: who proposes tokens, for one pass to check.
        tensor_parallel_size: processes that share the language model, each on a GPU of its own.
        enforce_eager: see `build_engine`.
        pixels: of images and frames; by default as the model's authors have them.
        on_progress: called with the bytes of weights that have been read, and with all of them.
        Raises RequestError, ModelNotFoundError, UnsupportedModelError, ModelError, InfeasibleError for
        weights that the memory has no room for, and RankLostError.
        """
        path = Path(model_path)
        adapter = load_adapter(path, pixels=pixels)
        use_threads(num_threads, tensor_parallel_size)
        placement = placement or Placement.resolve(model_path=path)
        model, ranks = load_with_ranks(path, "whole", placement, tensor_parallel_size, on_progress)
        settings = generation_settings(path, adapter)
        if num_kv_tokens is None:
            scheduler = SchedulerConfig()
            passes = LargestPasses(
                max(group_tokens, 1) * _PATCHES_OF_TOKEN,
                scheduler.max_chunk_tokens,
                0 if enforce_eager else scheduler.max_num_seqs,
            )
            num_kv_tokens = measured_kv_tokens(
                model,
                adapter.vision_tower(model),
                adapter,
                settings,
                placement,
                passes,
                utilization=gpu_memory_utilization,
                name=path.name,
                ranks=ranks,
            )
        return cls(
            model,
            adapter,
            settings=settings,
            group_tokens=group_tokens,
            num_kv_tokens=num_kv_tokens,
            skip_static=skip_static,
            merge=merge,
            drafting=drafting,
            ranks=ranks,
            enforce_eager=enforce_eager,
        )


def use_threads(num_threads: int | None, num_processes: int = 1) -> None:
    """Sets torch's number of threads; by default OMP_NUM_THREADS, else the cores we may use.

    num_processes: that share these threads.
    """
    num = num_threads or int(os.environ.get("OMP_NUM_THREADS") or usable_cpus())
    torch.set_num_threads(max(1, num // num_processes))
