"""A field of an engine's record is an option of every command that runs a model, which does not name it."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from epd.engine_config import DEFAULT_ENGINE, ENGINE_FIELDS, EngineConfig
from epd.errors import RequestError
from epd.models import embedded_model_path
from epd.models.hub import HubModel
from epd.serve_app.app_args import STAGE_FIELDS, AppArgs
from epd.serve_app.cli.profile import PROFILED
from epd.serve_app.cli.program import app
from epd.serve_app.composition import worker_settings
from tests import ROOT

COMMANDS = ("ask", "chat", "batch", "eval", "profile", "serve")
# A value of each field that is not its default.
GIVEN: dict[str, Any] = {
    "max_pixels": 50_000,
    "video_max_pixels": 50_000,
    "video_max_tokens": 600,
    "cap_pixels_per_frame": False,
    "bare_processor": True,
    "model_impl": "native",
    "device": "cpu",
    "dtype": "float32",
    "tensor_parallel_size": 2,
    "async_scheduling": True,
    "enforce_eager": True,
    "num_threads": 3,
    "quantization": "fp8",
    "kv_cache_dtype": "int8_values",
    "num_kv_tokens": 4096,
    "gpu_memory_utilization": 0.5,
    "group_tokens": 64,
    "skip_static": 0.5,
    "tower_share": 0.5,
    "tower_merge_layer": 2,
    "cache_dir": Path("kept"),
    "cache_bytes": 1 << 30,
    "cache_objects": "s3://bucket/kept",
    "revision": "v1",
    "hub": "modelscope",
    "lora_modules": frozenset({"pets=adapter"}),
    "draft": "auto",
    "max_draft": 4,
}


def options_of(command: str) -> dict[str, Any]:
    found: Any = typer.main.get_command(app)
    return {each.name: each for each in found.get_command(None, command).params}


def flags_of(name: str) -> list[str]:
    """The field's flag, with the value above."""
    flag, value = f"--{name.replace('_', '-')}", GIVEN[name]
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    values = value if isinstance(value, frozenset) else [value]
    return [part for each in values for part in (flag, str(each))]


def test_every_field_has_another_value_here() -> None:
    assert GIVEN.keys() == set(ENGINE_FIELDS)
    assert EngineConfig.checked(GIVEN).given == GIVEN
    assert not DEFAULT_ENGINE.given


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_the_flag_of_each_field_with_its_help(command: str) -> None:
    options = options_of(command)
    for name, field in EngineConfig.model_fields.items():
        if command == "profile" and name not in PROFILED:
            assert name not in options
            continue
        assert f"--{name.replace('_', '-')}" in options[name].opts
        assert options[name].help == field.description
        if (command, name) != ("profile", "num_threads"):
            assert options[name].default == field.default


def test_no_command_names_a_field_as_its_parameter() -> None:
    """Nor does anything on the way from the command to the engine's builder."""
    modules = {"ask", *COMMANDS, "own_model", "conversations"} - {"chat"}  # which stands beside ask
    ways = [
        *(ROOT / "serve_app/cli" / f"{module}.py" for module in modules),
        *(
            ROOT / name
            for name in ("serve_app/llm.py", "serve_app/local/own_service.py", "serve_app/ray/server.py")
        ),
        ROOT / "stages/engine/setup.py",
    ]
    assert {path: named for path in ways if (named := _parameters(path) & _ENGINE_ALONE)} == {}


# `setup.kv_shape` makes the pools of a pipeline's parts too, from a number that was measured.
_ENGINE_ALONE = set(ENGINE_FIELDS) - {"num_kv_tokens", "num_threads"}


def _parameters(path: Path) -> set[str]:
    """The names of all parameters and annotated fields of a module."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    fields = {
        each.target.id
        for each in nodes
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    return fields | {each.arg for each in nodes if isinstance(each, ast.arg)}


@pytest.mark.parametrize("name", [name for name in ENGINE_FIELDS if name != "tower_merge_layer"])
@pytest.mark.parametrize("command", ["ask", "chat", "batch"])
def test_a_running_server_takes_no_option_of_an_engine(command: str, name: str, tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.touch()
    asked = {"ask": ["clip.mp4", "What?"], "chat": ["clip.mp4"], "batch": [lines, tmp_path / "out.jsonl"]}
    arguments = [command, *map(str, asked[command]), "--url", "http://127.0.0.1:1", *flags_of(name)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    flag = f"--{name.replace('_', '-')}"
    assert done.stderr == (
        f"error: received {flag} {GIVEN[name]} for a running server, which has its own value; give it to "
        "epd serve\n"
    )


def test_workers_get_every_field_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HubModel, "fetched", lambda _model: embedded_model_path())
    args = AppArgs(model="tiny/shapes", **GIVEN)
    assert args.engine == EngineConfig(**GIVEN)
    sent = worker_settings(args.for_workers(*STAGE_FIELDS)).engine
    assert sent == args.engine.model_copy(update={"group_tokens": DEFAULT_ENGINE.group_tokens})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num_threads": 0}, "--num-threads 0; allowed: at least 1; change it or leave it out"),
        ({"num_threads": 257}, "--num-threads 257; allowed: at most 256"),
        ({"gpu_memory_utilization": 0.0}, "--gpu-memory-utilization 0.0; allowed: more than 0"),
        ({"tensor_parallel_size": 65}, "--tensor-parallel-size 65; allowed: at most 64"),
        ({"skip_static": float("nan")}, "a skip_static of nan; allowed: 0 or more"),
        ({"tower_share": 2.0}, "a tower_share of 2; allowed"),
        ({"tower_merge_layer": 0}, "a tower_merge_layer of 0; allowed: at least 1"),
        ({"tower_merge_layer": 2}, "a tower_merge_layer of 2 alone; allowed: with tower_share"),
        ({"draft": "guess"}, "a draft of 'guess'; allowed: none, prompt-lookup"),
        ({"max_draft": 33}, "a max_draft of 33; allowed: 1 to 32"),
        ({"device": "tpu"}, "the device 'tpu'; allowed: auto, cpu"),
        ({"kv_cache_dtype": "fp8"}, "the kv_cache_dtype 'fp8'; allowed: auto, int8_values; use int8_values"),
        ({"quantization": "awq"}, "the quantization 'awq'; allowed: fp8; leave it out"),
        ({"dtype": "int8"}, "the dtype 'int8'; allowed: auto, bfloat16"),
    ],
)
def test_a_value_that_is_not_allowed_gives_one_line(given: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError) as refused:
        EngineConfig.checked(given)
    assert str(refused.value).startswith(f"received {said}")
    assert "\n" not in str(refused.value)
