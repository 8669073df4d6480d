"""`epd ask`, `epd serve --local` and what they need import where Ray is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_PROGRAM = """
import sys
sys.modules["ray"] = None  # any import of it now raises ImportError

import video, encoders, stages.colocated
from epd.cli.program import main

sys.argv = ["epd", "ask", *sys.argv[1:]]
main()
"""


def test_a_question_is_answered_without_ray(media: dict[str, Path]) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            _PROGRAM,
            str(media["video"]),
            str(media["image"]),
            "What?",
            "--max-tokens",
            "3",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "first token after" in done.stderr
    assert done.stdout.endswith("\n")


def test_a_local_server_needs_neither_ray_nor_what_comes_with_it() -> None:
    """OpenTelemetry's SDK is installed with Ray, and no part of `epd-vlm[local]`."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys\nfor name in ('ray', 'opentelemetry.sdk'): sys.modules[name] = None\n"
            "import serve_app.local.server",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_same_program_fails_where_ray_is_needed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.modules['ray'] = None; import ray"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "ModuleNotFoundError" in done.stderr
