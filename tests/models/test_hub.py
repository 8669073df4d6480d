"""A model by its name at the hub: from the cache, or by a download of the files that are read."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from epd.errors import RequestError
from epd.models import embedded_model_path, find_model, served_name
from epd.models.folder import INDEX
from epd.models.hub import HubModel, name_of
from epd.serve_app.app_args import MEDIA_FIELDS, STAGE_FIELDS, AppArgs
from epd.serve_app.cli.program import app
from tests.models.fake_hub import COMMIT, FakeHub, served_hub

NAME = "tiny/shapes"
SHOW = ("config", "show", f"model={NAME}", "--json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as it is published: what is read, and the same weights in formats that are not."""
    path = shutil.copytree(embedded_model_path(), tmp_path_factory.mktemp("hub") / "shapes")
    (path / "onnx").mkdir()
    for name in ("pytorch_model.bin", "model.gguf", "consolidated.safetensors", "onnx/model.onnx", "a.py"):
        (path / name).write_bytes(b"not read")
    return path


@pytest.fixture
def hub(folder: Path) -> Iterator[FakeHub]:
    with served_hub({NAME: folder}) as served:
        yield served


def epd(
    *arguments: str, home: Path, hub: FakeHub | None = None, **others: str
) -> subprocess.CompletedProcess:
    """Runs the program with a cache of its own."""
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HF_", "EPD_", "TRANSFORMERS_"))
    }
    where = {"HF_HOME": str(home), "HF_ENDPOINT": hub.url if hub else "http://127.0.0.1:9"}
    # The hub is a thread of this process, which may have to wait for a core.
    where |= {"HF_HUB_ETAG_TIMEOUT": "600", "HF_HUB_DOWNLOAD_TIMEOUT": "600"}
    command = [sys.executable, "-m", "epd", *arguments]
    return subprocess.run(command, env=own | where | others, capture_output=True, text=True, check=False)


