"""A model by its name at ModelScope: from its client's cache, or by a download of the files that are read."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from epd.engine_config import HUB_NAMES
from epd.errors import RequestError
from epd.models import HUBS, embedded_model_path, find_model, served_name
from epd.models.hub import HubModel, name_of
from epd.models.modelscope import ModelScopeModel
from epd.serve_app.app_args import MEDIA_FIELDS, STAGE_FIELDS, AppArgs
from epd.serve_app.cli.program import app
from tests.models.fake_hub import FakeHub, served_hub

NAME = "tiny/shapes-2.5"
SHOW = ("config", "show", f"model={NAME}", "hub=modelscope", "--json")
READ = {"config.json", "generation_config.json", "processor_config.json", "chat_template.jinja"} | {
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as it is published, with files that are not read."""
    path = shutil.copytree(embedded_model_path(), tmp_path_factory.mktemp("modelscope") / "shapes")
    (path / "onnx").mkdir()
    for name in ("pytorch_model.bin", "onnx/config.json", "a.py"):
        (path / name).write_bytes(b"not read")
    return path


@pytest.fixture
def hub(folder: Path) -> Iterator[FakeHub]:
    with served_hub({NAME: folder}) as served:
        yield served


def epd(*arguments: str, cache: Path, hub: FakeHub | None = None, **others: str) -> Result:
    """Runs the command with a cache of its own. The real program: `test_hub.py`."""
    unset = dict.fromkeys(name for name in os.environ if name.startswith(("MODELSCOPE_", "EPD_")))
    where = {"MODELSCOPE_CACHE": str(cache), "MODELSCOPE_ENDPOINT": hub.url if hub else "http://127.0.0.1:9"}
    return CliRunner().invoke(app, arguments, env={**unset, **where, **others})


def snapshot(cache: Path) -> Path:
    return cache / "models" / "tiny--shapes-2.5" / "snapshots" / "master"


def test_a_download_takes_what_is_read_and_the_cache_needs_no_hub(
    hub: FakeHub, folder: Path, tmp_path: Path
) -> None:
    done = epd(*SHOW, cache=tmp_path, hub=hub, MODELSCOPE_API_TOKEN="mine")
    assert done.exit_code == 0, done.stderr
    assert done.stderr == f"downloads {NAME}, 0.0 GB, to '{tmp_path}'\n"
    assert (set(hub.got), set(hub.tokens)) == (READ, {"Bearer mine"})
    shown = json.loads(done.stdout)
    assert (shown["model"], shown["revision"], shown["hub"]) == (NAME, "master", "modelscope")
    assert {each.name for each in snapshot(tmp_path).iterdir()} == READ
    for name in READ:
        assert (snapshot(tmp_path) / name).read_bytes() == (folder / name).read_bytes()

    again = epd(*SHOW, cache=tmp_path)
    assert json.loads(again.stdout) == shown
    assert (again.exit_code, again.stderr) == (0, "")


def test_a_model_of_modelscope_answers(hub: FakeHub, tmp_path: Path, media: dict[str, Path]) -> None:
    asked = ("ask", str(media["video"]), "Which shape appears first?", "--model")
    named = epd(*asked, NAME, "--hub", "modelscope", cache=tmp_path, hub=hub)
    own = epd(*asked, str(embedded_model_path()), cache=tmp_path)
    assert named.stdout == own.stdout != ""


@pytest.mark.parametrize("above", ["models", "hub/models"])
def test_the_cache_of_older_clients_is_found(tmp_path: Path, folder: Path, above: str) -> None:
    shutil.copytree(folder, tmp_path / above / "tiny" / "shapes-2___5")
    done = epd(*SHOW, cache=tmp_path)
    assert (done.exit_code, done.stderr) == (0, "")
    other = epd(*SHOW, "revision=v2", cache=tmp_path)  # such a folder does not tell its revision
    assert other.exit_code == 2


