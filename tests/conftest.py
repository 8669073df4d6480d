"""The checkpoints and media under test.

Runs before any test module is imported, so that all of them are offline and keep to few threads. Property
tests draw the same examples each time, so that a commit passes or fails; `make explore` draws others.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["OMP_WAIT_POLICY"] = "passive"
# Beside a second process of tests, each keeps to one core.
os.environ.setdefault("OMP_NUM_THREADS", "1" if "PYTEST_XDIST_WORKER" in os.environ else "2")

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from tests import media_servers

if TYPE_CHECKING:
    from tests.reference import Subject
    from tests.tiny_audio import Reference

# What is imported stays: it is not searched for garbage while it grows, nor after it is frozen.
gc.disable()
# The machine may be busy: no example has a deadline, and drawing them may take long.
BUSY: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("same", derandomize=True, **BUSY)
settings.register_profile("explore", **BUSY)
settings.load_profile("same")
# Else it draws constants of the modules that are imported, which in another order of files are others.
providers._get_local_constants = providers.Constants  # type: ignore[assignment]


class _Loggers(dict[str, logging.Logger | logging.PlaceHolder]):
    """Lists the loggers at one time: pytest goes over them unlocked, and a thread may import a module."""

    def values(self) -> list[logging.Logger | logging.PlaceHolder]:  # type: ignore[override]
        return list(super().values())


logging.root.manager.loggerDict = _Loggers(logging.root.manager.loggerDict)

# Start Ray, or look at what Ray leaves in the folders of the machine: never two of them at once.
RAY_FILES = (
    "tests/batch/test_ask.py",
    "tests/serve_app/ray/",
    "tests/serve_app/cli/test_serve_command.py",
)
# Take more than half a minute each: begun last, one would keep a process busy when the others are done.
LONG_FILES = (
    "tests/test_package.py",
    "tests/serve_app/http/test_slow_clients.py",
    "tests/test_generic_families.py",
    "tests/test_gpu_dry.py",
    "tests/test_how_to.py",
    "tests/test_notebooks.py",
    "tests/test_tokens.py",
    "tests/test_witness.py",
    "tests/test_works_with.py",
    "tests/training/",
    "tests/video/decoding/",
)
POLICY = os.sched_getscheduler(0)
SUBJECTS = ("qwen2_5_vl", "qwen3_vl", "shapes-vl")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Under `-n`, a process runs whole files, and one of them all that need Ray."""
    from xdist.scheduler import LoadScopeScheduling

    class FileScheduling(LoadScopeScheduling):  # --dist loadgroup: groups are lost under pytest 9.2
        def _split_scope(self, nodeid: str) -> str:
            return "ray" if nodeid.startswith(RAY_FILES) else nodeid.partition("::")[0]

    return FileScheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of several processes, one begins with tests that need Ray, which take the longest; then long files."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(
            key=lambda item: (not item.nodeid.startswith(RAY_FILES), not item.nodeid.startswith(LONG_FILES))
        )


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
    if "httpx" in sys.modules:
        read_certificates_once(sys.modules["httpx._transports.default"])
    if "transformers" in sys.modules:
        write_no_configurations()
    if "epd.video.children.process" in sys.modules:
        media_servers.install(sys.modules["epd.video.children.process"])


@pytest.fixture(autouse=True)
def scheduled_as_before() -> Iterator[None]:
    """No test may make this process a real-time one: see `tests/scheduling.py`."""
    yield
    assert os.sched_getscheduler(0) == POLICY


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """Undoes what `epd serve` sets up when a test runs it here: it would write to the stderr of that test.

    That is closed by then, and Python says so on the stderr of whichever test runs when a server logs.
    """
    names = ("epd", "epd.serve_app", "epd.serve_app.operation", "asyncio", "uvicorn", "py.warnings")
    before = [(each, each.handlers.copy(), each.level) for each in map(logging.getLogger, names)]
    yield
    for logger, handlers, level in before:
        logger.handlers[:] = handlers
        logger.setLevel(level)


@pytest.fixture(scope="module")
def little_to_collect() -> None:
    """For tests that collect garbage: among what the files before them have left, that takes a second."""
    gc.collect()
    gc.freeze()


