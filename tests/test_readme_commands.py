"""README's commands that need no server run in the order they are written in, in an empty folder."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from epd.cli.program import app
from tests import ROOT

README = ROOT / "README.md"
# A server is asked by tests/serve_app/http/test_readme.py; an evaluation of 60 videos takes minutes.
_LONG = {"serve", "eval"}


def _blocks() -> list[str]:
    """Blocks of shell commands: those that have no language."""
    text = README.read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [code for language, code in blocks if not language]


def test_commands_run_in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = []
    for block in _blocks():
        for name, text in re.findall(r"^cat > (\S+) <<'END'\n(.*?)^END$", block, re.MULTILINE | re.DOTALL):
            Path(name).write_text(text)
        for line in re.findall(r"^epd (.+)$", block, flags=re.MULTILINE):
            arguments = shlex.split(line)
            if arguments[0] in _LONG:
                continue
            result = CliRunner().invoke(app, arguments)
            assert result.exit_code == 0, f"epd {line}\n{result.output}"
            names.append(arguments[0])
    assert names == ["demo-video", "ask", "ask", "batch", "ask"]
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 2
