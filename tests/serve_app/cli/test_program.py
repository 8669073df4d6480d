"""The program `epd`: its commands, their groups and help, and the options that are fields of `AppArgs`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from epd.serve_app.app_args import AppArgs
from epd.serve_app.cli.program import _COMMANDS, _GROUPS, app
from tests import ROOT

PROGRAM = get_command(app)
# Torch alone takes more, on any machine; the slowest of these takes 0.3 s on one that is busy.
MOST_HELP_S = 1.0
HEAVY = {"torch", "transformers", "torchvision", "triton", "ray"}
EVERY_HELP = """
import contextlib, io, json, sys, time
from epd.serve_app.cli.program import _COMMANDS, main

seconds = {}
for name in _COMMANDS:
    sys.argv = ["epd", name, "--help"]
    start = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
        main()
    assert shown.getvalue().startswith(f"Usage: epd {name}")
    seconds[name] = time.process_time() - start
print(json.dumps([seconds, list(sys.modules)]))
"""


def test_help_lists_each_command_in_its_group() -> None:
    shown = CliRunner().invoke(app, ["--help"]).stdout
    for title, group in _GROUPS.items():
        section = shown.partition(f"{title}:\n")[2].partition("\n\n")[0].splitlines()
        assert [line.strip().split("  ")[0] for line in section] == list(group)
        assert all(line.endswith(group[line.strip().split("  ")[0]][1]) for line in section)


def test_the_help_of_every_command_is_quick_and_imports_nothing_heavy() -> None:
    """Of CPU time: the machine may be busy."""
    done = subprocess.run([sys.executable, "-c", EVERY_HELP], capture_output=True, timeout=200, check=True)
    seconds, modules = json.loads(done.stdout)
    assert seconds.keys() == _COMMANDS.keys()
    assert HEAVY.isdisjoint(modules)
    assert {name: each for name, each in seconds.items() if each > MOST_HELP_S} == {}


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


WITHOUT = """
import sys
package, *sys.argv[1:] = sys.argv[1:]
sys.modules[package] = None  # its import fails as if it were not installed
from epd.serve_app.cli.program import main
main()
"""


@pytest.mark.parametrize(
    ("package", "words", "advice"),
    [
        ("fastapi", "serve --local", "install epd-vlm with [serve], or with [local] where Ray is not needed"),
        ("ray", "serve --topology 1epd", "install epd-vlm with [serve]"),
    ],
)
def test_a_command_without_its_extra_says_which_to_install(package: str, words: str, advice: str) -> None:
    command = [sys.executable, "-c", WITHOUT, package, *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    expected = f"error: this command needs the package {package}, which is not installed; {advice}"
    started, error = done.stderr.splitlines()
    assert " starts: model " in started
    assert (done.returncode, error) == (2, expected)


def test_a_library_that_does_not_load_is_told_in_one_line() -> None:
    """As on a machine that gives each process little address space."""
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({1 << 30}, {1 << 30})); "
    program = "from epd.serve_app.cli.program import main; main()"
    command = [
        sys.executable,
        "-c",
        limited + program,
        "ask",
        "docs/pictures/page-first.png",
        "What is shown?",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, cwd=ROOT)
    (error,) = done.stderr.splitlines()
    assert error.startswith("error: a library cannot be loaded (lib")
    assert "ulimit -v" in error
    assert done.returncode == 2


INTERRUPTED = """
import os, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it
wanted = sys.argv.pop(1)

class Interrupt:
    def find_spec(self, name, *others):
        if name == wanted:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
runpy.run_module("epd", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("imported", ["typer", "epd.serve_app.cli.ask", "torch"])
def test_ctrl_c_during_an_import_leaves_no_traceback(imported: str) -> None:
    words = ["ask", "docs/pictures/page-first.png", "What is shown?"]
    command = [sys.executable, "-c", INTERRUPTED, imported, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, cwd=ROOT)
    assert done.returncode in (-signal.SIGINT, 130)
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 1


ENDS = """
import atexit, sys, threading, time, weakref
from epd.serve_app.cli import program

class Freed:
    def __del__(self):
        print("freed")

def later():
    time.sleep(0.1)
    print("thread")

def app():
    global kept
    kept = Freed()
    threading.Thread(target=later).start()
    weakref.finalize(kept, print, "finalizer")
    atexit.register(print, "at exit")
    {end}

program.app = app
program.main()
"""


@pytest.mark.parametrize(
    ("end", "code", "message", "frees"),
    [
        ("sys.exit(3)", 3, "", False),
        ("sys.exit()", 0, "", False),
        ("sys.exit('no such model')", 1, "no such model\n", True),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n", True),
        ("pass", 0, "", True),
    ],
)
def test_the_process_ends_without_freeing_what_was_imported(
    end: str, code: int, message: str, frees: bool
) -> None:
    """All that waits for its end is done before; where Python has more to say, it says it and frees."""
    command = [sys.executable, "-c", ENDS.format(end=end)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == code
    assert done.stdout.split("\n")[:3] == ["thread", "at exit", "finalizer"]
    assert ("freed" in done.stdout) is frees
    assert done.stderr.endswith(message)
    assert message or not done.stderr


def test_what_cannot_be_written_is_reported_as_ever() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with os.fdopen(writer, "w") as broken:
        command = [sys.executable, "-c", ENDS.format(end="sys.exit(0)")]
        done = subprocess.run(
            command, stdout=broken, stderr=subprocess.PIPE, env=buffered, timeout=200, check=False
        )
    assert (done.returncode, b"BrokenPipeError" in done.stderr) == (120, True)
