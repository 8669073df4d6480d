"""`epd keys new`: the line goes into a file, and the key is shown once, apart from it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from epd.serve_app.cli.program import app
from epd.serve_app.clients import KeysFile


def test_a_line_names_a_key_that_only_stderr_shows(tmp_path: Path) -> None:
    options = ("--right", "ask", "--requests-per-minute", "60", "--expires", "2999-01-31")
    made = CliRunner().invoke(app, ["keys", "new", "ann", *options])
    key = made.stderr.split()[-1]
    assert key not in made.stdout
    file = tmp_path / "keys.jsonl"
    file.write_text(made.stdout)
    found = KeysFile(file).find(key.encode())
    assert found is not None
    assert (found.name, list(found.rights), found.requests_per_minute) == ("ann", ["ask"], 60)
    again = CliRunner().invoke(app, ["keys", "new", "ann"])
    assert again.stderr.split()[-1] != key


@pytest.mark.parametrize(
    "arguments", [("a b",), ("ann", "--right", "all"), ("ann", "--tokens-per-minute", "0")]
)
def test_what_is_no_key_is_refused_in_one_line(arguments: tuple[str, ...]) -> None:
    refused = CliRunner().invoke(app, ["keys", "new", *arguments])
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr.startswith("error: ")
    assert refused.stderr.count("\n") == 1
