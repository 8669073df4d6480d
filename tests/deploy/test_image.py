"""Dockerfile: its steps lead to a right answer, by a user without rights; and what it promises to Docker."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from epd.serve_app.cli.program import app
from tests import ROOT
from tests.deploy.dockerfile import Image, last, stages
from tests.deploy.release import listed
from tests.test_package import environment_beside

STAGES = stages((ROOT / "Dockerfile").read_text())
IGNORED = (ROOT / ".dockerignore").read_text().split()
COMPOSE = yaml.safe_load((ROOT / "docs" / "deploy" / "compose.yaml").read_text())


def context(folder: Path) -> Path:
    """What Docker is given to build: files that git lists, but for those that are left out."""
    for name in listed():
        if name.partition("/")[0] not in IGNORED:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
    return folder


def with_pip(environment: Path) -> Path:
    """An environment with a `pip` that installs into it, and not into that of the tests."""
    pip = environment / "bin" / "pip"
    pip.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pip --python "{environment}/bin/python" "$@"\n')
    pip.chmod(0o755)
    return environment


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Image]:
    """The stages `wheel` and `cpu`; the first installs nothing that the second could lean on."""
    work = tmp_path_factory.mktemp("image")
    images: dict[str, Image] = {}
    for name in ("wheel", "cpu"):
        images[name] = Image(work / name, with_pip(environment_beside(work / f"{name}-environment")))
        images[name].follow(STAGES[name].steps, context(work / "context"), images)
    return images


def test_the_image_answers(made: dict[str, Image]) -> None:
    entry = last(STAGES["cpu"].steps, "ENTRYPOINT").words
    assert (made["cpu"].environment / "bin" / entry[0]).exists()
    assert made["cpu"].run([*entry, "demo"]).count("✓") == 5


def test_the_image_has_its_licences_and_a_user(made: dict[str, Image]) -> None:
    names = {path.name for path in made["cpu"].path("/licenses").iterdir()}
    assert names == {"LICENSE", "NOTICE"}
    assert "useradd --create-home --uid 1000 epd" in made["cpu"].done


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_nothing_runs_as_root(name: str) -> None:
    assert last(STAGES[name].steps, "USER").rest == "epd"


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_the_command_of_an_image_is_one_of_the_program(name: str) -> None:
    command, *options = last(STAGES[name].steps, "CMD").words
    known = {each for parameter in get_command(app).commands[command].params for each in parameter.opts}  # type: ignore[attr-defined]
    assert {option for option in options if option.startswith("--")} <= known


def test_the_graphics_card_may_decode_video() -> None:
    variables = dict(word.split("=", 1) for word in last(STAGES["cuda"].steps, "ENV").words)
    assert variables["NVIDIA_DRIVER_CAPABILITIES"].split(",") == ["compute", "utility", "video"]


def test_the_composed_server_is_the_images_and_prometheus_finds_it() -> None:
    service = COMPOSE["services"]["epd"]
    assert service["build"]["target"] in STAGES
    assert (ROOT / "docs" / "deploy" / service["build"]["context"]).resolve() == ROOT
    scraped = yaml.safe_load((ROOT / "docs" / "deploy" / "prometheus.yaml").read_text())
    assert scraped["scrape_configs"][0]["static_configs"] == [{"targets": ["epd:8000"]}]
    assert scraped["rule_files"] == ["alerts.yaml"]
    for each in COMPOSE["services"].values():
        for volume in each["volumes"]:
            source = volume.partition(":")[0]
            named = not source.startswith(".") or source == "./media"  # the media are yours
            assert named or (ROOT / "docs" / "deploy" / source).exists(), volume
