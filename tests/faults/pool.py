"""The model and the questions that all seeds share: each is read, and answered undisturbed, once."""

from __future__ import annotations

import asyncio
import gc
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

from epd import video
from epd.encoders import Adapter, load_adapter
from epd.sampling_params import SamplingParams
from epd.serve_app.media import image_planner, media_worker
from epd.serve_app.media.frame_reader import FrameStream, stream_here
from epd.serve_app.media_messages import DecodeOrder
from epd.serve_app.network import memory
from epd.serve_app.network.process_transport import ProcessTransport
from epd.serve_app.orchestration import request_planner
from epd.serve_app.worker import worker_stages
from epd.stages.engine import model_runner, setup
from epd.stages.engine.generation import GenerationSettings, generation_settings
from epd.stages.loading.weights import WholeModel
from epd.stages.placement import Placement
from epd.types import Frames, MediaKind, UInt8Array
from tests.faults.exact_model import exact_model
from tests.media import write_image, write_video
from tests.serve_app import deployments, media_fleet
from tests.serve_app.deployments import Question, ask_alone, clear_questions
from tests.tiny_models import build_qwen2_5_vl

# What workers ask of the one model that all have.
_SAME = (
    (request_planner, "weights_revision"),
    (worker_stages, "read_config"),
    (model_runner, "decoder_of"),
    (setup, "kv_layouts"),
    (worker_stages, "load_with_ranks"),
    (WholeModel, "part"),
)
_MAX_READ = 512  # facts, or groups of frames, of media
_NUM_QUESTIONS = 40
_NUM_SPARE = 12  # whose tokens rounding may turn
_KINDS = ((), (), ("image",), ("video",), ("image", "video"))


@dataclass(frozen=True, slots=True)
class PoolQuestion:
    """A question, and the tokens of its undisturbed answer, of the model of tensors and of the exact one."""

    question: Question
    tokens: tuple[int, ...]
    exact: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pool:
    """A folder with a checkpoint, and questions about media beside it."""

    model: Path
    questions: tuple[PoolQuestion, ...]


def build_pool(folder: Path) -> Pool:
    """Writes a checkpoint and media into a folder, and answers questions in one worker, undisturbed."""
    model = build_qwen2_5_vl(folder / "model", num_hidden_layers=1)
    media = {"image": write_image(folder / "image.png"), "video": write_video(folder / "video.mp4")}
    rng = Random(1)
    drawn = [_question(rng, media, number) for number in range(_NUM_QUESTIONS + _NUM_SPARE)]
    questions, answers = clear_questions(model, drawn, _NUM_QUESTIONS, num_kv_tokens=8192)
    with exact_model():
        exact = asyncio.run(ask_alone(model, questions, {"num_kv_tokens": 8192}))
    pooled = tuple(
        PoolQuestion(question, answer.tokens, other.tokens)
        for question, answer, other in zip(questions, answers, exact, strict=True)
    )
    gc.collect()
    gc.freeze()  # what all seeds share: each of them collects
    return Pool(model, pooled)


def _question(rng: Random, media: dict[str, Path], number: int) -> Question:
    sampling = SamplingParams(
        max_tokens=rng.choice((2, 4, 8, 16, 24)),
        ignore_eos=True,
        seed=1000 + number,
        temperature=rng.choice((0.0, 0.0, 1.0)),
    )
    text = f"what {number % 9} is it{' really' * rng.choice((0, 0, 3, 40))}?"
    return Question(tuple(media[kind] for kind in rng.choice(_KINDS)), text, sampling)


class _Decoded:
    """Gives a video's groups of frames, which another stream has decoded."""

    def __init__(self, groups: Sequence[Frames]) -> None:
        self._groups = iter(groups)

    def read(self) -> Frames:
        return next(self._groups)

    def close(self) -> None: ...


