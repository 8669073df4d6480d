"""Calls of tools in a history are shown to the model, by its own template or as texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from epd.chat import ChatMessage, ContentPart, ToolCall, text_message
from epd.encoders import load_adapter
from epd.encoders.checkpoint import Checkpoint
from epd.encoders.prompt.chat import render_chat
from epd.errors import RequestError
from epd.models import embedded_model_path

CALLS = (ToolCall("look", '{"at": 3}', "call_1"), ToolCall("count", "not JSON", "call_2"))
HISTORY = (
    text_message("user", "What is there?"),
    ChatMessage("assistant", text_message("assistant", "").parts, CALLS),
    ChatMessage("tool", text_message("tool", "a circle").parts, tool_call_id="call_1"),
    ChatMessage("tool", text_message("tool", "one").parts, tool_call_id="call_2"),
    text_message("assistant", "One circle."),
    text_message("user", "Which colour?"),
)
WITH_TOOLS = """
{%- for m in messages %}[{{ m.role }}{{ ' ' + m.tool_call_id if m.tool_call_id else '' }}]
{%- for part in m.content %}{{ part.text }}{% endfor %}
{%- for call in m.tool_calls or [] %}
{%- set f = call.function %}{{ f.name }}({{ f.arguments | tojson }}){% endfor %}
{%- endfor %}"""


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    adapter = load_adapter(Path(embedded_model_path()))
    found = adapter.checkpoint  # type: ignore[attr-defined]
    assert isinstance(found, Checkpoint)
    return found


def test_a_template_that_knows_tools_gets_calls_with_parsed_arguments(checkpoint: Checkpoint) -> None:
    assert render_chat(checkpoint, WITH_TOOLS, HISTORY, ()) == (
        '[user]What is there?[assistant]look({"at": 3})count("not JSON")[tool call_1]a circle[tool call_2]one'
        "[assistant]One circle.[user]Which colour?"
    )


def test_pictures_of_tools_stand_within_their_responses(checkpoint: Checkpoint) -> None:
    shot = ChatMessage(
        "tool", (ContentPart("text", "before: "), ContentPart("image"), ContentPart("text", "!"))
    )
    bare = ChatMessage("tool", (ContentPart("image"),))
    text = render_chat(checkpoint, checkpoint.chat_template, (*HISTORY[:2], shot, bare), ())
    image = render_chat(checkpoint, checkpoint.chat_template, (ChatMessage("user", bare.parts),), ())
    image = image.split("<|im_start|>user\n")[1].split("<|im_end|>")[0]
    assert "image" in image
    assert (
        f"<|im_start|>user\n<tool_response>\nbefore: {image}!\n</tool_response>\n"
        f"<tool_response>\n{image}\n</tool_response><|im_end|>\n"
    ) in text


def test_another_template_gets_texts(checkpoint: Checkpoint) -> None:
    assert "tool_calls" not in checkpoint.chat_template
    text = render_chat(checkpoint, checkpoint.chat_template, HISTORY, ())
    assert (
        "<|im_start|>assistant\n"
        '<tool_call>\n{"name": "look", "arguments": {"at": 3}}\n</tool_call>\n'
        '<tool_call>\n{"name": "count", "arguments": not JSON}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n"
        "<tool_response>\na circle\n</tool_response>\n"
        "<tool_response>\none\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nOne circle.<|im_end|>"
    ) in text


def test_a_name_reaches_the_template(checkpoint: Checkpoint) -> None:
    message = ChatMessage("user", text_message("user", "hi").parts, name="ada")
    template = "{% for m in messages %}{{ m.name }}{% endfor %}"
    assert render_chat(checkpoint, template, [message], ()) == "ada"


@pytest.mark.parametrize("template", [WITH_TOOLS, "{{ messages }}"], ids=["knows tools", "does not"])
def test_calls_cannot_stand_for_media(checkpoint: Checkpoint, template: str) -> None:
    call = ToolCall("look", '{"at": "<|image_pad|>"}')
    history = [HISTORY[0], ChatMessage("assistant", HISTORY[1].parts, (call,)), HISTORY[-1]]
    with pytest.raises(RequestError, match=r"contains <.image_pad.>, which stands for media"):
        render_chat(checkpoint, template, history, ["<|image_pad|>"])


def test_deeply_nested_arguments_stay_a_text(checkpoint: Checkpoint) -> None:
    call = ToolCall("look", "[" * 100_000)
    history = [HISTORY[0], ChatMessage("assistant", HISTORY[1].parts, (call,)), HISTORY[-1]]
    assert "[" * 100_000 in render_chat(checkpoint, WITH_TOOLS, history, ())
