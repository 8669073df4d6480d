"""The README's examples of asking the server run as they are written."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from epd.shapes import make_scene
from tests import ROOT
from tests.serve_app.ray.ray_session import IGNORED, RaySession, running_app
from video.demo_video import write_demo_video

pytestmark = [pytest.mark.filterwarnings(each) for each in IGNORED]
SCENE = make_scene(3, 30.0)
README = ROOT / "README.md"


def example(name: str) -> str:
    """The block of code behind the comment `<!-- name -->`."""
    match = re.search(rf"<!-- {name} -->\n```\w+\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert match, f"the README has no example {name}"
    return match[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the README's reader is: beside the video drawn above it, smaller here."""
    folder = tmp_path_factory.mktemp("readme")
    write_demo_video(folder / "clip.mp4", SCENE, fps=8, height=180, width=320)
    return folder


@pytest.fixture(scope="module")
def port(ray_session: RaySession, folder: Path) -> Iterator[int]:
    with running_app(ray_session, topology="1e1p1d", allowed_media_path=folder, num_kv_tokens=16_384):
        yield ray_session.port


def run(command: list[str], folder: Path) -> str:
    environment = {**os.environ, "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_curl(port: int, folder: Path) -> None:
    script = example("curl").replace(":8000", f":{port}")
    answer = json.loads(run(["bash", "-c", script], folder))
    content = answer["choices"][0]["message"]["content"]
    assert content == min(SCENE.objects, key=lambda item: item.start_s).shape


def test_the_official_client(port: int, folder: Path) -> None:
    script = example("openai").replace(":8000", f":{port}")
    answer = run([sys.executable, "-c", script], folder)
    assert answer == str(len(SCENE.objects))
