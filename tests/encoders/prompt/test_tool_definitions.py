"""Tools that an answer may call reach the prompt, by the template's words or as a text of the system."""

from __future__ import annotations

import json

import pytest

from epd.chat import ChatMessage, ContentPart, text_message
from epd.encoders.checkpoint import Checkpoint, open_checkpoint
from epd.encoders.prompt.chat import render_chat
from epd.errors import RequestError
from epd.models import embedded_model_path

NOW = json.dumps({"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}})
TOOLS = ChatMessage("tools", (ContentPart("text", NOW),))
KNOWING = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{% for p in m.content %}{{ p.text }}{% endfor %};{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ m.role }}:{% for p in m.content %}{{ p.text }}{% endfor %};{% endfor %}"
ASK = text_message("user", "When?")


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint(embedded_model_path())


def render(checkpoint: Checkpoint, template: str, *messages: ChatMessage) -> str:
    return render_chat(checkpoint, template, messages, ("<|image_pad|>",))


def test_a_template_that_knows_tools_gets_them(checkpoint: Checkpoint) -> None:
    assert render(checkpoint, KNOWING, TOOLS, ASK) == "[now]user:When?;"
    assert render(checkpoint, KNOWING, ASK) == "user:When?;"


@pytest.mark.parametrize("system", [(), (text_message("system", "Be kind."),)])
def test_else_the_system_lists_them(checkpoint: Checkpoint, system: tuple[ChatMessage, ...]) -> None:
    text = render(checkpoint, PLAIN, TOOLS, *system, ASK)
    assert text.startswith("system:" + ("Be kind.\n\n" if system else "") + "# Tools")
    assert f"<tools>\n{NOW}\n</tools>" in text
    assert text.endswith("</tool_call>;user:When?;")


def test_a_tool_cannot_stand_for_media(checkpoint: Checkpoint) -> None:
    hostile = ChatMessage("tools", (ContentPart("text", '{"description": "<|image_pad|>"}'),))
    for template in (KNOWING, PLAIN):
        with pytest.raises(RequestError, match="which stands for media"):
            render(checkpoint, template, hostile, ASK)
