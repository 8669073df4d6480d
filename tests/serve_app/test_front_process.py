"""The process of a front: no media are in it, and nothing that reads them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests import ROOT

# Starts the HTTP app over a fleet that is elsewhere, and prints what the process has then.
FRONT = """
import asyncio, json, os, sys, threading
from pathlib import Path
from epd.serve_app.app_args import AppArgs
from epd.serve_app.composition import create_app
from epd.serve_app.ray.process_tree import children

class Elsewhere:
    workers = {}
    async def start(self): pass
    async def close(self): pass
    async def events(self):
        await asyncio.Event().wait()
        yield

async def run():
    app = await create_app(AppArgs().resolved(), Elsewhere())
    async with app.router.lifespan_context(app):
        print(json.dumps({
            "folders": [each.name for each in Path(os.environ["TMPDIR"]).iterdir()],
            "children": list(children(os.getpid()).values()),
            "threads": [each.name for each in threading.enumerate()],
        }))

asyncio.run(run())
"""


def test_a_front_has_no_spool_and_no_child(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", FRONT],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["folders"] == []
    assert found["children"] == []
    assert not [name for name in found["threads"] if name.startswith(("media", "image", "adapter"))]
