"""A model is named by its folder or, wherever a folder is taken, by the name of an embedded model."""

from __future__ import annotations

from pathlib import Path

import pytest

from epd.errors import ModelNotFoundError
from epd.models import (
    DEFAULT_MODEL,
    embedded_model_path,
    embedded_models,
    find_model,
    knowledge_of,
    model_folder,
)
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
    (tmp_path / DEFAULT_MODEL).mkdir()
    assert find_model("shapes-vl") == Path("shapes-vl")
    assert model_folder(None) == embedded_model_path(DEFAULT_MODEL)


def test_any_other_name_is_a_folder() -> None:
    assert find_model("./shapes-vl/../nowhere") == Path("shapes-vl/../nowhere")
    with pytest.raises(
        ModelNotFoundError, match=r"'nowhere'.*; give .*, or a name: shapes-vl, shapes-vl-2, or o"
    ):
        _ = AppArgs(model="nowhere").model_path


def test_an_embedded_model_says_what_it_knows(tmp_path: Path) -> None:
    """Its card does, and so does the card of a copy. Published models have no such field."""
    assert [knowledge_of(embedded_model_path(name)) for name in embedded_models()] == [
        "the shapes that `epd demo` draws, and nothing else"
    ] * len(embedded_models())
    card = tmp_path / "MODEL_CARD.md"
    assert knowledge_of(tmp_path) is None
    card.write_text("---\nlicense: other\n---\n\nknows: a lot\n")
    assert knowledge_of(tmp_path) is None
    card.write_text("---\nknows: letters\n---\n")
    assert knowledge_of(tmp_path) == "letters"
