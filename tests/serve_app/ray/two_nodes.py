"""Two Ray nodes, of which one is killed while streams run; a program, since a process has one Ray at a time.

    python -m tests.serve_app.ray.two_nodes MODEL FOLDER      FOLDER: for media that it draws

Prints one JSON object: whether the tokens are those of a fleet that nothing happened to, and what was lost.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(16))
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
warnings.simplefilter("ignore")

import ray  # noqa: E402 - after its environment
from ray.cluster_utils import Cluster  # noqa: E402

from epd.sampling_params import SamplingParams  # noqa: E402
from serve_app.ray.cluster import WORKER_ENVIRONMENT  # noqa: E402
from tests.media import write_image, write_video  # noqa: E402
from tests.serve_app.deployments import Question, undisturbed  # noqa: E402
from tests.serve_app.ray.ray_session import ray_deployed  # noqa: E402

NUM_STREAMS = 16
NODE: dict[str, Any] = {"num_cpus": 4, "object_store_memory": 100 << 20, "include_dashboard": False}


def questions_about(folder: Path) -> list[Question]:
    media = ((write_image(folder / "image.png"),), (write_video(folder / "video.mp4"),), ())
    return [
        Question(
            media[number % len(media)],
            f"what {number}?",
            SamplingParams(max_tokens=150, ignore_eos=True, temperature=number % 2, top_k=5, seed=number),
        )
        for number in range(NUM_STREAMS)
    ]


async def disturbed(model: Path, questions: list[Question], cluster: Cluster, node: Any) -> dict[str, Any]:
    async with ray_deployed(model, "2e2p2d", hang_s=8.0) as deployment:
        names = deployment.ray_fleet.workers
        there = sorted(name for name in names if deployment.member(name).node_id == node.node_id)
        quiet = await deployment.ask_all(questions[:3])
        asking = asyncio.create_task(deployment.ask_all(questions))
        await asyncio.sleep(0.3)
        await asyncio.to_thread(cluster.remove_node, node, allow_graceful=False)
        answers = await asking
        counters = (await deployment.service.status()).counters
        return {
            "there": there,
            "num_lost": counters.get("workers_lost", 0),
            "quiet": [answer.tokens for answer in quiet],
            "tokens": [answer.tokens for answer in answers],
            "num_retries": sum(answer.end.num_retries for answer in answers if answer.end),
        }


def main(model: Path, folder: Path) -> None:
    os.environ |= WORKER_ENVIRONMENT
    questions = questions_about(folder)
    expected = undisturbed(model, questions)
    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    try:
        node = cluster.add_node(num_cpus=4, object_store_memory=100 << 20)
        ray.init(address=cluster.address, namespace="two-nodes", log_to_driver=False)
        cluster.wait_for_nodes()
        result = asyncio.run(disturbed(model, questions, cluster, node))
    finally:
        ray.shutdown()
        cluster.shutdown()
    result["is_equal"] = result.pop("tokens") == expected and result.pop("quiet") == expected[:3]
    print(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
