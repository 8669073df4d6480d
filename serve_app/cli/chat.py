"""The command `epd chat`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from epd import console
from epd.client.conversation import Conversation
from epd.engine_config import EngineConfig
from epd.errors import RequestError
from epd.serve_app.cli.ask import cost_line
from epd.serve_app.cli.conversations import open_conversation
from epd.serve_app.cli.early_checks import say_knowledge
from epd.serve_app.cli.flags import with_fields_of, with_options_of
from epd.serve_app.cli.options import ApiKey, Model, Paths, System, Url
from epd.serve_app.cli.question_options import QuestionOptions

_QUIT = "/quit"


@with_fields_of(EngineConfig)
@with_options_of(QuestionOptions)
def chat(
    paths: Paths,
    model: Model = None,
    system: System = None,
    url: Url = None,
    api_key: ApiKey = None,
    **options: Any,
) -> None:
    """Answer questions about videos and images in a dialogue.

    Reads a question from each line of stdin; /quit or the end of the input ends it, Ctrl-C ends an answer.
    Later questions know the former ones, and find the media in the caches. Without --url a model is loaded
    into this process.
    """
    asked, config = QuestionOptions.parted(options)
    with open_conversation(paths, model, (url, api_key), config, **asked.given) as conversation:
        if system is not None:
            conversation.instruct(system)
        if url is None:
            say_knowledge(model)
        for question in _questions(is_terminal=sys.stdin.isatty()):
            _answer(conversation, question, is_terminal=sys.stdin.isatty())


def _questions(*, is_terminal: bool) -> Iterator[str]:
    """Yields what is asked, line by line."""
    while True:
        try:
            line = input("> ") if is_terminal else sys.stdin.readline()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not is_terminal and not line:
            return
        question = line.strip()
        if question == _QUIT:
            return
        if question:
            yield question


def _answer(conversation: Conversation, question: str, *, is_terminal: bool) -> None:
    """Answers one question. On a terminal, what it refuses does not end the dialogue."""
    try:
        answer = conversation.ask(question, console.stream_text)
    except KeyboardInterrupt:
        console.stream_text("\n")
        print("stopped", file=sys.stderr)
    except RequestError as error:
        if not is_terminal:
            raise
        print("error:", error, file=sys.stderr)
    else:
        console.stream_text("\n")
        print(cost_line(answer), file=sys.stderr)
