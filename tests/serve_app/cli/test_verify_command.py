"""`epd verify` compares a checkpoint with transformers, and names what differs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import epd
from epd.encoders.groups import FrameEncoder
from epd.models import embedded_model_path
from epd.models.families import FAMILIES
from epd.serve_app.cli.program import app
from epd.serve_app.verification import CaseReport
from epd.stages.decoder.decoder import FusedDecoder
from tests.encoders.tiny_generic import BUILDERS as GENERIC
from tests.models import tiny_ernie
from tests.stages.conftest import BUILDERS_HERE

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
FOLDERS: dict[str, Callable[[Path], Path]] = {
    **GENERIC,
    **BUILDERS_HERE,
    "ernie4_5_vl_moe": tiny_ernie.build,
}


def reports(folder: Path, media: list[Path]) -> list[CaseReport]:
    return epd.verify(folder, media, max_tokens=8)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_family_is_equal(tmp_path: Path, media: dict[str, Path], name: str) -> None:
    takes = FAMILIES[name.removesuffix("_small").removesuffix("_experts")].takes
    found = reports(
        FOLDERS[name](tmp_path / name), [media[kind] for kind in ("image", "video") if kind in takes]
    )
    assert [each.case for each in found] == ["text", "image.png", "video.mp4"][: len(found)]
    assert len(found) == 1 + len({"image", "video"} & set(takes))
    assert all(each.is_equal and each.logit_difference < 1e-3 for each in found)
    # The authors' layout differs where a span is longer in time than in rows and columns.
    assert [each.has_own_positions for each in found[2:]] == [name == "qwen2_5_vl"] * len(found[2:])


@pytest.mark.parametrize("layer", [0, 2, 3])
def test_the_layer_with_a_fault_is_named(
    media: dict[str, Path], monkeypatch: pytest.MonkeyPatch, layer: int
) -> None:
    mix: Callable[..., torch.Tensor] = FusedDecoder._mix

    def wrong(self: Any, index: int, *rows: torch.Tensor) -> torch.Tensor:
        return mix(self, index, *rows) * (1.2 if index == layer else 1)

    monkeypatch.setattr(FusedDecoder, "_mix", wrong)
    found = reports(embedded_model_path(), [media["image"]])
    assert [each.first_layer for each in found] == [layer, layer]
    assert not any(each.is_equal for each in found)


def test_wrong_embeddings_are_named(media: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    encode: Callable[..., Any] = FrameEncoder.encode
    monkeypatch.setattr(
        FrameEncoder,
        "encode",
        lambda self, runs: [each.mapped(lambda rows: rows * 1.2) for each in encode(self, runs)],
    )
    text, image = reports(embedded_model_path(), [media["image"]])
    assert text.is_equal
    assert image.first_layer == -1


def test_another_prompt_is_named(media: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epd.serve_app.verification.Comparison._inputs", lambda *_: other_prompt())
    found = reports(embedded_model_path(), [media["video"]])
    assert not any(each.is_same_prompt or each.is_equal for each in found)


def other_prompt() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor([[1, 2, 3]])}


def test_the_command_reports_topologies_and_what_differs(
    media: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(embedded_model_path())
    words = ["verify", model, str(media["image"]), "--max-tokens", "4", "--topology", "1e1p1d"]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.count("1e1p1d") == 2
    assert shown.stdout.endswith("equal\n")

    monkeypatch.setattr("epd.serve_app.verification.CaseReport.is_equal", False)
    shown = CliRunner().invoke(app, [*words, "--json"])
    assert shown.exit_code == 1
    found = json.loads(shown.stdout)
    assert not found["is_equal"]
    assert [case["answers"][0]["topology"] for case in found["cases"]] == ["1e1p1d", "1e1p1d"]
    assert [case["first_layer"] for case in found["cases"]] == [None, None]
