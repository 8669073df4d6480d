"""Writes the tables of docs/support.md, each cell with the test behind it: `python -m tests.support_page`.

What a test proves is read from the cases that it is run with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product

from epd.encoders.registry import ADAPTERS
from epd.models.families import FAMILIES
from tests import ROOT, conftest, test_generic_families, test_tile_families, test_tokens
from tests.encoders.tiny_generic import BUILDERS as GENERIC
from tests.encoders.tiny_tiles import BUILDERS as NATIVE
from tests.models.page import with_block
from tests.models.published import PUBLISHED
from tests.request_fields_page import CHAT, ROUTES, TESTS, Route
from tests.stages.conftest import FAMILIES as SPLIT
from tests.stages.conftest import RECURRENT

PAGE = ROOT / "docs" / "support.md"
MEDIA = ("text", "image", "images", "video", "video and image", "audio")
_OPEN = "-"
TOPOLOGIES = ("1e1p1d", "several decode workers", "on Ray", "tensor parallel")
_SHRUNK = {each.config["model_type"] for each in PUBLISHED.values()}
_SEES = {name for name, each in FAMILIES.items() if "image" in each.takes}
_IMAGES_ALONE = {name for name in _SEES if "video" not in FAMILIES[name].takes}
_TRIED = {*GENERIC, *NATIVE}
# Of several with one adapter, one is tried.
_BY_ADAPTER = {name for name in ADAPTERS if ADAPTERS[name] in [ADAPTERS.get(each) for each in _TRIED]}
_HTTP = "tests/serve_app/http"

Cells = Iterable[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Proof:
    """A test, with the cells (family, column) that it proves. answers: as `generate`; else it is refused."""

    mark: str
    test: str
    cells: frozenset[tuple[str, str]]
    answers: bool = True


def _proof(mark: str, test: str, cells: Cells, *, answers: bool = True) -> Proof:
    return Proof(mark, test, frozenset(cells), answers)


_refusal = partial(_proof, answers=False)


def _named(pairs: Iterable[str]) -> Cells:
    """Of the ids of a test: family-case."""
    found = (name.partition("-")[::2] for name in pairs)
    return ((family, case) for family, case in found if case in MEDIA)


PROOFS = (
    _proof(
        "t", "tests/test_tokens.py::test_tokens_equal_generate", product(conftest.SUBJECTS, test_tokens.CASES)
    ),
    _proof("f", "tests/test_tile_families.py::test_tokens_equal_generate", _named(test_tile_families.PAIRS)),
    _proof(
        "g", "tests/test_generic_families.py::test_tokens_equal_generate", _named(test_generic_families.PAIRS)
    ),
    _proof(
        "s",
        "tests/models/test_answers.py::test_answers_equal_generate",
        product(_SHRUNK, ("text", "image", "video", "1e1p1d")),
    ),
    _proof(
        "r",
        "tests/stages/test_layer_kinds.py::test_tokens_equal_generate",
        product(RECURRENT, ("text", "image", "images", "video")),
    ),
    _proof(
        "a", "tests/test_audio.py::test_tokens_equal_generate", product(["qwen2_audio"], ("text", "audio"))
    ),
    _proof(
        "b",
        "tests/test_gemma.py::test_tokens_equal_generate",
        product(["gemma3"], ("text", "image", "images")),
    ),
    _proof(
        "e",
        "tests/models/test_ernie.py::test_tokens_equal_generate",
        product(["ernie4_5_vl_moe"], ("text", "image", "images", "video", "video and image")),
    ),
    _proof(
        "x",
        "tests/models/test_molmo.py::test_several_kinds_and_several_videos",
        [("molmo2", "video and image")],
    ),
    _refusal(
        "q",
        "tests/models/test_molmo.py::test_what_it_cannot_do_is_refused_in_one_line",
        [("molmo2", "tensor parallel")],
    ),
    _refusal(
        "o",
        "tests/models/test_ernie.py::test_what_it_cannot_do_is_refused_in_one_line",
        product(["ernie4_5_vl_moe"], ("audio", "tensor parallel")),
    ),
    _refusal(
        "n",
        "tests/test_generic_families.py::test_what_a_family_takes",
        [
            *product(_IMAGES_ALONE & (_TRIED | _BY_ADAPTER), ("video", "video and image")),
            *product(_SEES & (_TRIED | _BY_ADAPTER), ["audio"]),
        ],
    ),
    _refusal(
        "l",
        "tests/test_gemma.py::test_videos_and_sound_are_refused_in_one_line",
        product(["gemma3"], ("video", "video and image", "audio")),
    ),
    _refusal(
        "m",
        "tests/test_audio.py::test_models_refuse_what_they_cannot_take",
        product(["qwen2_audio"], ("image", "images", "video", "video and image")),
    ),
    _proof(
        "h",
        "tests/test_generic_families.py::test_handed_over_in_chunks_and_from_the_cache",
        product(GENERIC, ["1e1p1d"]),
    ),
    _proof(
        "v",
        "tests/test_generic_families.py::test_preempted_both_ways_and_moved_between_decode_workers",
        product(GENERIC, ["several decode workers"]),
    ),
    _proof(
        "i",
        "tests/models/test_ernie.py::test_answers_of_workers_and_from_their_caches",
        [("ernie4_5_vl_moe", "1e1p1d")],
    ),
    _proof(
        "j",
        "tests/models/test_ernie.py::test_answers_move_between_decode_workers",
        [("ernie4_5_vl_moe", "several decode workers")],
    ),
    *(
        _proof(mark, f"tests/models/test_video_llama.py::{test}", [("video_llama_3", column)])
        for mark, test, column in (
            ("V", "test_answers_of_workers_and_from_their_caches", "1e1p1d"),
            ("M", "test_answers_move_between_decode_workers", "several decode workers"),
        )
    ),
    _proof(
        "F",
        "tests/test_tile_families.py::test_handed_over_in_chunks",
        product(sorted({name for name, _ in test_tile_families.PAIRS.values()}), ["1e1p1d"]),
    ),
    _proof("T", "tests/test_tokens.py::test_handed_over_in_chunks", product(conftest.SUBJECTS, ["1e1p1d"])),
    _proof(
        "X",
        "tests/models/test_molmo.py::test_answers_of_workers_and_from_their_caches",
        [("molmo2", "1e1p1d")],
    ),
    _proof("c", "tests/test_gemma.py::test_handed_over_in_chunks_and_from_the_cache", [("gemma3", "1e1p1d")]),
    _proof(
        "k",
        "tests/stages/test_layer_kinds.py::test_answers_go_on_at_decode_workers_and_move_between_them",
        product(("gemma3", *RECURRENT), ["several decode workers"]),
    ),
    _proof(
        "d",
        "tests/stages/test_split_stages.py::test_tokens_equal_generate",
        product(SPLIT, ["several decode workers"]),
    ),
    _proof(
        "y",
        "tests/serve_app/ray/test_app.py::test_tokens_equal_the_colocated_pipeline",
        [("qwen2_5_vl", "on Ray")],
    ),
    _proof(
        "p",
        "tests/stages/ranks/test_split_ranks.py::test_tokens_equal_generate_whatever_the_sizes",
        product(("qwen2_5_vl", "qwen3_vl"), ["tensor parallel"]),
    ),
    _proof(
        "w",
        "tests/stages/ranks/test_ranked_layers.py::test_tokens_equal_generate_after_a_hand_over",
        product(
            (
                *("gemma3", "gemma4", "glm4v", "glm4v_moe", "minicpmv4_7", "qwen3_5", "qwen3_5_moe"),
                "video_llama_3",
            ),
            ["tensor parallel"],
        ),
    ),
)


def models() -> str:
    """Returns how each cell of a family is proven, families that are alike in one row."""
    columns, rows = (*MEDIA, *TOPOLOGIES), dict[tuple[str, ...], list[str]]()
    for name in FAMILIES:
        rows.setdefault(tuple(_cell(name, column) for column in columns), []).append(full_name(name))
    lines = (f"| {', '.join(names)} | {' | '.join(cells)} |\n" for cells, names in rows.items())
    return f"| model_type | {' | '.join(columns)} |\n{'|---' * (len(columns) + 1)}|\n" + "".join(lines)


def full_name(name: str) -> str:
    """Returns a family with its checkpoints, and whether an adapter of ours computes it."""
    by = ", native" if FAMILIES[name].impl == "native" else ""
    return f"`{name}` ({FAMILIES[name].name}{by})"


def _cell(family: str, column: str) -> str:
    found = [proof for proof in PROOFS if (family, column) in proof.cells]
    marks = " ".join(f"`{proof.mark}`" for proof in found)
    return _OPEN if not found else f"{'' if found[0].answers else 'no '}{marks}"


# Fields of the API

FILES: Mapping[str, str] = {
    "chat": "test_completions.py",
    "completions": "test_text_completions.py",
    "responses": "test_responses.py",
}


def fields() -> str:
    """Returns the fields that a route takes, those that are alike in one row; openapi.json has the others."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name in sorted(
        {name for route in ROUTES for name in route.here() if name not in route.others.refused}
    ):
        rows.setdefault(tuple(_state(route, name) for route in ROUTES), []).append(f"`{name}`")
    lines = (f"| {', '.join(names)} | {' | '.join(states)} |\n" for states, names in sorted(rows.items()))
    head = " | ".join(f"{route}, `{file}`" for route, file in FILES.items())
    return f"| fields | {head} |\n|---|---|---|---|\n" + "".join(lines)


def _state(route: Route, name: str) -> str:
    if name in route.others.refused:
        return "refused `q`"
    if name in route.others.no_effect:
        return "no effect `z`"
    if name not in route.model.model_fields:
        return "refused `u`"
    return "done"


def done_in(route: Route, name: str) -> str:
    """Returns the file of tests that asks for a field which is done."""
    return (
        TESTS.get(name, "test_completions.py") if route is CHAT else list(FILES.values())[ROUTES.index(route)]
    )


# Of each route, in the files of the head.
FIELD_TESTS: Mapping[str, tuple[str, ...]] = {
    "q": ("test_every_field_that_is_not_done_is_refused_by_name",) * 3,
    "z": ("test_harmless_fields_are_taken",) * 3,
    "u": ("test_an_unknown_field_is_refused_by_name", *["test_what_cannot_be_done_is_named"] * 2),
}


def page(text: str) -> str:
    """Returns the page with its tables anew."""
    blocks = {
        "models": models(),
        "fields": fields(),
    }
    for name, block in blocks.items():
        text = with_block(text, f"<!-- {name}: python -m tests.support_page -->\n", block)
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
