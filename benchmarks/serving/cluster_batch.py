"""`epd batch` on several Ray nodes of one machine, from a store into a store, while processes are killed.

    python -m benchmarks.serving.cluster_batch [--clips 2000] [--kills 6] [--seed 1]

Three raylets, an object store on loopback, drawn clips with five questions each. The command, a raylet, a
front or a stage worker is killed at drawn moments. The command is started again until it ends. Prints and
writes benchmarks/results/cluster_batch.json: rows, kills, and whether each row is there once.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(16))
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ.setdefault("RAY_raylet_start_wait_time_s", "60")
warnings.simplefilter("ignore")

import pyarrow as pa  # noqa: E402 - after the environment of Ray
import pyarrow.parquet as pq  # noqa: E402
import ray  # noqa: E402
from ray import serve  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402
from ray.serve.config import ProxyLocation  # noqa: E402

from epd.serve_app.ray.cluster import LINK_HOST, LOOPBACK, WORKER_ENVIRONMENT  # noqa: E402
from epd.shapes import make_scene  # noqa: E402
from epd.video.demo_video import write_demo_video  # noqa: E402
from tests import ROOT  # noqa: E402
from tests.batch.object_store import ObjectStore, object_store_on_loopback  # noqa: E402
from tests.serve_app.ray.declared_app import DeclaredApp, until  # noqa: E402

NODE: dict[str, Any] = {"num_cpus": 4, "object_store_memory": 100 << 20, "include_dashboard": False}
NUM_NODES, NUM_QUESTIONS, DEPLOYED_S, GAP_S = 3, 5, 900.0, (5.0, 20.0)
NUM_TRIES = 5
KINDS = ("command", "raylet", "Front", "Stage")
RESULTS = ROOT / "benchmarks" / "results" / "cluster_batch.json"


def write_input(store: ObjectStore, num_clips: int) -> None:
    """Clips that differ, and a table of their questions."""
    with tempfile.TemporaryDirectory() as folder:
        path, rows = Path(folder) / "clip.mp4", []
        for number in range(num_clips):
            write_demo_video(path, make_scene(number, 2.0), fps=4, height=112, width=112)
            uri = store.put(f"clips/{number}.mp4", path.read_bytes())
            questions = [f"How many shapes are there? ({each})" for each in range(NUM_QUESTIONS)]
            rows.append({"id": f"{number}", "video": uri, "questions": questions})
    data = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), data)
    store.put("rows.parquet", data.getvalue())


def added_node(cluster: Cluster) -> Any:
    """Adds a node, again where it does not start.

    A raylet ends itself if its agent does not listen after 15 s, which no setting of Ray changes.
    """
    for _ in range(NUM_TRIES):
        try:
            return cluster.add_node(**NODE)
        except Exception as error:  # noqa: BLE001 - Ray raises no other
            print(f"a node did not start: {error}", flush=True)
    raise AssertionError(f"no node has started, {NUM_TRIES} times in a row")


class Killer:
    """Kills something of the job at each call."""

    def __init__(self, cluster: Cluster, nodes: list[Any], app: DeclaredApp, rng: random.Random) -> None:
        self._cluster, self._nodes, self._app, self._rng = cluster, nodes, app, rng
        self.killed: Counter[str] = Counter()

    def kill(self, kind: str, command: subprocess.Popen[bytes]) -> None:
        if kind == "command":
            command.send_signal(signal.SIGKILL)
        elif kind == "raylet":
            node = self._nodes.pop(self._rng.randrange(len(self._nodes)))
            self._cluster.remove_node(node, allow_graceful=False)
            self._nodes.append(added_node(self._cluster))
        elif pids := sorted(self._app.replicas(kind).values()):
            os.kill(self._rng.choice(pids), signal.SIGKILL)
        self.killed[kind] += 1


def rows_of(store: ObjectStore) -> list[dict[str, Any]]:
    """The rows of the parts that the manifest names."""
    if "answers/_manifest.json" not in store.names():
        return []
    manifest = json.loads(_read(store, "answers/_manifest.json"))
    parts = [_read(store, f"answers/{each['name']}") for each in manifest["parts"]]
    return [row for part in parts for row in pq.read_table(io.BytesIO(part)).to_pylist()]


def _read(store: ObjectStore, name: str) -> bytes:
    data: bytes = store.client.get_object(Bucket=store.bucket, Key=name)["Body"].read()
    return data


def answered(store: ObjectStore, url: str, killer: Killer, kinds: list[str], rng: random.Random) -> int:
    """Runs the command until it ends by itself. Returns how often it was started."""
    command = [sys.executable, "-m", "epd", "batch", "s3://videos/rows.parquet", "s3://videos/answers/"]
    command += ["--url", url, "--max-tokens", "8", "--allow-failures", "--yes"]
    environment = {**os.environ, **store.environment, "PYTHONPATH": str(ROOT)}
    for num_starts in range(1, 100):
        process = subprocess.Popen(command, env=environment, cwd=ROOT)
        while process.poll() is None and kinds:
            try:
                process.wait(rng.uniform(*GAP_S))
            except subprocess.TimeoutExpired:
                killer.kill(kinds.pop(), process)
        if process.wait() == 0:
            return num_starts
        print(f"start {num_starts} ended with {process.returncode}", flush=True)
    raise AssertionError("the command has never ended well")


def run(num_clips: int, num_kills: int, seed: int) -> dict[str, Any]:
    os.environ |= {**WORKER_ENVIRONMENT, LINK_HOST: LOOPBACK}
    rng = random.Random(seed)
    kinds = [KINDS[number % len(KINDS)] for number in range(num_kills)]
    rng.shuffle(kinds)
    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    try:
        nodes = [added_node(cluster) for _ in range(NUM_NODES - 1)]
        ray.init(address=cluster.address, namespace="cluster-batch", log_to_driver=False)
        cluster.wait_for_nodes()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        serve.start(http_options={"port": port}, proxy_location=ProxyLocation.HeadOnly)
        args = {"topology": "2e1p1d", "num_fronts": 2, "allowed_media_hosts": ["127.0.0.1"]}
        app = DeclaredApp(f"http://127.0.0.1:{port}", args)
        with object_store_on_loopback() as store:
            app.deploy()
            write_input(store, num_clips)
            asyncio.run(until(app.is_running, DEPLOYED_S, every_s=0.5))
            print("the application runs", flush=True)
            killer, start_s = Killer(cluster, nodes, app, rng), time.monotonic()
            num_starts = answered(store, app.url, killer, kinds, rng)
            wall_s, rows = time.monotonic() - start_s, rows_of(store)
        app.delete()
    finally:
        ray.shutdown()
        cluster.shutdown()
    ids = Counter(row["id"] for row in rows)
    expected = {f"{clip}#{each + 1}" for clip in range(num_clips) for each in range(NUM_QUESTIONS)}
    return {
        "num_rows": len(rows),
        "is_each_once": set(ids) == expected and max(ids.values()) == 1,
        "num_answered": sum(row["error"] is None for row in rows),
        "errors": Counter(row["error"]["type"] for row in rows if row["error"] is not None),
        "num_starts": num_starts,
        "killed": killer.killed,
        "wall_s": round(wall_s, 1),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clips", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    result = {"clips": given.clips, **run(given.clips, given.kills, given.seed)}
    print(json.dumps(result, indent=1))
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
