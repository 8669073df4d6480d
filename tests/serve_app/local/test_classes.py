"""Workers of several classes in one process: each is as its class says, and slow ones get less work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from epd.control.elasticity.cluster import StageSample
from epd.errors import RequestError
from epd.models import model_folder
from epd.serve_app.app_args import AppArgs
from epd.serve_app.local.own_service import OwnService, create_fleet, own_service
from epd.serve_app.service_composition import create_service, media_settings
from epd.serve_app.worker.worker_roles import EncodeRole
from epd.shapes import make_scene
from epd.topology import Stage
from epd.video.demo_video import write_demo_video
from tests.media import write_video
from tests.serve_app.deployments import Deployment, Question, core_of, deployed

QUESTION = "What is shown?"
SLOWER = 5.0


def answer_of(service: OwnService, video: Path) -> str:
    part = {"type": "video_url", "video_url": {"url": video.as_uri()}}
    content = [part, {"type": "text", "text": QUESTION}]
    body: dict[str, Any] = {
        "model": service.model, "messages": [{"role": "user", "content": content}], "max_tokens": 10,
    }  # fmt: skip
    events = list(service.events({**body, "stream": True}))
    return "".join(each["choices"][0]["delta"].get("content") or "" for each in events if each.get("choices"))


def asked(model: Path, video: Path, **options: Any) -> tuple[str, dict[str, str]]:
    """The answer, and where each worker runs and in which type."""
    args = AppArgs(model=model, allowed_media_path=Path("/"), num_kv_tokens=8192, num_threads=1, **options)
    with own_service(args, is_greedy=True) as service:
        text = answer_of(service, video)
        status = service.status.workers
    return text, {each.name: each.memory.device for each in status if each.memory is not None}


def test_classes_answer_as_one_worker_does(checkpoints: dict[str, Path], media: dict[str, Path]) -> None:
    model, video = checkpoints["qwen2_5_vl"], media["video"]
    plain, _ = asked(model, video, topology="1epd")
    text, devices = asked(
        model, video, topology="3e1pd", worker_classes=["small=roles:e,count:2,device:cpu", "large=roles:pd"]
    )
    assert devices.keys() == {"e0", "small0", "small1", "large0"}
    assert text == plain != ""


def test_encoders_of_another_type_than_the_language_model_agree(
    tmp_path: Path,
) -> None:
    """As many as there are give one answer: embeddings travel in the type of the language model."""
    model, video = model_folder("shapes-vl-2"), tmp_path / "clip.mp4"  # which is sure of what it says
    write_demo_video(video, make_scene(5, 6.0), fps=4, height=120, width=160)
    options: dict[str, Any] = {"dtype": "bfloat16", "worker_classes": ["exact=roles:e,dtype:float32"]}
    one, devices = asked(model, video, topology="1e1pd", **options)
    assert devices == {"exact0": "float32 on cpu", "pd0": "bfloat16 on cpu"}
    several, _ = asked(model, video, topology="3e1pd", **options)
    assert one == several != ""


def test_each_worker_has_the_threads_of_its_class(checkpoints: dict[str, Path]) -> None:
    args = AppArgs(
        model=checkpoints["qwen2_5_vl"], topology="1e1ep1d", num_threads=2, num_kv_tokens=4096,
        worker_classes=["many=roles:e,num_threads:5", "both=roles:ep,num_threads:3"],
    )  # fmt: skip
    before = torch.get_num_threads()

    async def run() -> dict[str, int]:
        fleet = create_fleet(args, media_settings(args))
        service, _ = create_service(args, fleet)
        await service.start()
        found: dict[str, int] = {}
        try:
            for name in ("many0", "both0", "d0"):
                core, heard = core_of(fleet, name), asyncio.Event()
                _note_threads(core, name, found, asyncio.get_running_loop(), heard)
                await heard.wait()
        finally:
            await service.close()
        return found

    try:
        assert asyncio.run(run()) == {"many0": 5, "both0": 3, "d0": 2}
    finally:
        torch.set_num_threads(before)


def _note_threads(
    core: Any, name: str, found: dict[str, int], loop: asyncio.AbstractEventLoop, heard: asyncio.Event
) -> None:
    """Notes torch's threads in the next turn of a worker, within its own thread."""
    step: Callable[[], bool] = core.step

    def noted() -> bool:
        found[name] = torch.get_num_threads()
        loop.call_soon_threadsafe(heard.set)
        return step()

    core.step = noted


