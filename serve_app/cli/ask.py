"""The commands `epd ask` and `epd chat`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from epd import console
from epd.client.conversation import JSON, Conversation
from epd.engine_config import EngineConfig
from epd.errors import RequestError, check_question
from epd.serve_app.cli.conversations import FrameProgress, open_conversation
from epd.serve_app.cli.early_checks import media_and_question, media_at_hand, output_to
from epd.serve_app.cli.flags import with_fields_of, with_options_of
from epd.serve_app.cli.options import AnswerFile, ApiKey, AsAudio, IsJson, Model, Paths, System, Url, Verbose
from epd.serve_app.cli.question_options import QuestionOptions
from epd.types import Answer, Reuse, Usage

_Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="PATH... QUESTION",
        help="Videos, images and audio, in the order the model gets them, and what to ask, in quotes. A path "
        "is a file, a URL, or - for stdin.",
    ),
]


@with_fields_of(EngineConfig)
@with_options_of(QuestionOptions)
def ask(
    words: _Words = None,
    model: Model = None,
    audio: AsAudio = False,
    system: System = None,
    url: Url = None,
    api_key: ApiKey = None,
    out: AnswerFile = None,
    as_json: IsJson = False,
    verbose: Verbose = False,
    **options: Any,
) -> None:
    """Answer a question about videos, images and audio.

    Streams the answer to stdout. With --verbose, prints to stderr what each stage took. With --json, prints
    one object with answer, ttft_s, timings and usage. With --url, a running server answers: files are sent to
    it, and it fetches URLs itself.

    \b
    Examples:
      epd ask clip.mp4 "What happens?"
      epd ask before.png after.png "What has changed?"
      epd ask talk.mp4 "What does the slide say?" --start 1:30 --end 2:00
      epd ask clip.mp4 "What happens?" --model Qwen/Qwen3-VL-2B-Instruct
    """
    paths, question = media_and_question(words or ())
    asked, config = QuestionOptions.parted(options)
    check_question(question)
    with ExitStack() as stack:
        paths = stack.enter_context(media_at_hand(paths))
        stack.enter_context(output_to(out))
        conversation = stack.enter_context(
            open_conversation(
                paths, model, (url, api_key), config, as_audio=audio, is_greedy=True, **asked.given
            )
        )
        if system is not None:
            conversation.instruct(system)
        if url is not None:
            answer = conversation.ask(question, None if as_json else console.stream_text)
            show_answer(answer, as_json=as_json, verbose=verbose)
            _say_knowledge(conversation)
            return
        with console.progress_bar("frames") as show:
            shown = _Shown(FrameProgress(show), shows_text=not as_json, is_verbose=verbose)
            answer = conversation.ask(question, shown.text, shown.span)
        num_skipped = _num_units_skipped(conversation, config)
        show_answer(answer, num_skipped, as_json=as_json, verbose=verbose)
        _say_knowledge(conversation)


def _say_knowledge(conversation: Conversation) -> None:
    """Says on stderr what the model knows, where its card says that this is little."""
    if conversation.note is not None:
        console.note(conversation.note)


def _num_units_skipped(conversation: Conversation, config: EngineConfig) -> int | None:
    """Returns the units that a fresh model has not encoded; None where all are encoded."""
    if config.skip_static is None:
        return None
    return int(conversation.counters().get("units_skipped", 0))


@dataclass(slots=True)
class _Shown:
    """Shows an answer as it comes, and before it what was planned and how many frames are encoded."""

    frames: FrameProgress
    shows_text: bool
    is_verbose: bool

    def text(self, piece: str) -> None:
        self.frames.finish()
        if self.shows_text:
            console.stream_text(piece)

    def span(self, span: JSON) -> None:
        """Takes what a stage has done, as `SpanReport` has it."""
        for line in (span.get("notes") or []) if self.is_verbose else []:
            print(line, file=sys.stderr)
        if choice := span.get("choice"):
            print(f"chose {choice}", file=sys.stderr)
        self.frames.take(span)


def show_answer(
    answer: Answer, num_units_skipped: int | None = None, *, as_json: bool = False, verbose: bool = False
) -> None:
    """Ends the line of an answer, then prints what it cost if verbose, else what is amiss; or all as JSON."""
    if as_json:
        skipped = {} if num_units_skipped is None else {"num_units_skipped": num_units_skipped}
        console.print_json(_record(answer) | skipped)
        return
    console.stream_text("\n")
    if not verbose:
        if amiss := (_substituted(answer.usage) + _unseen(answer.usage)).removeprefix("; "):
            console.note(amiss)
        return
    console.stderr_console().print(console.stage_table({"seconds": answer.timings}))
    print(cost_line(answer, num_units_skipped or 0), file=sys.stderr)


def _record(answer: Answer) -> dict[str, object]:
    """An answer as `--json` prints it. Times in seconds."""
    return {
        "answer": answer.text,
        "ttft_s": answer.ttft_s,
        "timings": asdict(answer.timings),
        "usage": _usage(answer.usage),
    }


def _usage(usage: Usage) -> dict[str, object]:
    """The usage; without what was found on disk, where nothing is kept."""
    fields = asdict(usage)
    if not usage.reused and not usage.num_unread_frames:
        del fields["reused"], fields["num_unread_frames"]
    return fields


def cost_line(answer: Answer, num_units_skipped: int = 0) -> str:
    """Returns a line for people: what was looked at, and when the first token came."""
    usage = answer.usage
    is_whole = usage.visual_tokens == usage.visual_tokens_before
    visual = (
        f"{usage.visual_tokens}" if is_whole else f"{usage.visual_tokens} of {usage.visual_tokens_before}"
    )
    return (
        f"first token after {answer.ttft_s:.3f} s; "
        f"{console.counted(usage.num_frames, 'frame')}, {visual} visual tokens, "
        f"{console.counted(usage.prompt_tokens, 'prompt token')}, "
        f"{console.counted(usage.completion_tokens, 'completion token')}"
        + (
            f"; {console.counted(num_units_skipped, 'unit')} of frames did not change"
            if num_units_skipped
            else ""
        )
        + _substituted(usage)
        + _unseen(usage)
        + "".join(f"; {_found(each)}" for each in usage.reused)
    )


def _found(reuse: Reuse) -> str:
    """One part of the line: what was found, and where."""
    what = "keys and values" if reuse.kind == "kv" else reuse.kind
    if reuse.tier == "left":
        return f"{what} of {console.counted(reuse.num, 'token')} were kept, and quicker to compute"
    where = {"memory": "in memory", "disk": "on disk", "objects": "in the object store"}[reuse.tier]
    size = f" ({reuse.num_bytes / 1e6:.1f} MB)" if reuse.num_bytes else ""
    return f"{what} of {console.counted(reuse.num, 'token')} were {where}{size}"


def _substituted(usage: Usage) -> str:
    """The end of the line where frames of the media are damaged, else nothing."""
    num = usage.num_substituted_frames
    shows = "shows" if num == 1 else "show"
    return f"; {num} of {usage.num_frames} frames could not be decoded and {shows} a neighbour" if num else ""


def _unseen(usage: Usage) -> str:
    """The end of the line where animated pictures were taken as images, else nothing."""
    num = usage.num_unseen_frames
    were = f"more frame{'s were' if num > 1 else ' was'} not looked at: send animated pictures as videos"
    return f"; {num} {were}" if num else ""


_QUIT = "/quit"


@with_fields_of(EngineConfig)
@with_options_of(QuestionOptions)
def chat(
    paths: Paths,
    model: Model = None,
    audio: AsAudio = False,
    system: System = None,
    url: Url = None,
    api_key: ApiKey = None,
    verbose: Verbose = False,
    **options: Any,
) -> None:
    """Answer questions about videos and images in a dialogue.

    Reads a question from each line of stdin; /quit or the end of the input ends it, Ctrl-C ends an answer.
    Later questions know the former ones, and find the media in the caches. Without --url a model is loaded
    into this process. With --verbose, says after each answer what it cost.
    """
    asked, config = QuestionOptions.parted(options)
    server = (url, api_key)
    with open_conversation(paths, model, server, config, as_audio=audio, **asked.given) as conversation:
        if system is not None:
            conversation.instruct(system)
        _say_knowledge(conversation)
        for question in _questions(is_terminal=sys.stdin.isatty()):
            _answer(conversation, question, is_terminal=sys.stdin.isatty(), verbose=verbose)


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


def _answer(conversation: Conversation, question: str, *, is_terminal: bool, verbose: bool) -> None:
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
        show_answer(answer, verbose=verbose)
