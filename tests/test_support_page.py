"""docs/support.md is up to date, and each test that it names exists and proves what a family takes."""

from __future__ import annotations

from importlib import import_module

import pytest

from epd.models.families import FAMILIES
from tests import ROOT
from tests.request_fields_page import ROUTES, Route
from tests.support_page import FIELD_TESTS, FILES, PAGE, PROOFS, Proof, done_in, page

HTTP = ROOT / "tests" / "serve_app" / "http"


def test_the_page_is_up_to_date() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == page(text), "run python -m tests.support_page"


@pytest.mark.parametrize("proof", PROOFS, ids=lambda proof: proof.test)
def test_a_test_behind_a_cell_exists(proof: Proof) -> None:
    """A file may import it from where it is shared."""
    file, _, name = proof.test.partition("::")
    assert callable(getattr(import_module(file.removesuffix(".py").replace("/", ".")), name))
    assert {family for family, _ in proof.cells} - {"shapes-vl"} <= set(FAMILIES)


def test_all_that_a_family_takes_was_compared_and_nothing_else() -> None:
    """Only what `generate` takes as well: not both kinds at once."""
    cells = {
        answers: {cell for each in PROOFS if each.answers == answers for cell in each.cells}
        for answers in (True, False)
    }
    for name, family in FAMILIES.items():
        assert {(name, kind) for kind in family.takes} <= cells[True]
        assert {(name, kind) for kind in {"image", "video", "audio"} - {*family.takes}} <= cells[False]
    assert cells[True] & cells[False] == set()


def test_each_state_of_a_field_has_a_test_in_the_file_of_its_route() -> None:
    for tests in FIELD_TESTS.values():
        for file, name in zip(("test_request_fields.py", *list(FILES.values())[1:]), tests, strict=True):
            assert f"def {name}(" in (HTTP / file).read_text(encoding="utf-8"), (file, name)


@pytest.mark.parametrize("route", ROUTES, ids=FILES)
def test_a_field_that_is_done_is_asked_for_in_its_file(route: Route) -> None:
    wanting = {
        name
        for name in route.model.model_fields
        if name not in (HTTP / done_in(route, name)).read_text("utf-8")
    }
    assert wanting == set()
