"""What a conversation may consist of."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from epd.chat import RESERVED_VARIABLES, ChatMessage, ContentPart, check_chat, text_message
from epd.errors import RequestError


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ((), "none of the user"),
        ((text_message("system", "Hi"),), "none of the user"),
        (
            (text_message("user", "Hi"), text_message("assistant", "Hello")),
            "the last message is the assistant's",
        ),
        ((text_message("user", " \n"),), "the question is empty"),
    ],
)
def test_a_conversation_without_a_question_is_refused(messages: tuple[ChatMessage, ...], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        check_chat(messages)


def test_media_alone_are_a_question() -> None:
    check_chat((ChatMessage("user", (ContentPart("image"),)),))


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_only_the_user_sends_media(role: Any) -> None:
    with pytest.raises(RequestError, match=f"a message of the {role} contains images"):
        ChatMessage(role, (ContentPart("image"),))


def test_a_message_has_content() -> None:
    with pytest.raises(RequestError, match="no content"):
        ChatMessage("user", ())


def test_only_texts_have_text() -> None:
    with pytest.raises(ValueError, match="only a text has text"):
        ContentPart("image", "red")


def test_arguments_of_the_template_engine_are_no_variables() -> None:
    rendering = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    assert {"messages", *rendering} - {"self", "kwargs"} == RESERVED_VARIABLES
