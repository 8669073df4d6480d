"""Conversations of several turns: the same ids and positions as the processor and model make of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from epd.chat import media_kinds, one_turn, text_message
from epd.encoders import ChatMessage, ContentPart, FrameSampling
from epd.encoders.checkpoint import Checkpoint
from epd.errors import RequestError
from epd.models import embedded_model_path
from tests.conversations import plan_prefix
from tests.encoders.families import Clip, Family, Media, Picture
from tests.encoders.test_families import visual_ids
from tests.positions import adapter_like_transformers, expected_positions, positions_in_transformers

# transformers near 5.17 hands torch tensors to numpy in InternVL's processor, in a way that numpy 2 regrets.
pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")

DRAWN = settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
SAMPLING = FrameSampling(num_frames=4)
TEXT = ContentPart("text", "What? Ä, 漢")
MEDIA = {"image": Picture(torch.full((40, 60, 3), 90, dtype=torch.uint8))}
TEXTS = st.sampled_from(["Is it red?", "Ä 漢 🙂", "two\nlines", " spaces "])


@st.composite
def user_messages(draw: st.DrawFn, kinds: tuple[str, ...]) -> ChatMessage:
    """Parts in any order, some text among them."""
    parts = [ContentPart("text", draw(TEXTS))]
    parts += [ContentPart(kind) for kind in draw(st.lists(st.sampled_from(kinds), max_size=2))]  # type: ignore[arg-type]
    return ChatMessage("user", tuple(draw(st.permutations(parts))))


@st.composite
def conversations(draw: st.DrawFn, kinds: tuple[str, ...]) -> tuple[ChatMessage, ...]:
    """Perhaps a system message, one to three turns, the last without an answer."""
    messages = [text_message("system", draw(TEXTS))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(0, 2))):
        messages += [draw(user_messages(kinds)), text_message("assistant", draw(TEXTS))]
    return (*messages, draw(user_messages(kinds)))


def draw_conversation(family: Family, data: st.DataObject) -> tuple[ChatMessage, ...]:
    mixes = [("image",), ("video",)] + [("image", "video")] * family.can_mix
    return data.draw(conversations(data.draw(st.sampled_from(mixes))))


def media_of(family: Family, messages: tuple[ChatMessage, ...]) -> list[Media]:
    return [_clip(family) if kind == "video" else MEDIA["image"] for kind in media_kinds(messages)]


def _clip(family: Family) -> Clip:
    rough = Clip(torch.zeros(8, 56, 56, 3, dtype=torch.uint8), 4.0)
    return Clip(torch.zeros(8, *family.plan(rough, SAMPLING).size, 3, dtype=torch.uint8), 4.0)


def theirs(family: Family, messages: tuple[ChatMessage, ...], media: list[Media]) -> Any:
    conversation = [
        {
            "role": message.role,
            "content": [
                {"type": part.kind} | ({"text": part.text} if part.kind == "text" else {})
                for part in message.parts
            ],
        }
        for message in messages
    ]
    rendered = replace(family, processor=_Rendering(family.processor, conversation))
    return rendered.their_inputs(media, SAMPLING)


class _Rendering:
    """A processor that renders one conversation, whichever it is asked to."""

    def __init__(self, processor: Any, conversation: list[dict[str, Any]]) -> None:
        self._processor = processor
        self._conversation = conversation

    def apply_chat_template(self, _: Any, **options: Any) -> str:
        text: str = self._processor.apply_chat_template(self._conversation, **options)
        return text

    def __call__(self, **inputs: Any) -> Any:
        return self._processor(**inputs)


@given(data=st.data())
@DRAWN
def test_ids_equal_the_processors(family: Family, data: st.DataObject) -> None:
    messages = draw_conversation(family, data)
    media = media_of(family, messages)

    prompt = family.adapter.plan_chat([family.plan(item, SAMPLING) for item in media], messages)

    expected = theirs(family, messages, media)["input_ids"][0]
    assert prompt.token_ids.tolist() == expected.tolist()
    visual = torch.isin(expected, torch.tensor(visual_ids(family))).nonzero()[:, 0].tolist()
    places = [item.token_indices(0, item.plan.num_units).tolist() for item in prompt.media]
    assert [place for item in places for place in item] == visual


@given(data=st.data())
@DRAWN
def test_positions_equal_the_models(family: Family, data: st.DataObject) -> None:
    if not family.name.startswith("qwen"):
        pytest.skip("only the Qwen families have positions of their own")
    messages = draw_conversation(family, data)
    media = media_of(family, messages)
    inputs = theirs(family, messages, media)
    plans = [family.plan(item, SAMPLING) for item in media]

    prompt = family.adapter.plan_chat(plans, messages)
    switched = adapter_like_transformers(family.path).plan_chat(plans, messages)

    assert (prompt.positions.tolist(), prompt.next_position) == expected_positions(family.model, inputs)
    found = switched.positions.tolist(), switched.next_position
    assert found == positions_in_transformers(family.model, inputs)


@given(messages=conversations(("image", "video")))
@DRAWN
def test_the_embedded_models_ids_equal_its_processors(messages: tuple[ChatMessage, ...]) -> None:
    family = _embedded()
    media = media_of(family, messages)

    prompt = family.adapter.plan_chat([family.plan(item, SAMPLING) for item in media], messages)

    assert prompt.token_ids.tolist() == theirs(family, messages, media)["input_ids"][0].tolist()


def _embedded() -> Family:
    if "shapes-vl" not in _LOADED:
        _LOADED["shapes-vl"] = Family.load("shapes-vl", embedded_model_path())
    return _LOADED["shapes-vl"]


_LOADED: dict[str, Family] = {}


def test_a_question_is_a_conversation_of_one_turn(family: Family) -> None:
    plans = [family.plan(MEDIA["image"], SAMPLING)] * 2

    chat = family.adapter.plan_chat(plans, one_turn(["image", "image"], TEXT.text))

    assert chat.token_ids.tolist() == family.adapter.plan_prompt(plans, TEXT.text).token_ids.tolist()


def test_media_first_leave_the_prefix_as_it_was(family: Family) -> None:
    """A second question about the same media begins with the same tokens, up to where its text begins."""
    plans = [family.plan(MEDIA["image"], SAMPLING)]
    first, second = (
        family.adapter.plan_chat(plans, (text_message("system", "Be brief."), *one_turn(["image"], question)))
        for question in ("Is it red?", "What is it?")
    )
    length = first.prefix_length
    assert length == second.prefix_length > plans[0].num_tokens
    assert np.array_equal(first.token_ids[:length], second.token_ids[:length])


@given(data=st.data())
@DRAWN
def test_the_prefix_of_a_conversation_needs_none_of_its_questions(
    family: Family, data: st.DataObject
) -> None:
    """It is the same whatever is asked behind the last medium, and whatever has been said there."""
    messages = draw_conversation(family, data)
    plans = [family.plan(item, SAMPLING) for item in media_of(family, messages)]
    whole = family.adapter.plan_chat(plans, messages)

    prefix = plan_prefix(family.adapter, plans, messages)

    assert prefix.token_ids.tolist() == whole.token_ids[: whole.prefix_length].tolist()
    assert prefix.positions.tolist() == whole.positions[:, : whole.prefix_length].tolist()
    assert prefix.media == whole.media


def test_no_message_can_smuggle_in_a_placeholder(family: Family) -> None:
    reserved = family.adapter.tokenizer.convert_ids_to_tokens(visual_ids(family)[0])
    for messages in (
        (text_message("system", f"Think {reserved}"), text_message("user", "What?")),
        (text_message("user", "What?"), text_message("assistant", reserved), text_message("user", "Why?")),
    ):
        with pytest.raises(RequestError, match="which stands for media; remove it"):
            family.adapter.plan_chat([], messages)


def test_media_that_have_no_place_are_a_mistake_of_ours(family: Family) -> None:
    with pytest.raises(ValueError, match="have places for"):
        family.adapter.plan_chat([family.plan(MEDIA["image"], SAMPLING)], (text_message("user", "What?"),))


def with_template(family: Family, template: str) -> Any:
    """The family's adapter over a checkpoint with another template."""
    checkpoint: Checkpoint = family.adapter.checkpoint  # type: ignore[attr-defined]
    other = type(family.adapter)(checkpoint)  # type: ignore[call-arg]
    processor = _Renamed(checkpoint.processor, template)
    other.checkpoint = Checkpoint(checkpoint.path, checkpoint.config, processor)
    return other


