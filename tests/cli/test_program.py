"""The program `epd`: its commands, their groups and help, and the options that are fields of `AppArgs`."""

from __future__ import annotations

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from epd.cli.program import _COMMANDS, _GROUPS, app
from serve_app.app_args import AppArgs

PROGRAM = get_command(app)


def test_help_lists_each_command_in_its_group() -> None:
    shown = CliRunner().invoke(app, ["--help"]).stdout
    for title, group in _GROUPS.items():
        section = shown.partition(f"{title}:\n")[2].partition("\n\n")[0].splitlines()
        assert [line.split()[0] for line in section] == list(group)
        assert all(line.endswith(group[line.split()[0]][1]) for line in section)


@pytest.mark.parametrize("name", _COMMANDS)
def test_a_command_has_the_help_that_the_program_lists(name: str) -> None:
    """The program does not import a command to list it."""
    help_text = PROGRAM.commands[name].help  # type: ignore[attr-defined]
    assert help_text.splitlines()[0] == _COMMANDS[name][1]


@pytest.mark.parametrize("name", AppArgs.model_fields)
def test_each_argument_of_the_application_is_an_option_of_serve(name: str) -> None:
    field = AppArgs.model_fields[name]
    (option,) = [each for each in PROGRAM.commands["serve"].params if each.name == name]  # type: ignore[attr-defined]
    if name != "model":
        assert option.opts == [f"--{name.replace('_', '-')}"]
    assert option.help == field.description
    shown = CliRunner().invoke(app, ["config", "show"]).stdout
    assert name == "limits" or f"\n{name} " in f"\n{shown}"
