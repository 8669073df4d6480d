"""`epd config show`: what an application would be made of, and the ceilings that its requests meet."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from epd.control.request_budget import RequestLimits
from epd.errors import RequestError
from epd.serve_app.app_args import AppArgs
from epd.serve_app.cli.config import limits_of, parse_values, read_args
from epd.serve_app.cli.program import app
from epd.serve_app.orchestration.request_planner import RequestPlanner


def shown(*options: str) -> str:
    done = CliRunner().invoke(app, ["config", "show", *options])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_every_argument_and_every_ceiling_is_shown() -> None:
    record = json.loads(shown("--json"))
    assert record.keys() == AppArgs.model_fields.keys()
    assert record["limits"].keys() == RequestLimits().record().keys()
    text = shown()
    assert all(f"\n{name} " in f"\n{text}" for name in (*record, *record["limits"]) if name != "limits")
    assert "max_frames          65,536" in text


def test_values_win_over_a_file(tmp_path: Path) -> None:
    path = tmp_path / "args.yaml"
    path.write_text(
        "topology: 2e1p1d\ndevice: cuda:1\ndtype: bfloat16\nmax_requests: 7\n"
        "limits: {max_frames: 100, max_media: 3}\n"
    )
    record = json.loads(shown("--file", str(path), "max_requests=8", "limits.max_media=5", "--json"))
    assert (record["topology"], record["max_requests"]) == ("2e1p1d", 8)
    assert (record["device"], record["dtype"]) == ("cuda:1", "bfloat16")
    assert (record["limits"]["max_frames"], record["limits"]["max_media"]) == (100, 5)


def test_a_configuration_of_serve_is_read() -> None:
    assert read_args(Path("docs/deploy/serve_config.yaml"))["max_requests"] == 256


def test_keys_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPD_ADMIN_API_KEY", "very secret")
    record = json.loads(shown("api_key=also secret", "--json"))
    assert (record["api_key"], record["admin_api_key"]) == ("set", "set")
    assert "secret" not in shown("api_key=also secret")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["max_requests"], "received 'max_requests'; allowed: NAME=VALUE"),
        (["max_request=1"], "there is no argument max_request; did you mean max_requests?"),
        (["limits.max_frame=1"], "there is no argument limits.max_frame; did you mean limits.max_frames?"),
        (["limits.max_frames=0"], "received the limit max_frames=0; allowed: an integer of at least 1"),
        (["limits.max_frames=many"], "limits.max_frames: Input should be a valid integer"),
        (["topology=2e"], "topology"),
        (["device=gpu"], "device: received the device 'gpu'; allowed: auto, cpu, cuda"),
        (["dtype=int8"], "dtype: received the dtype 'int8'; allowed: auto, bfloat16, float16, float32"),
        (["model=no/such/folder"], "no model folder at"),
        (["--file", "no/such.yaml"], "cannot read 'no/such.yaml'"),
    ],
)
def test_what_cannot_be_is_told(options: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["config", "show", *options])
    assert done.exit_code == 2
    assert said in done.stderr


def test_a_file_of_something_else_is_told(tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text("[1, 2]")
    with pytest.raises(RequestError, match="holds a list; allowed: names and values"):
        read_args(tmp_path / "list.yaml")
    assert parse_values(["a=b=c"]) == {"a": "b=c"}


@pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")
def test_ceilings_are_those_of_the_running_application(checkpoints: dict[str, Path]) -> None:
    """The command reads the model's JSON; the application asks its tokenizer and configuration."""
    for path in checkpoints.values():
        args = AppArgs(model=path, limits=RequestLimits(max_media=9))
        assert limits_of(args) == RequestPlanner(path, limits=args.limits).limits, path
