"""`epd models` lists the families that load, from the registry that opens them."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from epd.models.families import FAMILIES, REFUSED
from epd.serve_app.cli.program import app


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["models", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_each_family_is_a_row() -> None:
    shown = run()
    rows = {line.split()[0]: line for line in shown.splitlines()}
    assert set(FAMILIES) <= set(rows)
    assert " ".join(rows["molmo2"].split()) == (
        f"molmo2 Molmo 2 transformers image and video 1 frame {FAMILIES['molmo2'].limit}"
    )
    assert "native" in rows["qwen3_vl"]
    for model_type, reason in REFUSED.items():
        assert f"refused: {model_type}, {reason}\n" in shown


def test_json_has_the_same() -> None:
    shown = json.loads(run("--json"))
    assert {each["model_type"]: each["impl"] for each in shown["families"]} == {
        name: family.impl for name, family in FAMILIES.items()
    }
    assert shown["refused"] == dict(REFUSED)
