"""Measures what each stage costs on this machine: the measured half of `epd profile`."""

from __future__ import annotations

import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from epd.encoders import load_adapter, num_deepstack
from epd.encoders.groups import FrameEncoder
from epd.engine_config import EngineConfig
from epd.host_memory import resident_bytes, resident_peak_bytes
from epd.kv.pass_limits import SchedulerConfig
from epd.profiles.cost import StageTable, fit_table
from epd.profiles.measuring import Action, core_speed, measurement, table, timed
from epd.profiles.memory import MemoryNeeds
from epd.profiles.profile import Profile
from epd.stages.device_memory import total_bytes
from epd.stages.encode.beside import beside_of, wall_clock
from epd.stages.engine.generation import generation_settings
from epd.stages.engine.model_runner import kv_layouts
from epd.stages.engine.setup import build_engine, default_kv_tokens
from epd.stages.engine.state_pool import state_layout
from epd.stages.loading.host_weights import copy_seconds
from epd.stages.loading.weights import OnBytes, load_role, part_bytes
from epd.stages.memory_sizing import text_request
from epd.stages.placement import CPU_FLOAT32, Placement, use_threads
from epd.stages.profiled_media import Points, Reading, Sample, media_of

_PROMPT_TOKENS, _CHUNKS = 1024, (32, 128, 512)
_DECODE_BATCHES, _DECODE_CONTEXTS = (1, 4, 16), (64, 512)
_BESIDE_BATCH, _BESIDE_SEQUENCES, _BESIDE_TOKENS, _BESIDE_ROUNDS = 8, 4, 4096, 20
_TRANSFER_BYTES = (2**14, 2**18, 2**22, 2**25)
_SPEED_S = 0.3
_PAGE_BYTES = 4096
_PEAK_BATCHES, _PEAK_CHUNKS = (2, 8), (128, 512)


