"""Answers of tiny checkpoints depend on their layers and media: else equal tokens would prove little."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoProcessor, StoppingCriteriaList

from epd.encoders import load_adapter
from tests import tiny_audio
from tests.encoders.families import QUESTION, Family
from tests.encoders.tiny_generic import BUILDERS as GENERIC
from tests.models import shrunk, tiny_ernie, tiny_omni
from tests.models.published import PUBLISHED
from tests.models.quantized import WINDOWED_LAYOUTS
from tests.models.quantized import build as quantized
from tests.positions import trained_positions_in
from tests.reference import MAX_TOKENS
from tests.stages.conftest import BUILDERS_HERE, SAMPLING, as_sent

NUM_DIFFERENT = 3
CASES = ((), ("image",), ("wide_image", "image"))
BUILDERS: dict[str, Callable[[Path], Path]] = {
    **GENERIC,
    **BUILDERS_HERE,
    "ernie4_5_vl_moe": tiny_ernie.build,
}
Tokens = tuple[int, ...]
# Answers, each at least as far as it equals that of the sequence, where one is given.
Answers = Callable[[Sequence[Tokens]], list[Tokens]]

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.mark.parametrize("name", BUILDERS)
def test_answers_change_with_a_layer_and_with_the_tower(
    name: str, media: dict[str, Path], tmp_path: Path
) -> None:
    check_family(Family.load(name, BUILDERS[name](tmp_path / "model")), media)


@pytest.mark.parametrize("name", PUBLISHED)
def test_so_do_those_of_shrunk_checkpoints(name: str, media: dict[str, Path], tmp_path: Path) -> None:
    check_family(Family.load(PUBLISHED[name].config["model_type"], shrunk.build(name, tmp_path)), media)


@pytest.mark.parametrize(
    ("name", "layout"), [("gemma3", "fp8"), ("gemma4", "fp8-dynamic"), ("gemma4-small", "fp8")]
)
def test_so_do_those_of_quantised_ones(
    name: str, layout: str, media: dict[str, Path], tmp_path: Path
) -> None:
    check_family(Family.load(name, quantized(layout, tmp_path, WINDOWED_LAYOUTS[name]).plain), media)


def test_so_do_those_of_a_thinker(media: dict[str, Path], tmp_path: Path) -> None:
    model = tiny_omni.thinker()
    path = tiny_omni.write(tmp_path / "model", model)
    check_family(
        Family("qwen2_5_omni", path, load_adapter(path), model, AutoProcessor.from_pretrained(path)), media
    )


def test_so_do_those_of_a_model_that_hears(tmp_path: Path) -> None:
    reference = tiny_audio.Reference(tiny_audio.build_qwen2_audio(tmp_path / "model"))
    sounds = [tiny_audio.tones(seconds, tiny_audio.RATE, seed=seed)[0] for seed, seconds in ((0, 1), (1, 2))]
    cases = [sounds[:count] for count in range(3)]
    check(
        reference.model,
        lambda _plain: [reference.tokens(each, [*[None] * len(each), QUESTION]) for each in cases],
    )


def check_family(family: Family, media: dict[str, Path]) -> None:
    check(family.model, partial(answers, family, media))


def check(model: Any, answers: Answers) -> None:
    """answers: to a text, and to two prompts with media."""
    plain = answers(())
    different = sorted(len(set(each)) for each in plain)
    assert different[0] > 1
    assert different[1] >= NUM_DIFFERENT
    assert len(set(plain)) == 3
    decoder = model.get_decoder()
    towers = [each for each in stacks(model) if not set(each) & set(decoder.modules())]
    for are_vectors in (False, True):
        with rolled([decoder.layers], are_vectors=are_vectors):
            assert [each != old for each, old in zip(answers(plain), plain, strict=True)] == [True] * 3
        with rolled(towers, are_vectors=are_vectors):
            _, *seen = answers(plain)
            assert [each != old for each, old in zip(seen, plain[1:], strict=True)] == [True] * 2


@torch.inference_mode()
def answers(family: Family, media: dict[str, Path], plain: Sequence[Tokens]) -> list[Tokens]:
    """Greedy answers of `generate` to a text, an image and two images."""
    found = []
    for names, old in zip_longest(CASES, plain):
        inputs = family.their_inputs([as_sent(media[each]) for each in names], SAMPLING, QUESTION)
        length = inputs["input_ids"].shape[1]
        with trained_positions_in(family.model):
            sequence = family.model.generate(
                **inputs, max_new_tokens=MAX_TOKENS, do_sample=False, stopping_criteria=differs(length, old)
            )
        found.append(tuple(sequence[0, length:].tolist()))
    return found


def differs(length: int, plain: Tokens | None) -> StoppingCriteriaList:
    """Ends an answer at its first token that is another one's. length: of the prompt"""

    def ends(sequences: Tensor, _scores: Any, **_others: Any) -> Tensor:
        (answer,) = sequences[:, length:].tolist()
        return torch.tensor([plain is not None and tuple(answer) != plain[: len(answer)]])

    return StoppingCriteriaList([ends])


def stacks(model: nn.Module) -> Iterator[nn.ModuleList]:
    """Yields lists of like layers."""
    for each in model.modules():
        if isinstance(each, nn.ModuleList) and len(each) > 1:
            yield each


@contextmanager
def rolled(layers: Sequence[nn.ModuleList], *, are_vectors: bool) -> Iterator[None]:
    """Gives the matrices of a middle layer each the rows of another, or its norms and biases their values."""
    middle = [parameter for each in layers for parameter in each[(len(each) - 1) // 2].parameters()]
    kept = [(each, each.data) for each in middle if (each.ndim == 1) is are_vectors]
    for parameter, values in kept:
        parameter.data = values.roll(1, 0)
    try:
        yield
    finally:
        for parameter, values in kept:
            parameter.data = values