def test_a_slowed_class_gets_less_of_the_work(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """A batch of e1 lasts until e0 has done five times as much, however fast the machine is."""
    clips = [write_video(tmp_path / f"{seed}.mp4", num_frames=20, seed=seed) for seed in range(11)]

    async def run() -> None:
        options: dict[str, Any] = {"classes": frozenset({"e"}), "settings": {"samples_load": True}}
        async with deployed(checkpoints["qwen2_5_vl"], "2e1pd", **options) as deployment:
            _slow_down(deployment)
            first, *others = map(Question, zip(clips, strict=True))
            speeds = deployment.service.router.speeds
            assert speeds is not None
            await deployment.ask(first)
            while speeds.relative("e1", "encode") > 0.5:
                await asyncio.sleep(0.01)
            assert speeds.relative("e1", "encode") == pytest.approx(1 / SLOWER)
            before = {name: _patches(deployment, name) for name in ("e0", "e1")}
            await deployment.ask_all(others)
            e0, e1 = (_patches(deployment, name) - before[name] for name in ("e0", "e1"))
            assert e1 < 0.4 * e0, f"{e0} and {e1} patches"

    asyncio.run(run())


def _slow_down(deployment: Deployment) -> None:
    """Slows e1 down after its first batch, until which e0 ends none, so that both get one.

    Both report the seconds that their batches would take.
    """
    fast, slow = (core_of(deployment.fleet, name).hosted["encode"] for name in ("e0", "e1"))
    assert isinstance(fast, EncodeRole)
    assert isinstance(slow, EncodeRole)
    for role, patch_s in ((fast, 0.001), (slow, 0.001 * SLOWER)):
        role.samples = partial(_samples, role, patch_s)  # type: ignore[method-assign]
    encode, encode_soon = slow.stage._encoder.encode, fast.stage._encoder.encode

    def encode_second(runs: Sequence[Any], *share: float | None) -> Any:
        while not slow.stage.counts.num_patches:
            time.sleep(0.001)
        return encode_soon(runs, *share)

    def encode_slowly(runs: Sequence[Any], *share: float | None) -> Any:
        until = fast.stage.counts.num_patches + SLOWER * sum(run.grid.num_patches for run in runs)
        is_first = not slow.stage.counts.num_patches
        while not is_first and fast.stage.counts.num_patches < until and fast.stage.outstanding_patches:
            time.sleep(0.001)
        return encode(runs, *share)

    slow.stage._encoder.encode = encode_slowly  # type: ignore[method-assign]
    fast.stage._encoder.encode = encode_second  # type: ignore[method-assign]


def _samples(role: EncodeRole, patch_s: float) -> dict[Stage, StageSample]:
    done = role.stage.counts.num_patches
    return {"encode": StageSample(done_units=done, num_rounds=done, busy_s=done * patch_s)}


def _patches(deployment: Deployment, name: str) -> float:
    return core_of(deployment.fleet, name).load().counters["encoded_patches"]


def test_workers_of_no_class_change_roles_beside_those_of_one(
    checkpoints: dict[str, Path], media: dict[str, Path]
) -> None:
    async def run() -> None:
        async with deployed(checkpoints["qwen2_5_vl"], "1e2pd", classes=frozenset({"e"})) as deployment:
            before = await deployment.ask(Question((media["video"],)))
            with pytest.raises(RequestError, match="'e0' of a class; allowed: for workers of none"):
                await deployment.service.switch_roles("e0", frozenset({"prefill"}))
            await deployment.service.switch_roles("pd1", frozenset({"encode"}))
            assert deployment.fleet.workers["pd1"].roles == {"encode"}
            clips = [Question((media[name],)) for name in ("tall_video", "video", "image")]
            answers = await deployment.ask_all(clips)
            assert answers[1].token_ids == before.token_ids
            assert all(each.token_ids for each in answers)

    asyncio.run(run())
