"""`epd serve --address` on a cluster where another application is served already, which it leaves alone."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import ray
from ray import serve

from epd.errors import UnavailableError
from epd.serve_app.ray.front import OWNER
from epd.serve_app.ray.supervisor import ends_once
from epd.serve_app.ray.tenancy import cluster_now, is_left, is_taken, turn_to_deploy, url_at
from tests import ROOT
from tests.batch.parquet import committed_rows, write_table
from tests.media import write_video
from tests.ports import free_port
from tests.serve_app.cli.test_serve_command import END_S, READY_S, START, command
from tests.serve_app.ray.ray_session import IGNORED, RaySession, delete_app
from tests.serve_app.server import wait_until

pytestmark = [pytest.mark.filterwarnings(each) for each in IGNORED]


@pytest.fixture(scope="module")
def neighbour(ray_session: RaySession) -> Iterator[str]:
    """The URL of an application that is none of ours; it has the answer of the beginning at the end."""

    @serve.deployment(ray_actor_options={"num_cpus": 0})
    class Neighbour:
        def __call__(self, _request: object) -> str:
            return f"process {os.getpid()}"

    serve.run(Neighbour.bind(), name="neighbour", route_prefix="/neighbour")  # type: ignore[attr-defined]
    url = f"{ray_session.url}/neighbour"
    before = said_at(url)
    assert before.startswith("process ")
    yield url
    assert said_at(url) == before
    serve.delete("neighbour")


def said_at(url: str) -> str:
    return httpx.get(url, trust_env=False, timeout=200).text


@contextmanager
def starting(tmp_path: Path, port: int, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    output = tmp_path / "output"
    address = ray.get_runtime_context().gcs_address
    arguments = command("--topology", "1epd", "--address", address, "--port", str(port), *options)
    with output.open("wb") as stream:
        process = subprocess.Popen(arguments, stdout=stream, stderr=subprocess.STDOUT)
    try:
        yield process, output
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def assert_batch_from_parquet_to_parquet(folder: Path) -> None:
    """The command of the how-to, but for its places: each row is answered or explained once."""
    video = write_video(folder / "ride.mp4")
    rows = [
        {"id": "ride", "video": video.name, "questions": ["Where does it begin?", "Who is there?"]},
        {"id": "walk", "video": "lost.mp4", "questions": ["Where does it end?"]},
    ]
    write_table(folder / "rows.parquet", rows)
    page = (ROOT / "docs" / "how-to" / "answer-on-a-cluster.md").read_text(encoding="utf-8")
    (line,) = [each for each in page.splitlines() if each.startswith("epd batch ")]
    for place, ours in (
        ("s3://videos/rows.parquet", folder / "rows.parquet"),
        ("s3://videos/answers/", f"{folder}/answers/"),
        ("10.0.0.5:6379", ray.get_runtime_context().gcs_address),
    ):
        assert place in line
        line = line.replace(place, str(ours))
    asked = [sys.executable, "-c", START, *shlex.split(line)[1:], "--name", "mine"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=READY_S, check=False)
    assert done.returncode == 1, done.stderr
    assert "1 media_not_found" in done.stderr
    found = {row["id"]: row for row in committed_rows(folder / "answers")}
    assert found.keys() == {"ride#1", "ride#2", "walk#1"}
    for name in ("ride#1", "ride#2"):
        assert (found[name]["uri"], found[name]["error"]) == (str(video), None)
        assert found[name]["answer"]
    assert found["walk#1"]["error"]["type"] == "media_not_found"


def names() -> set[str]:
    return {each.name for each in cluster_now().tenants}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--name", "neighbour"), "already has an application 'neighbour' (RUNNING), which is left as it is"),
        (("--name", "mine", "--route-prefix", "/neighbour"), "is that of the application 'neighbour'"),
    ],
)
def test_what_the_neighbour_has_is_refused(
    options: tuple[str, ...], words: str, neighbour: str, ray_session: RaySession, tmp_path: Path
) -> None:
    before = said_at(neighbour)
    with starting(tmp_path, ray_session.port, *options) as (process, output):
        assert process.wait(READY_S) == 3
    *steps, line = output.read_text().splitlines()
    assert line.startswith("error: ")
    assert words in line
    warned = [step for step in steps if " INFO epd.serve_app." not in step]
    assert ["not encrypted" in step for step in warned] == [True]  # the links of a cluster
    assert said_at(neighbour) == before
    assert "mine" not in names()


def test_two_applications_are_served_side_by_side(
    neighbour: str, ray_session: RaySession, tmp_path: Path
) -> None:
    """At a port of its own, and below a prefix, at which the proxy has it. A batch finds it by its name."""
    before, port = said_at(neighbour), free_port()
    options = ("--name", "mine", "--route-prefix", "/mine", "--allowed-media-path", str(tmp_path))
    with starting(tmp_path, port, *options) as (process, output):
        wait_until(lambda: b"ready in" in output.read_bytes() or process.poll() is not None, READY_S)
        url = f"http://127.0.0.1:{port}/mine"
        assert f"{url}/v1 serves shapes-vl-2 on 1epd" in output.read_text()
        assert "Serve has its proxy at" in output.read_text()
        assert url_at(cluster_now(), "mine", "127.0.0.1") == url
        for each in (url, f"{ray_session.url}/mine"):
            models = httpx.get(f"{each}/v1/models", trust_env=False, timeout=200).json()["data"]
            assert [model["id"] for model in models] == ["shapes-vl-2"]
        asked = [sys.executable, "-c", START, "status", "--json", "--url", url]
        status = subprocess.run(asked, capture_output=True, text=True, timeout=200, check=True)
        assert json.loads(status.stdout)["status"]["is_ready"]
        assert_batch_from_parquet_to_parquet(tmp_path)
        assert said_at(neighbour) == before
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_S) == 0
    assert "mine" not in names()
    assert said_at(neighbour) == before


def test_a_start_that_is_stopped_leaves_nothing_behind(
    neighbour: str, ray_session: RaySession, tmp_path: Path
) -> None:
    before = said_at(neighbour)
    with starting(tmp_path, ray_session.port, "--name", "late", "--route-prefix", "/late") as (
        process,
        output,
    ):
        wait_until(lambda: "late" in names() or process.poll() is not None, READY_S)
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_S) == 0
    assert "stopped before it was ready" in output.read_text()
    wait_until(lambda: "late" not in names(), END_S)
    assert said_at(neighbour) == before


def test_commands_look_and_deploy_one_after_the_other(ray_session: RaySession) -> None:
    assert ray_session.port
    with turn_to_deploy(), pytest.raises(UnavailableError, match="another command"), turn_to_deploy(0.3):
        pass
    with turn_to_deploy(30.0):
        pass


def test_an_application_that_others_delete_is_noticed(ray_session: RaySession, tmp_path: Path) -> None:
    """Serve names no owner of what it still ends."""
    assert ray_session.port
    ending = tmp_path / "ending"
    ending.touch()

    @serve.deployment(
        name="Front",
        ray_actor_options={"num_cpus": 0},
        user_config={OWNER: "me"},
        graceful_shutdown_timeout_s=600.0,
    )
    class Front:
        def reconfigure(self, _config: object) -> None:
            pass

        def __call__(self) -> None:
            pass

        def __del__(self) -> None:
            while ending.exists():
                time.sleep(0.05)

    serve.run(Front.bind(), name="held", route_prefix="/held")  # type: ignore[attr-defined]
    said: list[str] = []
    with ends_once(lambda: is_taken("held", "me"), "it is gone", every_s=0.1, end=said.append):
        time.sleep(1.0)
        assert said == []
        assert is_taken("held", "somebody else")
        with pytest.raises(TimeoutError, match=r"held is not gone after 0 s: .*held#Front#"):
            delete_app("held", drain_s=0.0, late_s=0.0)
        wait_until(lambda: is_taken("held", "me"), END_S)
        assert is_left(cluster_now(), "held", "me")
        ending.unlink()
        wait_until(lambda: said == ["it is gone"], END_S)
    wait_until(lambda: not is_left(cluster_now(), "held", "me"), END_S)
