"""Loads models into this process, for commands: they ask the service without HTTP. Imports torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from epd import console
from epd.client.conversation import Conversation
from epd.engine_config import EngineConfig
from epd.machine import usable_cpus
from epd.models import model_folder
from epd.serve_app.app_args import AppArgs
from epd.serve_app.local.own_service import HERE, JSON, OwnService, own_service
from epd.serve_app.request_options import medium_of, request_fields
from epd.stages.placement import Placement


@contextmanager
def open_model(
    model: Path | None, config: EngineConfig, *, is_greedy: bool = True, **options: Any
) -> Iterator[OwnService]:
    """Loads a model, with all cores unless `config` says otherwise.

    is_greedy: whether answers are, unless a request says otherwise
    options: more of `epd serve`
    Raises EPDError.
    """
    given = {"num_threads": _num_threads(config), **config.given, **options}
    args = AppArgs(model=model, topology="1epd", allowed_media_path=Path("/"), **given)
    with ExitStack() as stack:
        with console.status("loading the model"):
            service = stack.enter_context(own_service(args, is_greedy=is_greedy))
        yield service


def placement_of(config: EngineConfig, model: Path | None) -> Placement:
    """Returns where a model runs: see `Placement.resolve`. Raises RequestError."""
    folder = model_folder(model, config.revision, config.hub)
    return Placement.resolve(config.device, config.dtype, folder, config.quantization)


def _num_threads(config: EngineConfig) -> int:
    """Returns OMP_NUM_THREADS, or the cores we may use, shared by the processes of a model."""
    num = int(os.environ.get("OMP_NUM_THREADS") or usable_cpus())
    return max(1, num // config.tensor_parallel_size)


class OwnConversation(Conversation):
    """Asks a model of this process, turn by turn."""

    def __init__(
        self,
        service: OwnService,
        paths: Sequence[str | Path],
        *,
        audio: bool = False,
        note: str | None = None,
        **options: Any,
    ) -> None:
        """Takes paths or URLs.

        audio: whether sound alone is heard. note: see `Conversation`. options: see `request_fields`
        """
        self._service = service
        media = [medium_of(path, is_audio=audio) for path in paths]
        super().__init__(HERE, service.model, media, request_fields(**options), note=note)

    def _events(self, body: JSON) -> Iterator[JSON]:
        return self._service.events(body)

    def counters(self) -> Mapping[str, float]:
        return self._service.counters()
