"""A media worker in the test's process, and what is known of media without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from epd.encoders import MediaPlan, load_adapter
from epd.errors import CancelledError
from epd.models import embedded_model_path
from epd.serve_app.fleet import WorkerLostError
from epd.serve_app.media.media_worker import MediaSettings, MediaWorker
from epd.serve_app.messages import Message
from epd.serve_app.orchestration.live_answer import AnswerPlan
from epd.serve_app.orchestration.request_planner import RequestPlanner
from epd.serve_app.service import AnswerRequest, HeldItem, MediaReference, MediaSource
from epd.serve_app.worker_info import WorkerInfo
from epd.stages.media import plan_pixels
from epd.topology import Stage
from epd.types import UInt8Array, content_hash
from epd.video import FetchPolicy, load_image, look, media_kind

# Reads any file of this machine.
ANY_FILE = FetchPolicy(media_folder=Path("/"))


class MediaFleet:
    """A fleet of media workers alone. asked: whom messages were sent to, and of which kind."""

    def __init__(self, settings: MediaSettings | None = None, names: tuple[str, ...] = ("v0",)) -> None:
        self.settings = settings or MediaSettings(embedded_model_path(), ANY_FILE)
        self.media = {name: MediaWorker(self.settings) for name in names}
        self.workers = {name: WorkerInfo(name, frozenset({"video"})) for name in names}
        self.asked: list[tuple[str, type[Message[Any]]]] = []

    async def send(self, stage: Stage, target: str, message: Message[Any], bulk: Any = None) -> Any:
        return (await self.fetch(stage, target, message, bulk))[0]

    async def fetch(
        self, _stage: Stage, target: str, message: Message[Any], bulk: Any = None
    ) -> tuple[Any, UInt8Array | None]:
        self.asked.append((target, type(message)))
        before = self.workers[target]
        if not before.is_alive:
            raise WorkerLostError(f"{target} is gone")
        try:
            return await self.media[target].answer(message, bulk=bulk)
        except CancelledError as error:
            if self.workers[target] == before:
                raise
            raise WorkerLostError(f"{target} was lost") from error

    def lose(self, name: str, *, comes_back: bool = False) -> None:
        before = self.workers[name]
        self.workers[name] = WorkerInfo(name, before.roles, comes_back, before.incarnation + 1)
        self.media[name].close()
        if comes_back:
            self.media[name] = MediaWorker(self.settings)

    def close(self) -> None:
        for worker in self.media.values():
            worker.close()


def reference_to(path: Path) -> MediaReference:
    return MediaReference(media_kind(path), path.as_uri(), "the medium")


def unheld(paths: tuple[Path, ...]) -> tuple[MediaSource, ...]:
    """Media that no worker keeps: enough to plan, not to answer."""
    return tuple(
        MediaSource(
            look(path), content_hash(path), path.stat().st_size, "the medium", HeldItem("/test", number)
        )
        for number, path in enumerate(paths)
    )


def image_pixels(model: Path, path: Path) -> tuple[MediaPlan, UInt8Array]:
    """The plan of an image, and all its units: uint8 [N, h, w, 3]."""
    planned = plan_pixels(load_adapter(model), path, load_image(path))
    assert planned.image is not None
    return planned.plan, planned.image.numpy()


def planned_here(
    planner: RequestPlanner, model: Path, request: AnswerRequest, paths: tuple[Path, ...]
) -> AnswerPlan:
    """The plan of a request whose images are decoded here."""
    images = {
        number: image_pixels(model, paths[number])[0]
        for number, source in enumerate(request.media)
        if source.kind == "image"
    }
    return planner.plan(request, images)