class Profiler:
    """Loads a model and measures each of its stages alone."""

    def __init__(
        self,
        path: Path,
        num_threads: int,
        placement: Placement = CPU_FLOAT32,
        on_progress: OnBytes | None = None,
        kv_cache_dtype: str = "auto",
    ) -> None:
        self.adapter: Any = load_adapter(path)
        self._media = media_of(self.adapter)
        self._idle_bytes = resident_bytes()
        use_threads(num_threads)
        self.placement = placement
        self.clock = _clock(placement, num_threads)
        loaded = load_role(path, "whole", placement, on_progress=on_progress)
        self.model: Any = loaded.model
        # A switch maps weights that a machine's workers share, or copies them to its GPU.
        copy_s = copy_seconds(loaded.num_bytes, placement.device) if placement.is_cuda else 0.0
        start_s = time.perf_counter()
        self._options = EngineConfig(kv_cache_dtype=kv_cache_dtype)
        settings = generation_settings(path, self.adapter)
        self.engine: Any = build_engine(self.model, self.adapter, settings, options=self._options)
        self._switch_s = copy_s + time.perf_counter() - start_s
        self._num_requests = 0

    def profile(self, name: str, device: str, num_repeats: int, show: Callable[[int, int], None]) -> Profile:
        """Measures all stages.

        name, device: of the model and the machine, in the profile.
        num_repeats: runs of each point.
        show: called with the stages that are done and all stages.
        """
        with tempfile.TemporaryDirectory(prefix="epd-profile-") as folder, torch.inference_mode():
            stages = (
                Reading("encode", "patches", "groups", self._encode_points()),
                Reading("transfer", "bytes", "transfers", _transfer_points()),
                *self._media.readings(Path(folder)),
            )
            memory = self.memory()  # first: what is measured later leaves its own in the process
            tables: dict[str, StageTable] = {}
            speeds = [core_speed(_SPEED_S)]
            for done, (stage, units, items, points) in enumerate(stages, start=1):
                tables[stage] = table(units, items, points, num_repeats, self.clock)
                speeds.append(core_speed(_SPEED_S))
                show(done, len(stages) + 2)
            for stage, measure in (("prefill", self._prefill_table), ("decode", self._decode_table)):
                tables[stage] = measure(num_repeats)
                speeds.append(core_speed(_SPEED_S))
                show(len(tables), len(stages) + 2)
            beside = self._beside()
        num_threads = torch.get_num_threads()
        return Profile(
            name=f"{name}@{device}",
            model=name,
            device=device,
            is_analytic=False,
            media=self._media.rule(),
            memory=memory,
            encode=tables["encode"],
            prefill=tables["prefill"],
            decode=tables["decode"],
            transfer=tables["transfer"],
            video={"h264": tables["video"]} if "video" in tables else {},
            images=tables.get("images"),
            audio=tables.get("audio"),
            assumptions=(
                f"measured: {num_repeats} runs a point, every stage alone, {self.placement}, {num_threads} "
                f"threads, {'CPU' if self.clock is time.process_time else 'wall'} time",
                "a transfer is a copy in memory; messages between processes are not in it",
            ),
            dtype=self.placement.dtype_name,
            kv_cache_dtype=self._options.kv_cache_dtype,
            quantization=self.placement.quantization,
            num_threads=num_threads,
            switch_s=self._switch_s,
            core_speed=sum(speeds) / len(speeds),
            beside=beside,
        )

    def _encode_points(self) -> Points:
        """Measures batches of media; making patches is part of it."""
        for sample, batch in self._media.batches():
            yield sample.plan.grid.num_patches * batch, batch, self._encoding(sample, batch)

    def _encoding(self, sample: Sample, batch: int) -> Action:
        encoder = FrameEncoder(self.adapter, self.adapter.vision_tower(self.model))

        def encode() -> None:
            encoder.encode([encoder.patches(sample.frames, sample.plan) for _ in range(batch)])

        return encode

    def _request(self, num_tokens: int, max_tokens: int) -> Any:
        self._num_requests += 1
        return text_request(f"profile-{self._num_requests}", self.adapter, num_tokens, max_tokens)

    def _limit(self, num_tokens: int) -> None:
        self.engine.scheduler.config = SchedulerConfig(num_tokens, 64, num_tokens)

    def _prefill_table(self, num_repeats: int) -> StageTable:
        """Measures one long prompt in chunks: each is a point of new tokens on past ones."""
        seconds: dict[tuple[int, int], list[float]] = {}
        for run in range(num_repeats + 1):
            for chunk in _CHUNKS:
                self._limit(chunk)
                self.engine.add(self._request(_PROMPT_TOKENS, 1))
                for past in range(0, _PROMPT_TOKENS, chunk):
                    elapsed_s = timed(self.engine.step, self.clock)
                    if run:  # the first does not count
                        seconds.setdefault((chunk, past), []).append(elapsed_s)
        points = [
            measurement(chunk, chunk * past + chunk * (chunk + 1) // 2, each)
            for (chunk, past), each in seconds.items()
        ]
        return fit_table("new tokens", "token pairs", points)

    def _decode_table(self, num_repeats: int) -> StageTable:
        points = []
        for batch in _DECODE_BATCHES:
            for context in _DECODE_CONTEXTS:
                with self._decoding(batch, context, num_repeats + 8):
                    seconds = [timed(self.engine.step, self.clock) for _ in range(num_repeats)]
                points.append(measurement(batch, batch * (context + 2 + num_repeats / 2), seconds))
        return fit_table("sequences", "context tokens", points)

    @contextmanager
    def _decoding(self, batch: int, context: int, max_tokens: int) -> Iterator[None]:
        """Has requests that decode, and nothing else, in the engine."""
        self._limit(4096)
        requests = [self._request(context, max_tokens) for _ in range(batch)]
        for request in requests:
            self.engine.add(request)
        scheduler = self.engine.scheduler
        while scheduler.waiting or any(not each.is_decoding for each in scheduler.running):
            self.engine.step()
        self.engine.step()
        yield
        for request in requests:
            self.engine.abort(request.request_id)

    def _beside(self) -> float:
        device = self.placement.device
        _, encode = self._batch(_BESIDE_BATCH)
        with self._decoding(_BESIDE_SEQUENCES, _DECODE_CONTEXTS[0], _BESIDE_TOKENS):
            return beside_of(encode, self.engine.step, device, _BESIDE_ROUNDS, wall_clock(device))

    def memory(self) -> MemoryNeeds:
        """Measures what sizes the memory of a worker; to be called in inference mode."""
        vision, total = part_bytes(self.model, "encode"), part_bytes(self.model, "whole")
        config = self.model.config
        layers = 1 + num_deepstack(config)
        item_bytes = self.placement.dtype.itemsize
        layouts = kv_layouts(self.model, int8_values=self._options.int8_values)
        states = state_layout(self.model)
        kv_bytes = sum(layout.bytes_per_token for layout, window in layouts if window is None)
        windows = {window: layout.bytes_per_token for layout, window in layouts if window is not None}
        fixed_bytes = self._fixed_bytes(total)
        encode_bytes = _slope(map(self._encode_peak, _PEAK_BATCHES))
        prefill_bytes = _slope(map(self._prefill_peak, _PEAK_CHUNKS))
        return MemoryNeeds(
            device_bytes=total_bytes(self.placement.device),
            vision_weight_bytes=vision,
            language_weight_bytes=total - vision,
            kv_bytes_per_token=kv_bytes,
            embedding_bytes_per_token=item_bytes * layers * config.get_text_config().hidden_size,
            max_kv_tokens=default_kv_tokens(kv_bytes),
            encode_bytes_per_patch=encode_bytes,
            prefill_bytes_per_token=prefill_bytes,
            logits_bytes_per_sequence=4.0 * config.get_text_config().vocab_size,
            fixed_bytes=fixed_bytes,
            state_bytes=0 if states is None else states.bytes_per_sequence,
            window_bytes_per_token=sum(windows.values()),
            window_tokens=max(windows, default=0),
        )

    def _fixed_bytes(self, weight_bytes: int) -> int:
        """Measures what a process holds at the peak of a batch beside its weights and live tensors.

        Modules, kernels with their workspaces, holes of the heap; above what an idle process has. 0 on a GPU.
        """
        if self.placement.is_cuda:
            return 0
        for parameter in self.model.parameters():
            bytes_of = parameter.detach().reshape(-1).view(torch.uint8)
            bytes_of[::_PAGE_BYTES].sum()  # files are mapped
        _, encode = self._batch(_PEAK_BATCHES[-1])
        resident = resident_peak_bytes(encode)
        return max(0, resident - self._idle_bytes - weight_bytes - peak_bytes(encode))

    def _encode_peak(self, size: int) -> tuple[int, int]:
        """Returns (patches, bytes) of one batch."""
        num_patches, encode = self._batch(size)
        return num_patches, peak_bytes(encode)

    def _batch(self, size: int) -> tuple[int, Action]:
        """Returns (patches, what encodes them) of a batch of typical media."""
        sample = self._media.typical()
        return sample.plan.grid.num_patches * size, self._encoding(sample, size)

    def _prefill_peak(self, num_tokens: int) -> tuple[int, int]:
        """Returns (tokens, bytes) of one pass."""
        self._limit(num_tokens)
        self.engine.add(self._request(num_tokens, 1))
        return num_tokens, peak_bytes(self.engine.step)


def _slope(points: Iterable[tuple[int, int]]) -> float:
    """Returns the bytes for one more unit, by the first and the last of (units, bytes)."""
    (first, least), *_, (last, most) = points
    return max(0.0, (most - least) / (last - first))


def _clock(placement: Placement, num_threads: int) -> Callable[[], float]:
    """Returns the clock of all measurements: CPU time of one thread or wall time; a GPU completes first."""
    if placement.is_cuda or num_threads != 1:
        return wall_clock(placement.device)
    return time.process_time


def _transfer_points() -> Points:
    for num_bytes in _TRANSFER_BYTES:
        source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
        yield num_bytes, 0, lambda source=source, target=target: np.copyto(target, source)  # type: ignore[misc]


def peak_bytes(action: Callable[[], object]) -> int:
    """Runs an action and returns the most bytes of new tensors that lived at once.

    Counts the storages of all results while they live, on every device; what an operator takes and gives back
    inside of itself is not seen. The same on every run, unlike the memory of the process.
    """
    watch = _Watch()
    with watch:
        action()
    return watch.peak


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Follows storages from the operator that makes them to their end."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak: int = 0
        self._held = 0
        self._known: dict[int, int] = {}  # bytes by address of the memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        old = {_address(each) for each in _tensors((args, kwargs))}
        results = func(*args, **(kwargs or {}))
        for tensor in _tensors(results):
            if _address(tensor) not in old:
                self._add(tensor)
        self.peak = max(self.peak, self._held)
        return results

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address in self._known or not storage.nbytes():
            return
        self._known[address] = storage.nbytes()
        self._held += storage.nbytes()
        weakref.finalize(storage, self._drop, address)

    def _drop(self, address: int) -> None:
        self._held -= self._known.pop(address, 0)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(values: Any) -> list[torch.Tensor]:
    """Lists tensors; a matrix that oneDNN has laid out has no storage to count."""
    leaves = torch.utils._pytree.tree_leaves(values)
    return [each for each in leaves if isinstance(each, torch.Tensor) and not each.is_mkldnn]