def test_a_download_that_was_cut_goes_on_where_it_ended(hub: FakeHub, folder: Path, tmp_path: Path) -> None:
    hub.most_bytes = 100_000
    cut = epd(*SHOW, cache=tmp_path, hub=hub)
    assert (cut.exit_code, cut.stdout) == (2, "")
    num_bytes = (folder / "model.safetensors").stat().st_size
    said = f"received 100000 bytes for model.safetensors; allowed: its {num_bytes}; run it again\n"
    assert cut.stderr.endswith(said)
    assert not (snapshot(tmp_path) / "model.safetensors").exists()

    hub.most_bytes = None
    assert epd(*SHOW, cache=tmp_path, hub=hub).exit_code == 0
    assert hub.starts["model.safetensors"] == 100_000
    whole = (folder / "model.safetensors").read_bytes()
    assert (snapshot(tmp_path) / "model.safetensors").read_bytes() == whole


def test_other_bytes_than_the_listed_are_refused_and_not_kept(hub: FakeHub, tmp_path: Path) -> None:
    hub.digests["config.json"] = "0" * 64
    done = epd(*SHOW, cache=tmp_path, hub=hub)
    assert done.exit_code == 2
    assert "error: received other bytes than the hub lists for config.json" in done.stderr
    assert not any(each.name.startswith("config.json") for each in snapshot(tmp_path).iterdir())


def test_more_bytes_than_the_listed_are_not_read_on(hub: FakeHub, folder: Path, tmp_path: Path) -> None:
    hub.sizes["model.safetensors"] = 10
    done = epd(*SHOW, cache=tmp_path, hub=hub)
    assert done.exit_code == 2
    assert "bytes for model.safetensors; allowed: its 10; run it again" in done.stderr
    assert not (snapshot(tmp_path) / "model.safetensors.incomplete").exists()


@pytest.mark.parametrize("status", [401, 404])
def test_a_model_that_is_not_there_is_one_line(hub: FakeHub, tmp_path: Path, status: int) -> None:
    hub.status = status
    done = epd(*SHOW, cache=tmp_path, hub=hub)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    said = (
        f"error: there is no folder '{NAME}', and ModelScope shows no model of that name with a revision 'mas"
    )
    assert done.stderr.startswith(said)


def test_without_the_hub_the_command_to_fetch_is_said(hub: FakeHub, tmp_path: Path) -> None:
    command = f"modelscope download --model {NAME} --revision v2 --include "
    hub.status = 500
    for reached in (None, hub):
        done = epd(*SHOW, "revision=v2", cache=tmp_path, hub=reached)
        assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert done.stderr.endswith(
            command + '"*.json" "*.jinja" "*.txt" "*.model" "*.tiktoken" "*.ttf" "*.safetensors"\n'
        )


def test_a_disk_without_room_is_said_before_weights_come(hub: FakeHub, tmp_path: Path) -> None:
    hub.sizes["model.safetensors"] = 10**18
    done = epd(*SHOW, cache=tmp_path, hub=hub)
    assert done.exit_code == 3
    assert "are free; make room, or set MODELSCOPE_CACHE to a folder on another disk" in done.stderr
    assert "model.safetensors" not in hub.got


def test_workers_look_in_their_own_cache_for_the_same_revision(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelScopeModel, "fetched", lambda _model: folder)
    args = AppArgs(model=NAME, hub="modelscope").resolved()
    assert args.served_name == NAME
    for fields in (STAGE_FIELDS, MEDIA_FIELDS):
        sent = args.for_workers(*fields)
        assert find_model(sent.model, sent.revision, sent.hub) == ModelScopeModel(NAME, "master")


def test_a_hub_is_for_names_alone() -> None:
    assert find_model(NAME, hub="modelscope") == ModelScopeModel(NAME)
    assert find_model(NAME) == HubModel(NAME)
    assert served_name(NAME) == NAME == name_of(snapshot(Path("cache")))
    with pytest.raises(RequestError, match="received the hub 'modelscope' of 'shapes-vl', which is no model"):
        find_model("shapes-vl", hub="modelscope")
    assert tuple(HUBS) == HUB_NAMES
    with pytest.raises(ValueError, match="received a hub of 'github'; allowed: huggingface, modelscope; cho"):
        AppArgs(hub="github")