def test_a_download_takes_what_is_read_and_the_cache_needs_no_hub(
    hub: FakeHub, folder: Path, tmp_path: Path
) -> None:
    done = epd(*SHOW, home=tmp_path, hub=hub)
    assert done.returncode == 0, done.stderr
    assert f"downloads {NAME}, 0.0 GB, to '{tmp_path}/hub'" in done.stderr
    read = {"config.json", "generation_config.json", "processor_config.json", "chat_template.jinja"}
    assert set(hub.got) == read | {"tokenizer.json", "tokenizer_config.json", "model.safetensors"}
    shown = json.loads(done.stdout)
    assert (shown["model"], shown["revision"]) == (NAME, COMMIT)
    got = tmp_path / "hub" / "models--tiny--shapes" / "snapshots" / COMMIT
    assert (got / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()

    hub.got.clear()
    again = epd(*SHOW, home=tmp_path)
    assert json.loads(again.stdout) == shown
    assert (again.returncode, again.stderr, hub.got) == (0, "", [])


def test_a_model_of_the_hub_answers(hub: FakeHub, tmp_path: Path, media: dict[str, Path]) -> None:
    asked = ("ask", str(media["video"]), "Which shape appears first?", "--model")
    named = epd(*asked, NAME, home=tmp_path, hub=hub)
    own = CliRunner().invoke(app, [*asked, str(embedded_model_path())])
    assert named.stdout == own.stdout != ""


def test_shards_come_by_their_index(tmp_path: Path, folder: Path) -> None:
    sharded = shutil.copytree(folder, tmp_path / "sharded")
    (sharded / "model.safetensors").unlink()
    for number, tensor in enumerate("ab"):
        header = json.dumps({tensor: {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
        (sharded / f"part{number}.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"0")
    weights = {"a": "part0.safetensors", "b": "part1.safetensors"}
    (sharded / INDEX).write_text(json.dumps({"weight_map": weights}))
    with served_hub({NAME: sharded}) as hub:
        done = epd(*SHOW, home=tmp_path / "home", hub=hub)
    assert done.returncode == 0, done.stderr
    assert {name for name in hub.got if "safetensors" in name} == {INDEX, *weights.values()}


def test_an_unfinished_download_goes_on(hub: FakeHub, tmp_path: Path) -> None:
    assert epd(*SHOW, home=tmp_path, hub=hub).returncode == 0
    got = tmp_path / "hub" / "models--tiny--shapes" / "snapshots" / COMMIT
    (got / "model.safetensors").resolve().unlink()
    (got / "model.safetensors").unlink()
    hub.got.clear()
    assert epd(*SHOW, home=tmp_path, hub=hub).returncode == 0
    assert hub.got == ["model.safetensors"]


@pytest.mark.parametrize(
    ("status", "error", "said"),
    [
        (
            403,
            "GatedRepo",
            "the model tiny/shapes wants its terms accepted; do that on its page at the hub, and",
        ),
        (
            401,
            "RepoNotFound",
            "there is no folder 'tiny/shapes', and the hub has no model of that name, or a p",
        ),
        (
            404,
            "RevisionNotFound",
            "the model tiny/shapes has no revision 'main'; allowed: its branches, tags an",
        ),
        (500, "", "there is no folder 'tiny/shapes', no such model in "),
    ],
)
def test_a_refusal_of_the_hub_is_one_line(
    hub: FakeHub, tmp_path: Path, status: int, error: str, said: str
) -> None:
    hub.status, hub.error = status, error
    done = epd(*SHOW, home=tmp_path, hub=hub)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {said}")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("offline", ["0", "1"])
def test_without_the_hub_the_command_to_fetch_is_said(tmp_path: Path, offline: str) -> None:
    done = epd(*SHOW, "revision=v2", home=tmp_path, HF_HUB_OFFLINE=offline)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    ends = '"*.json" "*.jinja" "*.txt" "*.model" "*.tiktoken" "*.ttf" "*.safetensors"'
    assert f"hf download {NAME} --revision v2 --include {ends}\n" in done.stderr


def test_weights_of_another_format_are_refused_before_they_come(tmp_path: Path, folder: Path) -> None:
    pickles = shutil.copytree(folder, tmp_path / "pickles")
    for path in pickles.glob("*.safetensors"):
        path.unlink()
    (pickles / "model.gguf").unlink()
    with served_hub({NAME: pickles}) as hub:
        done = epd(*SHOW, home=tmp_path / "home", hub=hub)
    assert "error: the model tiny/shapes of the hub is weights as pickles of PyTorch (*.bin)" in done.stderr
    assert not any(name.endswith(".bin") for name in hub.got)


def test_a_disk_without_room_is_said_before_weights_come(hub: FakeHub, tmp_path: Path) -> None:
    hub.sizes["model.safetensors"] = 10**18
    done = epd(*SHOW, home=tmp_path, hub=hub)
    assert done.returncode == 3
    assert "error: the model tiny/shapes needs 1000000000.0 GB in " in done.stderr
    assert "model.safetensors" not in hub.got


def test_workers_look_for_the_commit_of_the_front_in_their_own_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = folder.rename(folder.with_name(COMMIT))
    monkeypatch.setattr(HubModel, "fetched", lambda _model: snapshot)
    args = AppArgs(model=NAME).resolved()
    assert args.served_name == NAME
    for fields in (STAGE_FIELDS, MEDIA_FIELDS):
        sent = args.for_workers(*fields)
        assert find_model(sent.model, sent.revision) == HubModel(NAME, COMMIT)
    snapshot.rename(folder)


def test_a_folder_comes_before_a_name_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_model(NAME, "v1") == HubModel(NAME, "v1")
    assert served_name("Qwen/Qwen2.5-VL-7B-Instruct") == "Qwen/Qwen2.5-VL-7B-Instruct"
    (tmp_path / "tiny").mkdir()
    assert find_model(NAME) == Path(NAME)  # a path with an error in it is not looked for elsewhere
    for path in ("./tiny/model", "/models/tiny", "~/tiny", "tiny", "a/b/c", "../tiny"):
        assert find_model(path) == Path(path)
    with pytest.raises(RequestError, match="received the revision 'v1' of 'shapes-vl', which is no model"):
        find_model("shapes-vl", "v1")


def test_a_folder_of_the_cache_has_the_models_name(tmp_path: Path) -> None:
    assert name_of(tmp_path / "models--Qwen--Qwen2.5-VL-7B-Instruct" / "snapshots" / "0a1b") == (
        "Qwen/Qwen2.5-VL-7B-Instruct"
    )
    assert name_of(tmp_path / "mine") == "mine"
