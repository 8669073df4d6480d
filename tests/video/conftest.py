"""Videos made on demand, once for the whole run of the tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.video.recipes import RECIPES, Recipe, make

Clip = Callable[[str | Recipe], Path]


@pytest.fixture(scope="session")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Clip:
    """clip(name or recipe) is the path of the video."""
    folder = tmp_path_factory.mktemp("clips")
    made: dict[str, Path] = {}

    def get(what: str | Recipe) -> Path:
        recipe = RECIPES[what] if isinstance(what, str) else what
        if recipe.name not in made:
            made[recipe.name] = make(recipe, folder / recipe.name)
        return made[recipe.name]

    return get
