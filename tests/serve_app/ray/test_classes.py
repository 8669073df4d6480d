"""Workers of several classes on Ray: each is a deployment, and a lost worker comes back in its class."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import pytest
from ray import serve

from epd.serve_app.http.address import HttpAddress
from tests.colocated import ColocatedPipeline
from tests.ports import free_port
from tests.serve_app.conftest import JSON, video_part
from tests.serve_app.ray.declared_app import replicas_of
from tests.serve_app.ray.ray_session import IGNORED, RaySession, running_app
from tests.serve_app.server import wait_until

pytestmark = [pytest.mark.filterwarnings(each) for each in IGNORED]
NUM_FRAMES, MAX_TOKENS, QUESTION = 6, 10, "What is shown?"


def test_each_class_is_a_deployment_and_answers_are_as_ever(
    ray_session: RaySession, checkpoints: dict[str, Path], media: dict[str, Path]
) -> None:
    model, video = checkpoints["qwen2_5_vl"], media["video"]
    expected = ColocatedPipeline.load(model).ask(
        [video], QUESTION, num_frames=NUM_FRAMES, max_tokens=MAX_TOKENS
    )
    body = {
        "model": "tiny",
        "messages": [
            {"role": "user", "content": [video_part(video.as_uri()), {"type": "text", "text": QUESTION}]}
        ],
        "max_tokens": MAX_TOKENS,
        "epd": {"num_frames": NUM_FRAMES},
    }
    with (
        running_app(
            ray_session,
            HttpAddress(port=free_port()),
            name="classes",
            model=model,
            model_name="tiny",
            topology="1e1pd",
            worker_classes=["small=roles:e,device:cpu,num_threads:1,num_embeddings:4096"],
            allowed_media_path=video.parent,
            num_kv_tokens=16_384,
            hang_s=60,
        ) as url,
        httpx.Client(base_url=url, trust_env=False, timeout=300) as client,
    ):

        def small() -> dict[str, int]:
            return replicas_of("classes", "Stage-small")

        def answer() -> str:
            reply: JSON = client.post("/v1/chat/completions", json=body).json()
            text: str = reply["choices"][0]["message"]["content"]
            return text

        def alive() -> dict[str, str]:
            workers = client.get("/v1/epd/status").json()["workers"]
            return {each["name"]: each["roles"] for each in workers if each["is_alive"]}

        deployments = serve.status().applications["classes"].deployments
        assert {"Stage", "Stage-small", "Media", "Front"} == deployments.keys()
        assert alive() == {"small0": "e", "pd0": "pd", "v0": "v"}
        assert answer() == expected.text
        (pid,) = small().values()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: pid not in small().values() and "small0" in alive(), 300.0)
        assert answer() == expected.text
