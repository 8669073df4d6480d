"""Notebooks run as they are written, cell after cell, and print what is true."""

from __future__ import annotations

import contextlib
import io
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from epd.shapes import make_scene
from tests import ROOT
from tests.ports import kept_port

FOLDER = ROOT / "docs" / "notebooks"
NAMES = ("ask", "plan", "serve")


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Path]:
    with contextlib.chdir(tmp_path):
        yield tmp_path


def notebook(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))
    return found


def run(name: str) -> str:
    """What the cells print that share their names, as in one program."""
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for number, cell in enumerate(notebook(name)["cells"]):
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), f"{name}.ipynb, cell {number}", "exec"), names)
    return printed.getvalue()


def test_all_notebooks_are_run() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == list(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_one_that_jupyter_opens_without_old_outputs(name: str) -> None:
    found = notebook(name)
    assert (found["nbformat"], found["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in found["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in found["cells"]:
        code = {"execution_count": None, "outputs": []} if cell["cell_type"] == "code" else {}
        assert {key: cell[key] for key in cell.keys() - {"cell_type", "id", "metadata", "source"}} == code


@pytest.mark.usefixtures("here")
def test_ask_is_told_the_first_shape() -> None:
    shapes = sorted(make_scene(3, 30.0).objects, key=lambda each: each.start_s)
    printed = run("ask")
    assert f"first: {shapes[0].shape}\n" in printed
    assert f"colour: {shapes[0].colour}\n" in printed
    whole, quarter = re.findall(r"^(\d+) visual tokens|with a quarter: \w+ (\d+)$", printed, re.MULTILINE)
    assert int(whole[0]) / 4 <= int(quarter[1]) < int(whole[0]) / 2  # each group keeps whole tokens


@pytest.mark.usefixtures("here")
def test_a_server_answers_and_all_of_its_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """The port that it finds is free stays so until its server listens, whoever else looks for one."""
    with kept_port() as port:
        free = SimpleNamespace(getsockname=lambda: ("127.0.0.1", port))
        monkeypatch.setattr(socket, "create_server", lambda *_: contextlib.nullcontext(free))
        printed = run("serve")
    assert "8 of 8 answered; first token after " in printed
    assert printed.endswith("ended with 0\n")


def test_the_planned_gpus_keep_the_objectives_that_one_does_not() -> None:
    """Of a computed profile; more copies have room for as many times the requests."""
    printed = run("plan")
    kept = [int(each) for each in re.findall(r"(\d+)% kept", printed)]
    assert kept[0] == kept[2] == kept[3] == 100 > kept[1]
    limits = [int(each) for each in re.findall(r"room for (\d+)", printed)]
    assert limits[2] == pytest.approx(3 * limits[1], abs=2)
