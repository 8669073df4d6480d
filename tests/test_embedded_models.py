"""A model is named by its folder or, wherever a folder is taken, by the name of an embedded model."""

from __future__ import annotations

from pathlib import Path

import pytest

from epd.errors import ModelNotFoundError
from epd.models import embedded_model_path, embedded_models, model_folder
from epd.serve_app.app_args import AppArgs


@pytest.mark.parametrize("name", embedded_models())
@pytest.mark.parametrize("kind", [str, Path])
def test_an_embedded_model_is_found_by_its_name(
    name: str, kind: type[str | Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert model_folder(kind(name)) == embedded_model_path(name)
    assert AppArgs(model=name).model_path == embedded_model_path(name)
    assert (model_folder(name) / "config.json").is_file()


def test_a_folder_of_that_name_comes_first_but_not_before_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shapes-vl").mkdir()
    assert model_folder("shapes-vl") == Path("shapes-vl")
    assert model_folder(None) == embedded_model_path() == embedded_model_path("shapes-vl")


def test_any_other_name_is_a_folder() -> None:
    assert model_folder("./shapes-vl/../nowhere") == Path("shapes-vl/../nowhere")
    with pytest.raises(ModelNotFoundError, match=r"'nowhere'.*; give .* or shapes-vl"):
        _ = AppArgs(model="nowhere").model_path