class _SharedReader(video.OwnReader):
    """Reads media as its base does: media workers of all seeds share what comes of it.

    What was read last is kept: benchmarks draw new media for each round.
    """

    def __init__(self) -> None:
        self._read: dict[Any, Any] = {}

    def once(self, key: tuple[object, ...], read: Callable[[], Any]) -> Any:
        found = self._read.pop(key) if key in self._read else read()
        if len(self._read) >= _MAX_READ:
            del self._read[next(iter(self._read))]
        self._read[key] = found
        return found

    def look(self, file: video.OpenFile, name: str, *, as_audio: bool = False) -> video.MediaFacts:
        look = super().look
        found: video.MediaFacts = self.once((file.identity,), lambda: look(file, name, as_audio=as_audio))
        return found

    def load_image(self, file: video.OpenFile, name: str) -> UInt8Array:
        load = super().load_image
        pixels: UInt8Array = self.once((file.identity, "pixels"), lambda: load(file, name))
        return pixels

    def stream(
        self, file: video.OpenFile, name: str, order: DecodeOrder, _pixels: float = 0.0
    ) -> FrameStream:
        """Decodes all groups of an order, as `stream_here` does one after the other."""

        def groups() -> list[Frames]:
            stream = stream_here(file, name, order)
            return [stream.read() for _ in order.group_sizes]

        key = file.identity, order.times_s, order.size, order.group_sizes
        decoded = _Decoded(self.once(key, groups))
        file.close()
        return decoded


def use_own_folder() -> None:
    """Gives a process that shares seeds with others a folder of its own, within that of `read_once`."""
    folder = tempfile.mkdtemp()
    memory._MEMORY_FOLDER, tempfile.tempdir = Path(folder), folder


@contextmanager
def read_once() -> Iterator[None]:
    """Lets all workers of this process share the model and the media that the first one has read.

    Their shared memory and temporary files are in a folder of its own: other programs remove what seems to be
    left, and other simulations have the same names.
    """
    adapters: dict[str, Adapter] = {}
    models: dict[Path, WholeModel] = {}
    settings: dict[Path, GenerationSettings] = {}

    def adapter(path: str | Path, **options: Any) -> Adapter:
        key = f"{path} {options}"
        return adapters.get(key) or adapters.setdefault(key, load_adapter(path, **options))

    def whole(path: Path, placement: Placement, weights: Path, **options: Any) -> WholeModel:
        return models.get(path) or models.setdefault(path, WholeModel(path, placement, weights, **options))

    def generation(path: Path, adapter: Adapter) -> GenerationSettings:
        return settings.get(path) or settings.setdefault(path, generation_settings(path, adapter))

    def weights(transport: ProcessTransport, path: Path, placement: Placement) -> Path | None:
        return path if path in models else written(transport, path, placement)

    written, reader = ProcessTransport.weights, _SharedReader()

    def own_reader() -> _SharedReader:  # a mock would keep all calls
        return reader

    def kind(path: Path) -> MediaKind:
        found: MediaKind = reader.once((path, "kind"), lambda: video.media_kind(path))
        return found

    with ExitStack() as stack:
        for module in (worker_stages, request_planner, image_planner):
            stack.enter_context(mock.patch.object(module, "load_adapter", adapter))
        for module in (deployments, media_fleet):
            stack.enter_context(mock.patch.object(module, "media_kind", kind))
        stack.enter_context(mock.patch.object(media_worker, "stream_here", reader.stream))
        stack.enter_context(mock.patch.object(video, "OwnReader", own_reader))
        stack.enter_context(mock.patch.object(worker_stages, "WholeModel", whole))
        for module in (worker_stages, request_planner):
            stack.enter_context(mock.patch.object(module, "generation_settings", generation))
        for module, name in _SAME:
            stack.enter_context(mock.patch.object(module, name, cache(getattr(module, name))))
        stack.enter_context(mock.patch.object(ProcessTransport, "weights", weights))
        in_memory = memory._MEMORY_FOLDER if memory._MEMORY_FOLDER.is_dir() else None  # a disk takes longer
        folder = stack.enter_context(TemporaryDirectory(prefix="epd-faults-", dir=in_memory))
        stack.enter_context(mock.patch.object(memory, "_MEMORY_FOLDER", Path(folder)))
        stack.enter_context(mock.patch.object(tempfile, "tempdir", folder))
        stack.callback(gc.unfreeze)
        yield
