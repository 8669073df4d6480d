"""Each family's adapter against its processor and model, for drawn sizes, frame counts and media mixes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from epd.encoders import FrameSampling
from epd.encoders.families.smolvlm import number_in_words
from epd.errors import RequestError
from epd.types import MediaKind
from tests.encoders.families import Clip, Family, Media, Picture
from tests.encoders.tiny_tiles import BUILDERS
from tests.encoders.tolerances import BATCHING, assert_close_to
from tests.positions import adapter_like_transformers, expected_positions, positions_in_transformers

# transformers near 5.17 hands torch tensors to numpy in InternVL's processor, in a way that numpy 2 regrets.
pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")

DRAWN = settings(
    max_examples=10,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


# Of frames before they are planned. Those of MiniCPM-V 4.7 have slices.
SIZES = {"minicpmv4_7": (90, 160)}


@pytest.fixture(params=[*BUILDERS, "gemma4", "minicpmv4_6", "minicpmv4_7"])
def family(request: pytest.FixtureRequest, families: dict[str, Family]) -> Family:
    return families[request.param]


@st.composite
def mixes(draw: st.DrawFn, kinds: tuple[str, ...] = ("image", "video", "both")) -> tuple[list[str], int, int]:
    """Kinds of one to four items, frames that each video has, and frames to sample."""
    kind = draw(st.sampled_from(kinds))
    names = st.sampled_from(["image", "video"]) if kind == "both" else st.just(kind)
    source_frames = draw(st.integers(8, 40))
    return draw(st.lists(names, min_size=1, max_size=4)), source_frames, draw(st.integers(2, 8))


def draw_media(family: Family, data: st.DataObject) -> tuple[list[Media], FrameSampling]:
    kinds, source_frames, num_frames = data.draw(
        mixes(("image", "video", "both") if family.can_mix else ("image", "video"))
    )
    sizes = [(data.draw(st.integers(20, 180)), data.draw(st.integers(20, 180))) for _ in kinds]
    seed = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))
    sampling = FrameSampling(num_frames=num_frames)
    return [
        _item(family, kind, size, source_frames, sampling, seed)
        for kind, size in zip(kinds, sizes, strict=True)
    ], sampling


def _item(
    family: Family,
    kind: str,
    size: tuple[int, int],
    length: int,
    sampling: FrameSampling,
    seed: torch.Generator,
) -> Media:
    if kind == "image":
        return Picture(_noise((*size, 3), seed))
    rough = Clip(torch.zeros(length, *SIZES.get(family.name, (56, 56)), 3, dtype=torch.uint8), 4.0)
    height, width = family.plan(rough, sampling).size
    return Clip(_noise((length, height, width, 3), seed), 4.0)


def _noise(shape: tuple[int, ...], seed: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=seed)


@given(data=st.data())
@DRAWN
def test_prompt_and_token_counts_equal_the_processors(family: Family, data: st.DataObject) -> None:
    media, sampling = draw_media(family, data)
    prompt = family.prompt(media, sampling)
    theirs = family.their_inputs(media, sampling)["input_ids"][0]
    assert prompt.token_ids.tolist() == theirs.tolist()
    visual = torch.isin(theirs, torch.tensor(visual_ids(family)))
    places = [item.token_indices(0, item.plan.num_units) for item in prompt.media]
    assert np.concatenate(places).tolist() == visual.nonzero()[:, 0].tolist()
    assert [len(place) for place in places] == [item.plan.num_tokens for item in prompt.media]


def visual_ids(family: Family) -> list[int]:
    """The ids that the model replaces by visual features."""
    names = ("image_token_id", "video_token_id", "image_token_index", "video_token_index")
    config = family.model.config
    return [int(getattr(config, name)) for name in names if hasattr(config, name)]


@given(data=st.data())
@DRAWN
def test_positions_equal_the_models(family: Family, data: st.DataObject) -> None:
    media, sampling = draw_media(family, data)
    prompt = family.prompt(media, sampling)
    if not family.name.startswith("qwen") and family.name != "minicpmv4_7":
        assert prompt.positions.tolist() == [list(range(len(prompt)))] * len(prompt.positions)
        assert prompt.next_position == len(prompt)
        return
    theirs = family.their_inputs(media, sampling)
    assert (prompt.positions.tolist(), prompt.next_position) == expected_positions(family.model, theirs)
    switched = replace(family, adapter=adapter_like_transformers(family.path)).prompt(media, sampling)
    found = switched.positions.tolist(), switched.next_position
    assert found == positions_in_transformers(family.model, theirs)


@given(data=st.data())
@DRAWN
def test_encoder_output_equals_the_models(family: Family, data: st.DataObject) -> None:
    """Ours one item after the other, the model's all of a kind in one call."""
    media, sampling = draw_media(family, data)
    theirs = family.their_inputs(media, sampling)
    ours = [family.encode(item, family.plan(item, sampling)) for item in media]
    for kinds in feature_kinds(family, media):
        embeddings = [each for each, item in zip(ours, media, strict=True) if item.kind in kinds]
        rows, layers = family.their_features(theirs, kinds[0])
        rows = rows.flatten(0, -2)
        assert_close_to(torch.cat([each.rows for each in embeddings]), rows, BATCHING)
        for layer, features in enumerate(layers):
            assert_close_to(torch.cat([each.deepstack[layer] for each in embeddings]), features, BATCHING)


def feature_kinds(family: Family, media: list[Media]) -> list[tuple[MediaKind, ...]]:
    """Which kinds the model encodes in one call; those with one call for both take them in prompt order."""
    if family.name in ("internvl", "smolvlm"):
        return [("image", "video")]
    present: set[MediaKind] = {item.kind for item in media}
    return [(kind,) for kind in sorted(present)]


@given(data=st.data())
@DRAWN
def test_any_cut_between_units_changes_no_pixel(family: Family, data: st.DataObject) -> None:
    media, sampling = draw_media(family, data)
    item = media[0]
    plan = family.plan(item, sampling)
    frames, whole = family.frames(item, plan), family.patches(item, plan)
    cut = data.draw(st.integers(0, plan.num_units))
    at = cut * plan.frames_per_unit
    parts = [family.adapter.preprocess(part, plan) for part in (frames[:at], frames[at:]) if len(part)]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("question", ["", "  "])
def test_an_empty_question_is_refused(family: Family, question: str) -> None:
    with pytest.raises(RequestError, match="empty"):
        family.adapter.plan_prompt([], question)


def test_a_question_cannot_smuggle_in_a_placeholder(family: Family) -> None:
    config = family.model.config
    name = "image_token_id" if hasattr(config, "image_token_id") else "image_token_index"
    reserved = family.adapter.tokenizer.convert_ids_to_tokens(getattr(config, name))
    with pytest.raises(RequestError, match="remove it"):
        family.adapter.plan_prompt([family.adapter.plan_image(60, 60)], f"What is {reserved}?")


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zero"), (7, "seven"), (13, "thirteen"), (20, "twenty"), (42, "forty-two"), (100, "one hundred"),
        (101, "one hundred and one"), (999, "nine hundred and ninety-nine"), (1000, "one thousand"),
        (1001, "one thousand and one"), (2100, "two thousand, one hundred"),
        (12_345, "twelve thousand, three hundred and forty-five"),
    ],
)  # fmt: skip
def test_numbers_are_spelled(number: int, words: str) -> None:
    assert number_in_words(number) == words


def test_numbers_beyond_are_refused() -> None:
    with pytest.raises(ValueError, match="got 1000000"):
        number_in_words(1_000_000)
