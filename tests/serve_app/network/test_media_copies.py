"""A long video of a request over real links: its bytes go from one media worker to the others."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from epd.encoders import FrameSampling
from epd.sampling_params import SamplingParams
from epd.serve_app.media.media_worker import MediaWorker
from epd.serve_app.media_messages import ReadFrames, StoreFile
from epd.serve_app.service import MediaReference
from tests.media import write_video
from tests.serve_app.conftest import data_url
from tests.serve_app.deployments import Answered, Question, undisturbed
from tests.serve_app.network.cluster import clustered

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")


def test_media_workers_give_each_other_what_a_request_contained(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = checkpoints["qwen2_5_vl"], write_video(tmp_path / "long.mp4", num_frames=240, seed=7)
    question = Question((path,), "?", SamplingParams(max_tokens=16), FrameSampling(num_frames=40))
    [expected] = undisturbed(model, [question])
    for module in ("fleet_media", "media_worker"):
        monkeypatch.setattr(f"epd.serve_app.media.{module}.FILE_CHUNK_BYTES", 10_000)
    submit, asked = MediaWorker.submit, list[tuple[type, MediaWorker]]()

    def noted(worker: MediaWorker, message: Any, *rest: Any) -> Any:
        asked.append((type(message), worker))
        return submit(worker, message, *rest)

    monkeypatch.setattr(MediaWorker, "submit", noted)

    async def run() -> None:
        async with clustered(model, "1e1p1d", num_media=3) as cluster:
            [front], answered = cluster.fronts, Answered()
            reference = MediaReference("video", data_url(path, "video/mp4"), "it")
            async with (
                front.service.media.sources("r", [reference]) as sources,
                aclosing(front.service.answer(question.request(sources))) as answer,
            ):
                async for items in answer:
                    answered.take_all(items)
            assert answered.tokens == expected
            assert len({worker for kind, worker in asked if kind is ReadFrames}) == 3
            assert len({worker for kind, worker in asked if kind is StoreFile}) == 2
            await front.service.media.close()
            assert [server._host.num_holds for server in cluster.media] == [0, 0, 0]

    asyncio.run(run())