def read_certificates_once(transports: Any) -> None:
    """Shares what httpx reads for each client, most of which are of plain HTTP: it takes 20 ms each time."""
    read: Callable[..., Any] = transports.create_ssl_context

    @cache
    def kept(_files: tuple[str | None, ...], trust_env: bool) -> Any:
        return read(verify=True, trust_env=trust_env)

    def create(verify: Any = True, cert: Any = None, trust_env: bool = True) -> Any:
        if verify is not True or cert is not None:
            return read(verify=verify, cert=cert, trust_env=trust_env)
        return kept((os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")), trust_env)

    transports.create_ssl_context = create


def write_no_configurations() -> None:
    """transformers writes each configuration that it reads for a line of its log that is left out."""
    from transformers import GenerationConfig, ImageProcessingMixin, PreTrainedConfig, ProcessorMixin

    for kind in (GenerationConfig, ImageProcessingMixin, PreTrainedConfig, ProcessorMixin):
        kind.__repr__ = object.__repr__


def read_processors_once() -> None:
    """Copies a folder's processor for whoever reads it again: each worker of an application does.

    Reading takes transformers 10 ms, a fifth of what starting a worker of the tiny models takes.
    """
    from transformers import AutoProcessor

    read: Callable[..., Any] = AutoProcessor.from_pretrained

    @cache
    def original(path: Path, _files: tuple[tuple[str, int, int], ...], options: tuple[Any, ...]) -> Any:
        return read(path, **dict(options))

    def from_pretrained(path: str | Path, **options: Any) -> Any:
        files = [each for each in sorted(Path(path).iterdir()) if each.suffix != ".safetensors"]
        versions = tuple((each.name, each.stat().st_mtime_ns, each.stat().st_size) for each in files)
        return deepcopy(original(Path(path), versions, tuple(sorted(options.items()))))

    AutoProcessor.from_pretrained = from_pretrained


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model folders by name: tiny random ones, built once, and the embedded one."""
    from epd.models import embedded_model_path
    from tests.tiny_models import BUILDERS

    read_processors_once()
    folder = tmp_path_factory.mktemp("checkpoints")
    built = {name: build(folder / name) for name, build in BUILDERS.items()}
    return {**built, "shapes-vl": embedded_model_path()}


@pytest.fixture(scope="session")
def audio_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random model that hears, built once."""
    from tests.tiny_audio import build_qwen2_audio

    return build_qwen2_audio(tmp_path_factory.mktemp("audio") / "model")


@pytest.fixture(scope="session")
def audio_reference(audio_checkpoint: Path) -> Reference:
    """The same model, as transformers has it."""
    from tests.tiny_audio import Reference

    return Reference(audio_checkpoint)


@pytest.fixture(scope="session", params=SUBJECTS)
def subject(request: pytest.FixtureRequest, checkpoints: dict[str, Path]) -> Subject:
    """Each checkpoint in turn, loaded by us and by transformers."""
    from transformers import AutoProcessor

    from tests.colocated import ColocatedPipeline
    from tests.reference import Subject
    from tests.tiny_models import load_reference

    path = checkpoints[request.param]
    return Subject(
        name=request.param,
        path=path,
        pipeline=ColocatedPipeline.load(path),
        model=load_reference(path),
        processor=AutoProcessor.from_pretrained(path, local_files_only=True),
    )


@pytest.fixture(scope="session")
def still_video(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 s at 10 fps, of which the picture stands still for 3."""
    from tests.media import write_still_video

    return write_still_video(tmp_path_factory.mktemp("still") / "still.mp4")


@pytest.fixture(scope="session")
def damaged_video(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 s at 10 fps; of 8 frames spread over it, one cannot be decoded."""
    from tests.media import write_damaged_video

    return write_damaged_video(tmp_path_factory.mktemp("damaged") / "damaged.mp4")


@pytest.fixture(scope="session")
def media(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A 4 s video, another of another shape, and two images."""
    from tests.media import write_image, write_video

    folder = tmp_path_factory.mktemp("media")
    return {
        "video": write_video(folder / "video.mp4"),
        "tall_video": write_video(folder / "tall.mp4", num_frames=30, fps=15, height=128, width=72, seed=5),
        "image": write_image(folder / "image.png"),
        "wide_image": write_image(folder / "wide.png", height=60, width=150, seed=2),
    }
