"""`epd ask` imports where neither Ray nor a web server is installed, `epd serve --local` where Ray is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_PROGRAM = """
import sys
for name in ("ray", "fastapi", "starlette", "uvicorn", "prometheus_client"):
    sys.modules[name] = None  # any import of it now raises ImportError

from epd import video
from epd import encoders
from epd.serve_app.cli.program import main

sys.argv = ["epd", "ask", *sys.argv[1:]]
main()
"""


_NEITHER = """
import sys
for name in ("ray", "opentelemetry.sdk"):
    sys.modules[name] = None

import epd.serve_app.local.server
"""


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_question_is_answered_without_ray_and_web_server(media: dict[str, Path]) -> None:
    done = run(_PROGRAM, str(media["video"]), str(media["image"]), "What?", "--max-tokens", "3", "-v")
    assert done.returncode == 0, done.stderr
    assert "first token after" in done.stderr
    assert done.stdout.endswith("\n")


def test_a_local_server_needs_neither_ray_nor_what_comes_with_it() -> None:
    """OpenTelemetry's SDK is installed with Ray, and no part of `epd-vlm[local]`."""
    done = run(_NEITHER)
    assert done.returncode == 0, done.stderr


def test_the_same_program_fails_where_ray_is_needed() -> None:
    done = run("import sys; sys.modules['ray'] = None; import ray")
    assert "ModuleNotFoundError" in done.stderr