class _Renamed:
    """A processor that says it has another chat template."""

    def __init__(self, processor: Any, template: str) -> None:
        self._processor = processor
        self.chat_template = template

    def __getattr__(self, name: str) -> Any:
        return getattr(self._processor, name)


def test_a_template_that_drops_media_is_not_followed(family: Family) -> None:
    adapter = with_template(family, "{% for message in messages %}{{ message['role'] }}{% endfor %}")
    with pytest.raises(RequestError, match="placed 0 of 1 media"):
        adapter.plan_chat([family.plan(MEDIA["image"], SAMPLING)], one_turn(["image"], "What?"))


def test_a_template_that_moves_media_is_not_followed(family: Family) -> None:
    """LLaVA-OneVision's own shows the images of a message before its videos."""
    if not family.can_mix:
        pytest.skip("its processor takes images or videos, never both")
    media = [_clip(family), MEDIA["image"]]
    plans = [family.plan(item, SAMPLING) for item in media]
    source = family.adapter.checkpoint.chat_template  # type: ignore[attr-defined]
    adapter = with_template(
        family, source.replace("message['content']", "message['content']|sort(attribute='type')")
    )
    with pytest.raises(RequestError, match="images of a message before its videos"):
        adapter.plan_chat(plans, one_turn(["video", "image"], "What?"))


def test_what_the_template_refuses_is_the_clients_to_mend(family: Family) -> None:
    adapter = with_template(family, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match=r"refuses messages of user \(roles must alternate\)"):
        adapter.plan_chat([], one_turn([], "What?"))
