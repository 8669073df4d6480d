"""Answers of tiny checkpoints depend on their layers and media: else equal tokens would prove little."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.encoders.families import QUESTION, Family
from tests.encoders.tiny_generic import BUILDERS as GENERIC
from tests.models import shrunk, tiny_ernie
from tests.models.published import PUBLISHED
from tests.models.quantized import WINDOWED_LAYOUTS
from tests.models.quantized import build as quantized
from tests.positions import trained_positions_in
from tests.reference import MAX_TOKENS
from tests.stages.conftest import BUILDERS_HERE, SAMPLING, as_sent

NUM_DIFFERENT = 3
CASES = ((), ("image",), ("wide_image", "image"))
# Those with experts and of InternVL are not among them: they repeat a token, or mind no picture.
SHRUNK = ("Qwen2.5-VL-3B", "Qwen3-VL-2B")
BUILDERS: dict[str, Callable[[Path], Path]] = {
    **GENERIC,
    **BUILDERS_HERE,
    "ernie4_5_vl_moe": tiny_ernie.build,
}
del BUILDERS["molmo2"]  # repeats one token about pictures

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.mark.parametrize("name", BUILDERS)
def test_answers_change_with_a_layer_and_with_the_tower(
    name: str, media: dict[str, Path], tmp_path: Path
) -> None:
    check(Family.load(name, BUILDERS[name](tmp_path / "model")), media)


@pytest.mark.parametrize("name", SHRUNK)
def test_so_do_those_of_shrunk_checkpoints(name: str, media: dict[str, Path], tmp_path: Path) -> None:
    check(Family.load(PUBLISHED[name].config["model_type"], shrunk.build(name, tmp_path)), media)


@pytest.mark.parametrize(
    ("name", "layout"), [("gemma3", "fp8"), ("gemma4", "fp8-dynamic"), ("gemma4-small", "fp8")]
)
def test_so_do_those_of_quantised_ones(
    name: str, layout: str, media: dict[str, Path], tmp_path: Path
) -> None:
    check(Family.load(name, quantized(layout, tmp_path, WINDOWED_LAYOUTS[name]).plain), media)


def check(family: Family, media: dict[str, Path]) -> None:
    plain = answers(family, media)
    different = sorted(len(set(each)) for each in plain)
    assert different[0] > 1
    assert different[1] >= NUM_DIFFERENT
    assert len(set(plain)) == 3
    decoder = family.model.get_decoder()
    towers = [each for each in stacks(family.model) if not set(each) & set(decoder.modules())]
    with rolled([decoder.layers]):
        assert [each != old for each, old in zip(answers(family, media), plain, strict=True)] == [True] * 3
    with rolled(towers):
        _, *seen = answers(family, media)
        assert [each != old for each, old in zip(seen, plain[1:], strict=True)] == [True] * 2


@torch.inference_mode()
def answers(family: Family, media: dict[str, Path]) -> list[tuple[int, ...]]:
    """Greedy answers of `generate` to a text, an image and two images."""
    found = []
    for names in CASES:
        inputs = family.their_inputs([as_sent(media[each]) for each in names], SAMPLING, QUESTION)
        with trained_positions_in(family.model):
            sequence = family.model.generate(**inputs, max_new_tokens=MAX_TOKENS, do_sample=False)
        found.append(tuple(sequence[0, inputs["input_ids"].shape[1] :].tolist()))
    return found


def stacks(model: nn.Module) -> Iterator[nn.ModuleList]:
    """Yields lists of like layers."""
    for each in model.modules():
        if isinstance(each, nn.ModuleList) and len(each) > 1:
            yield each


@contextmanager
def rolled(layers: Sequence[nn.ModuleList]) -> Iterator[None]:
    """Gives each matrix of a middle layer the rows of another meanwhile."""
    middle = [parameter for each in layers for parameter in each[(len(each) - 1) // 2].parameters()]
    kept = [(each, each.data) for each in middle if each.ndim > 1]
    for parameter, values in kept:
        parameter.data = values.roll(1, 0)
    try:
        yield
    finally:
        for parameter, values in kept:
            parameter.data = values
