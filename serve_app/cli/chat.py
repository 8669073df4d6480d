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
from epd.serve_app.cli.options import (
    AnswerSeed,
    ApiKey,
    ComputeShare,
    End,
    Fps,
    Frames,
    MaxTokens,
    MaxVisualTokens,
    Model,
    Paths,
    Reduction,
    Retention,
    Schema,
    Start,
    System,
    Temperature,
    Url,
    check_numbers,
    reduction_policy,
    response_format,
    visual_budget,
    with_fields_of,
)

_QUIT = "/quit"


@with_fields_of(EngineConfig)
def chat(
    paths: Paths,
    model: Model = None,
    fps: Fps = None,
    frames: Frames = None,
    start: Start = 0.0,
    end: End = None,
    retention: Retention = None,
    reduction: Reduction = None,
    compute_share: ComputeShare = None,
    max_visual_tokens: MaxVisualTokens = None,
    max_tokens: MaxTokens = None,
    system: System = None,
    temperature: Temperature = None,
    seed: AnswerSeed = None,
    schema: Schema = None,
    url: Url = None,
    api_key: ApiKey = None,
    **engine: Any,
) -> None:
    """Answer questions about videos and images in a dialogue.

    Reads a question from each line of stdin; /quit or the end of the input ends it, Ctrl-C ends an answer.
    Later questions know the former ones, and find the media in the caches. Without --url a model is loaded
    into this process.
    """
    check_numbers(fps, frames, max_tokens)
    reduction_policy(reduction, retention, compute_share)
    visual_budget(max_visual_tokens, retention)
    config = EngineConfig.checked(engine)
    options: dict[str, Any] = {
        "fps": fps,
        "frames": frames,
        "start": start,
        "end": end,
        "retention": retention,
        "reduction": reduction,
        "compute_share": compute_share,
        "max_visual_tokens": max_visual_tokens,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "response_format": response_format(schema),
    }
    with open_conversation(paths, model, (url, api_key), config, **options) as conversation:
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
