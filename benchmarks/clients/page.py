"""Runs each program of docs/how-to/connect-a-client.md, and holds its answer against the truth.

    python -m benchmarks.clients.page

A server without Ray answers. Packages are installed at the first time, those of JavaScript by npm. Only the
server's address and the clip's are replaced.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.clients.environments import cache_folder, environment
from epd.shapes import make_scene
from epd.video.demo_video import write_demo_video
from tests import ROOT
from tests.ports import kept_port

PAGE = ROOT / "docs" / "how-to" / "connect-a-client.md"
_CLIP = "file:///media/clip.mp4"
_SERVER = "http://127.0.0.1:8000"


def programs(text: str) -> dict[str, str]:
    """Returns the programs of a page by the title above each, those in Python and JavaScript."""
    titled = re.split(r"^## (.+)$", text, flags=re.MULTILINE)[1:]
    found = {}
    for title, section in zip(titled[::2], titled[1::2], strict=True):
        if block := re.search(r"^```(?:python|javascript)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL):
            found[title] = block[1]
    return found


def in_python(code: str, folder: Path) -> str:
    """Returns what a program prints in the environment of the clients."""
    (folder / "program.py").write_text(code, encoding="utf-8")
    return _output([str(environment("libraries").programs / "python"), "program.py"], folder)


def in_javascript(code: str, folder: Path) -> str:
    """Returns what a program prints in Node.js, with OpenAI's package."""
    kept = cache_folder() / "javascript"
    if not (kept / "node_modules" / "openai").exists():
        kept.mkdir(parents=True, exist_ok=True)
        _output(["npm", "install", "--no-save", "--silent", "--prefix", str(kept), "openai"], folder)
    (kept / "program.mjs").write_text(code, encoding="utf-8")
    return _output(["node", str(kept / "program.mjs")], folder)


RUNNERS: dict[str, Callable[[str, Path], str]] = {
    "JavaScript": in_javascript,
    "LangChain": in_python,
    "LiteLLM": in_python,
}


def _output(command: list[str], folder: Path) -> str:
    known = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command,
        cwd=folder,
        env=known | {"NO_PROXY": "127.0.0.1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr or done.stdout)
    return done.stdout.strip()


def answers(folder: Path) -> dict[str, tuple[str, str]]:
    """Returns what each program says, and the truth."""
    scene, clip = make_scene(3, 30.0), folder / "clip.mp4"
    write_demo_video(clip, scene, fps=8, height=180, width=320)
    truth = min(scene.objects, key=lambda each: each.start_s).shape
    found = {}
    with kept_port() as port:
        command = [sys.executable, "-m", "epd", "serve", "--local", "--port", str(port)]
        command += ["--allowed-media-path", str(folder)]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as server:
            try:
                assert server.stdout is not None
                if not any("ready in" in line for line in server.stdout):
                    raise RuntimeError("the server did not start; run epd serve --local to see why")
                for title, code in programs(PAGE.read_text(encoding="utf-8")).items():
                    here = code.replace(_SERVER, f"http://127.0.0.1:{port}").replace(_CLIP, clip.as_uri())
                    found[title] = (RUNNERS[title](here, folder), truth)
            finally:
                server.terminate()
                server.wait()
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = answers(Path(folder))
    for title, (said, truth) in found.items():
        print(f"{title}: {said} (truth: {truth})")
    sys.exit(any(said != truth for said, truth in found.values()))


if __name__ == "__main__":
    main()
