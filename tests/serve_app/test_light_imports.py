"""What lies between a client and the workers loads neither a model's library nor a decoder.

And an answer of the embedded model needs neither transformers nor torchvision, nor torch's compiler: together
they take more CPU time to import than the answer and all else. A client of HTTP, the simulator, the catalogue
of devices and Pillow's plugins for other formats would take a twelfth of what is left.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.media import write_video

HEAVY = ("torch", "torchvision", "transformers", "av", "ray", "triton")
PATH = {**os.environ, "PYTHONPATH": str(ROOT)}
HTTP = sorted(
    ".".join(("epd", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
    for path in (ROOT / "serve_app" / "http").rglob("*.py")
)


def loaded_by(*modules: str) -> dict[str, list[str]]:
    """Returns which heavy packages are loaded once each module was imported, in one fresh interpreter."""
    code = (
        "import importlib, json, sys\n"
        "def loaded(name):\n"
        "    importlib.import_module(name)\n"
        f"    return [heavy for heavy in {HEAVY} if heavy in sys.modules]\n"
        f"print(json.dumps({{name: loaded(name) for name in {modules}}}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("modules", [("epd.serve_app.service",), ("epd.serve_app.http.api",), tuple(HTTP)])
def test_nothing_heavy_is_loaded(modules: tuple[str, ...]) -> None:
    assert loaded_by(*modules) == {name: [] for name in modules}


def test_an_answer_of_the_embedded_model_loads_no_more_of_torch_than_it_needs(tmp_path: Path) -> None:
    write_video(tmp_path / "clip.mp4", num_frames=24, width=160, height=120)
    code = (
        "import sys\n"
        "from epd import LLM\n"
        "with LLM() as llm:\n"
        "    assert llm.ask('clip.mp4', 'Which shape appears first?').text\n"
        "needless = ('transformers', 'torchvision', 'torch._dynamo', 'torch._inductor', 'sympy', 'triton',\n"
        "            'epd.simulate', 'epd.profiles.accelerators', 'yaml', 'PIL.PdfImagePlugin')\n"
        "print([name for name in needless if name in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=PATH)
    assert done.stdout == "[]\n"


def test_ask_imports_no_client_and_no_tables() -> None:
    """Both come with a program of httpx's: together a tenth of what it takes to answer."""
    code = (
        "import sys\n"
        "from epd.serve_app.cli import ask, own_model\n"
        "print([name for name in ('httpx', 'rich', 'pygments', 'click') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=PATH)
    assert done.stdout == "[]\n"
