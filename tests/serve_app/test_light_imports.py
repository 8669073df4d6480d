"""What lies between a client and the workers loads neither a model's library nor a decoder."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests import ROOT

HEAVY = ("torch", "torchvision", "transformers", "av", "ray", "triton")
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
