"""Several Ray nodes, all of which but the head are killed in turn while streams run.

    python -m tests.serve_app.ray.lost_nodes MODEL FOLDER NUM_NODES      FOLDER: for media that it draws

A program, since a process has one Ray at a time. Prints one JSON object: whether the tokens are those of a
fleet that nothing happened to, where workers were and what they did, and what was lost.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import socket
import sys
import time
import warnings
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(16))
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
warnings.simplefilter("ignore")

import ray  # noqa: E402 - after its environment
from ray import serve  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402
from ray.serve.config import ProxyLocation  # noqa: E402

from epd.encoders import FrameSampling  # noqa: E402
from epd.kv.pass_limits import PassLimits  # noqa: E402
from epd.sampling_params import SamplingParams  # noqa: E402
from epd.serve_app.fleet import Bulk  # noqa: E402
from epd.serve_app.media_messages import ReadFrames  # noqa: E402
from epd.serve_app.messages import Message  # noqa: E402
from epd.serve_app.network.remote_fleet import RemoteFleet  # noqa: E402
from epd.serve_app.ray.cluster import LINK_HOST, LOOPBACK, WORKER_ENVIRONMENT  # noqa: E402
from epd.serve_app.service import AnswerItem  # noqa: E402
from epd.topology import Stage, parse_topology  # noqa: E402
from tests.media import write_image, write_video  # noqa: E402
from tests.serve_app.deployments import Answered, Question, clear_questions  # noqa: E402
from tests.serve_app.ray.declared_app import DEPLOYED_S, DeclaredApp, until  # noqa: E402
from tests.serve_app.ray.ray_session import RayDeployment  # noqa: E402

NUM_STREAMS, NUM_TOKENS, SEED = 200, 300, 2000
TOPOLOGIES = {2: "2e2p2d", 3: "3e1p1d"}
NODE: dict[str, Any] = {"num_cpus": 4, "object_store_memory": 100 << 20, "include_dashboard": False}
LONG = FrameSampling(num_frames=48)
# There is room for all streams at one worker, since only one may be left.
ROOM = PassLimits(max_num_seqs=256, max_chunk_tokens=64)
NUM_KV_TOKENS = 1 << 17
BACK_S = 300.0
ENDED_S = 300.0  # more than a request that is lost by a message waits until it is retried


@dataclass
class Timed(Answered):
    """gap_s: the longest time without a token, before the first one too."""

    at_s: float = field(default_factory=time.monotonic)
    gap_s: float = 0.0

    def take(self, item: AnswerItem) -> None:
        now_s = time.monotonic()
        self.gap_s, self.at_s = max(self.gap_s, now_s - self.at_s), now_s
        super().take(item)


def questions_about(folder: Path) -> list[Question]:
    """Some to spare. The first about a video that is long enough to be decoded by all media workers."""
    media = ((write_image(folder / "image.png"),), (write_video(folder / "video.mp4"),), ())
    long = (write_video(folder / "long.mp4", num_frames=120),)
    sampling = [
        SamplingParams(
            max_tokens=NUM_TOKENS, ignore_eos=True, temperature=number % 2, top_k=5, seed=SEED + number
        )
        for number in range(NUM_STREAMS * 4 // 3)
    ]
    return [
        Question(long, "what 0?", sampling[0], LONG),
        *(
            Question(media[number % len(media)], f"what {number}?", sampling[number])
            for number in range(1, len(sampling))
        ),
    ]


def nodes_of(deployment: RayDeployment) -> dict[str, str]:
    """The nodes of the workers that are there, by name."""
    workers = deployment.ray_fleet.workers.values()
    return {each.name: deployment.member(each.name).node_id for each in workers if each.is_alive}


def node_of_board() -> str:
    board = next(each for each in ray._private.state.actors().values() if each["Name"] == "epd-board-epd")
    return str(board["Address"]["NodeID"])


def recorded_readers(fleet: RemoteFleet) -> set[str]:
    """The media workers that frames are read from, from now on."""
    readers, fetch = set[str](), fleet.fetch

    async def recorded(stage: Stage, target: str, message: Message[Any]) -> tuple[Any, Bulk]:
        if isinstance(message, ReadFrames):
            readers.add(target)
        return await fetch(stage, target, message)

    fleet.fetch = recorded  # type: ignore[method-assign]
    return readers


async def until_back(deployment: RayDeployment, lost: Mapping[str, int]) -> float:
    """Returns the time at which others have taken the places of lost workers. lost: incarnations, by name."""
    workers, end_s = deployment.ray_fleet.workers, time.monotonic() + BACK_S
    while not all(workers[name].is_alive and workers[name].incarnation > lost[name] for name in lost):
        assert time.monotonic() < end_s, workers
        await asyncio.sleep(0.1)
    return time.monotonic()


async def quiet(deployment: RayDeployment, questions: list[Question]) -> dict[str, Any]:
    """What a few questions show of who does what where."""
    there, readers = nodes_of(deployment), recorded_readers(deployment.ray_fleet)
    answers = [await deployment.ask(question, wants_spans=True) for question in questions[:4]]
    encoders = {span.worker for span in answers[0].spans if span.stage == "encode"}
    return {
        "num_readers": len(readers),
        "num_nodes_of_readers": len({there[name] for name in readers}),
        "num_encoders": len(encoders),
        "num_nodes_of_encoders": len({there[name] for name in encoders}),
        "quiet": [answer.tokens for answer in answers],
    }


def num_begun(answers: Sequence[Answered]) -> int:
    return sum(bool(answer.token_ids) for answer in answers)


async def killed(
    deployment: RayDeployment, questions: list[Question], cluster: Cluster, node: Any
) -> dict[str, Any]:
    """Kills a node while all questions are in flight, a fifth of them with tokens. Returns what was seen."""
    answers = [Timed() for _ in questions]
    asking = asyncio.create_task(deployment.ask_at_once(questions, answers))
    attempts, workers = deployment.service.attempts, deployment.ray_fleet.workers
    while len(attempts) < len(questions) or num_begun(answers) < len(questions) // 5:
        assert not any(answer.end for answer in answers), "one has ended before all were in flight"
        await asyncio.sleep(0.02)
    num_in_flight = len(attempts)
    there = [name for name, node_id in nodes_of(deployment).items() if node_id == node.node_id]
    # The place of its media worker stays empty: there is one on each of the other nodes already.
    lost = {name: workers[name].incarnation for name in there if "video" not in workers[name].roles}
    board_node, start_s = node_of_board(), time.monotonic()
    await asyncio.to_thread(cluster.remove_node, node, allow_graceful=False)
    back = asyncio.create_task(until_back(deployment, lost))
    async with asyncio.timeout(ENDED_S):  # the log has said what they wait for
        await asking
    ended_s = time.monotonic()
    return {
        "num_in_flight": num_in_flight,
        "there": sorted(there),
        "has_board": board_node == node.node_id,
        "num_retries": sum(answer.end.num_retries for answer in answers if answer.end),
        "longest_gap_s": round(max(answer.gap_s for answer in answers), 1),
        "ended_s": round(ended_s - start_s, 1),
        "back_s": round(await back - start_s, 1),
        "tokens": [answer.tokens for answer in answers],
    }


@asynccontextmanager
async def deployed_on(model: Path, num_nodes: int) -> AsyncIterator[RayDeployment]:
    """A front of this process over the application, with a media worker on each node."""
    args = {
        "model": str(model),
        "topology": TOPOLOGIES[num_nodes],
        "hang_s": 8.0,
        "allowed_media_path": "/",
        "num_kv_tokens": NUM_KV_TOKENS,
        "max_num_seqs": ROOM.max_num_seqs,
    }
    app = DeclaredApp("", args)
    app.deploy({"Media": {"num_replicas": num_nodes, "max_replicas_per_node": 1}})
    await until(app.is_running, DEPLOYED_S, every_s=0.2)
    deployment = RayDeployment(model)
    num_workers = parse_topology(TOPOLOGIES[num_nodes]).num_workers + num_nodes
    try:
        await deployment.service.start()
        await until(lambda: len(nodes_of(deployment)) == num_workers)
        yield deployment
    finally:
        await deployment.service.close()
        await asyncio.to_thread(app.delete)


async def disturbed(
    model: Path, questions: list[Question], cluster: Cluster, nodes: list[Any]
) -> dict[str, Any]:
    """nodes: those that are killed."""
    async with deployed_on(model, 1 + len(nodes)) as deployment:
        seen = await quiet(deployment, questions)
        kills = [await killed(deployment, questions, cluster, node) for node in nodes]
        counters = (await deployment.service.status()).counters
        return {**seen, "kills": kills, "num_lost": counters.get("workers_lost", 0)}


def main(model: Path, folder: Path, num_nodes: int) -> None:
    logging.basicConfig(format="%(asctime)s %(name)s %(message)s")  # what is lost, and what requests wait for
    # Ray replaces the loopback address of a node where there are several; links stay on it.
    os.environ |= {**WORKER_ENVIRONMENT, LINK_HOST: LOOPBACK}
    questions, answers = clear_questions(
        model, questions_about(folder), NUM_STREAMS, num_kv_tokens=NUM_KV_TOKENS, scheduler=ROOM
    )
    assert questions[0].frame_sampling == LONG, "rounding may turn the first answer: take another SEED"
    expected = [answer.tokens for answer in answers]
    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    try:
        nodes = [cluster.add_node(**NODE) for _ in range(num_nodes - 1)]
        ray.init(address=cluster.address, namespace="lost-nodes", log_to_driver=False)
        cluster.wait_for_nodes()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        serve.start(http_options={"port": port}, proxy_location=ProxyLocation.HeadOnly)
        result = asyncio.run(disturbed(model, questions, cluster, nodes))
    finally:
        ray.shutdown()
        cluster.shutdown()
    result["is_equal"] = result.pop("quiet") == expected[:4] and all(
        kill.pop("tokens") == expected for kill in result["kills"]
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
