"""From a table in a store to a table in a store, while the batch is killed and servers are lost."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from time import sleep
from typing import Any
from urllib.request import urlopen

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq

from tests import ROOT
from tests.batch.fakes import completion
from tests.batch.object_store import ObjectStore
from tests.batch.test_http_backend import FakeServer, Reply, serving

NUM_CLIPS, NUM_QUESTIONS = 60, 5


class Reading(FakeServer):
    """Answers with the bytes at the URL of the medium, which is all that it knows.

    lost: whether it is. most: answers by all servers, before they stop to answer.
    """

    lost = False
    most = 0

    def reply(self, body: dict[str, Any]) -> Reply:
        video, question = body["messages"][0]["content"]
        if self.lost:
            return 503, {"error": {"message": "lost"}}
        while len(asked) >= Reading.most:
            sleep(0.002)
        with urlopen(video["video_url"]["url"], timeout=60) as file:
            content = file.read().decode()
        with lock:
            asked[f"{content} {question['text']}"] += 1
        return 200, completion(f"{content} {question['text']}")


lock = threading.Lock()
asked: Counter[str] = Counter()


def write_rows(store: ObjectStore) -> None:
    """Two parts of a table, a list of questions a row; the content of a clip is its name."""
    rows = [
        {
            "id": f"clip {number}",
            "video": store.put(f"clips/ä {number}.mp4", f"clip {number}".encode()),
            "questions": [f"q{each}" for each in range(NUM_QUESTIONS)],
        }
        for number in range(NUM_CLIPS)
    ]
    for part in range(2):
        data = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(rows[part::2]), data, row_group_size=7)
        store.put(f"rows/{part}.parquet", data.getvalue())


def committed() -> list[dict[str, Any]]:
    """The rows of the parts that the manifest in the store names."""
    store, _ = pyarrow.fs.FileSystem.from_uri("s3://videos")
    with store.open_input_stream("videos/answers/_manifest.json") as file:
        manifest = json.loads(file.read())
    paths = [f"videos/answers/{each['name']}" for each in manifest["parts"]]
    return [row for path in paths for row in pq.read_table(path, filesystem=store).to_pylist()]


def has_committed() -> bool:
    """Whether a manifest names a part. While it is replaced, as much is read as the former one had."""
    try:
        return bool(committed())
    except (FileNotFoundError, json.JSONDecodeError):
        return False


def test_killed_and_resumed_each_row_is_answered_once(object_store: ObjectStore, tmp_path: Path) -> None:
    """No server knows the keys of the store. What a killed run has written is not asked again."""
    asked.clear()
    done: dict[str, int] = {}
    write_rows(object_store)
    rng = random.Random(11)
    environment = {**os.environ, **object_store.environment, "PYTHONPATH": str(ROOT)}
    servers = [Reading() for _ in range(3)]
    with serving(servers[0]), serving(servers[1]), serving(servers[2]):
        urls = [server.url for server in servers]
        command = [sys.executable, "-m", "tests.batch.store_job", str(tmp_path), *urls]
        for share in (0.3, 0.6):
            servers[rng.randrange(3)].lost ^= True
            Reading.most = wanted = int(NUM_CLIPS * NUM_QUESTIONS * share) + rng.randrange(30)
            process = subprocess.Popen(command, cwd=ROOT, env=environment)
            while len(asked) < wanted or not has_committed():  # it has more answers than a part, and time
                assert process.poll() is None, "it ended before it could be killed"
                sleep(0.002)
            process.send_signal(signal.SIGKILL)
            process.wait()
            done |= {row["answer"]: asked[row["answer"]] for row in committed() if row["answer"] not in done}
        Reading.most = NUM_CLIPS * NUM_QUESTIONS + 1
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
    rows = committed()
    expected = {
        f"clip {clip}#{number + 1}": f"clip {clip} q{number}"
        for clip in range(NUM_CLIPS)
        for number in range(NUM_QUESTIONS)
    }
    assert len(rows) == len(expected)
    assert {row["id"]: row["answer"] for row in rows} == expected
    assert all(row["uri"].startswith("s3://videos/clips/") and "?" not in row["uri"] for row in rows)
    assert done
    assert done == {answer: asked[answer] for answer in done}
