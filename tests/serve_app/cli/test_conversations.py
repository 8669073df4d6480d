"""`epd ask --url` and `epd chat`: with the application in one process, and with servers that fail."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from httpx._transports import default as transports
from typer.testing import CliRunner, Result

from epd.client import conversation
from epd.client.endpoint import certificates
from epd.serve_app.cli.conversations import conversation_with
from epd.serve_app.cli.program import app
from epd.serve_app.llm import LLM
from tests.bench.fake_server import FakeServer, Manner
from tests.media import write_image, write_video

QUESTION = "What is shown?"


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    key: str
    clip: Path

    @property
    def options(self) -> tuple[str, ...]:
        return ("--url", self.url, "--api-key", self.key)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    clip = write_video(tmp_path_factory.mktemp("clips") / "clip.mp4")
    with LLM(allowed_media_path=clip.parent) as llm:
        yield Server(llm.url.removesuffix("/v1"), llm.api_key, clip)


def run(*arguments: str | Path, stdin: str = "") -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)


def asked(server: Server, *arguments: str | Path) -> dict[str, Any]:
    result = run("ask", *arguments, "--json", *server.options)
    assert result.exit_code == 0, result.output
    record: dict[str, Any] = json.loads(result.stdout)
    return record


def test_a_server_answers_as_the_pipeline_in_the_process(server: Server, tmp_path: Path) -> None:
    image = write_image(tmp_path / "image.png")
    for arguments in ((server.clip, QUESTION, "--frames", 4), (image, server.clip, "Which colours?")):
        here = run("ask", *map(str, arguments), "--json")
        assert here.exit_code == 0, here.output
        expected, found = json.loads(here.stdout), asked(server, *map(str, arguments))
        assert (found["answer"], found["usage"]) == (expected["answer"], expected["usage"])
        assert found["timings"].keys() == expected["timings"].keys()
        assert found["ttft_s"] > 0
        assert found["timings"]["total_s"] > found["timings"]["prefill_s"] > 0


def test_options_reach_the_server(server: Server) -> None:
    whole = asked(server, server.clip, QUESTION, "--frames", "8", "--max-tokens", "1")["usage"]
    assert (whole["num_frames"], whole["completion_tokens"]) == (8, 1)
    half = asked(
        server, server.clip, QUESTION, "--frames", "8", "--retention", "0.5", "--reduction", "uniform"
    )
    assert half["usage"]["visual_tokens"] <= whole["visual_tokens"] // 2 + 8
    assert half["usage"]["visual_tokens_before"] == whole["visual_tokens"]
    part = asked(server, server.clip, QUESTION, "--fps", "2", "--start", "1", "--end", "3")["usage"]
    assert part["num_frames"] == 4
    fewer = asked(server, server.clip, QUESTION, "--max-visual-tokens", "20")["usage"]
    assert 0 < fewer["visual_tokens"] <= 20


def test_the_answer_is_streamed_and_its_cost_follows(server: Server) -> None:
    result = run("ask", server.clip, QUESTION, *server.options, "-v")
    assert result.exit_code == 0
    assert result.stdout.strip() == asked(server, server.clip, QUESTION)["answer"]
    assert "first token after" in result.stderr
    assert "encode" in result.stderr


def test_a_dialogue_knows_its_former_turns(server: Server) -> None:
    """Each answer is the API's own to the same messages; a line of white space asks nothing."""
    questions = ("What is shown?", "And which colour?", "How many?")
    shown = run(
        "chat", server.clip, "-v", *server.options, stdin="\n\n".join(questions) + "\n/quit\nnever asked\n"
    )
    assert shown.exit_code == 0, shown.output
    messages: list[dict[str, Any]] = []
    headers = {"Authorization": f"Bearer {server.key}"}
    for number, question in enumerate(questions):
        video = {"type": "video_url", "video_url": {"url": server.clip.as_uri()}}
        content = [*([] if number else [video]), {"type": "text", "text": question}]
        messages.append({"role": "user", "content": content})
        reply = httpx.post(
            f"{server.url}/v1/chat/completions", json={"messages": messages}, headers=headers, timeout=200
        ).json()
        messages.append(reply["choices"][0]["message"])
    expected = [each["content"] for each in messages if each["role"] == "assistant"]
    assert shown.stdout.split("\n") == [*expected, ""]
    costs = [line for line in shown.stderr.splitlines() if line.startswith("first token after")]
    prompts = [int(line.split(" prompt tokens")[0].rpartition(" ")[2]) for line in costs]
    assert prompts == sorted(set(prompts))
    assert len(prompts) == 3


def test_later_turns_find_the_media_in_the_caches(server: Server) -> None:
    talk = conversation_with(
        server.url, server.key, None, [str(server.clip)], {"epd": {"start_s": 0.5, "num_frames": 6}}
    )
    first, second = talk.ask("What is shown?"), talk.ask("And which colour?")
    assert first.timings.encode_s > 0
    assert second.timings.encode_s == 0
    assert second.usage.num_frames == 6


def test_certificates_are_read_once_for_all_requests(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default httpx reads them for each request, of plain HTTP too."""
    create, known = transports.create_ssl_context, list[Any]()

    def create_seen(verify: Any, **options: Any) -> Any:
        known.append(verify)
        return create(verify=verify, **options)

    monkeypatch.setattr(transports, "create_ssl_context", create_seen)
    talk = conversation_with(server.url, server.key, None, [], {"max_tokens": 1})
    talk.ask("What is shown?")
    talk.ask("And which colour?")
    assert len(known) >= 3  # the model was asked for, too
    assert {id(each) for each in known} == {id(certificates())}


def test_an_interrupt_ends_an_answer_and_not_the_dialogue() -> None:
    code = (
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from epd.serve_app.cli.program import main\nmain()"
    )
    command = [sys.executable, "-c", code, "chat", "http://127.0.0.1/a.png", "--max-tokens", "2", "--url"]
    with FakeServer(Manner(gap_s=60.0)) as fake, begun([*command, fake.url]) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("one\n")
        process.stdin.flush()
        assert process.stdout.read(5) == "word "
        fake.behave(gap_s=0.0)
        process.send_signal(signal.SIGINT)
        shown, said = process.communicate("two\nthree\n", timeout=200)
    assert process.returncode == 0, said
    assert shown == "\nword word \nword word \n"
    assert said.splitlines()[0] == "stopped"
    questions = [[turn["content"] for turn in body["messages"]] for body in fake.bodies]
    assert [len(turns) for turns in questions] == [1, 1, 3]
    assert [turns[-1][-1]["text"] for turns in questions[:2]] == ["one", "two"]
    assert questions[2] == [*questions[1], "word word ", "three"]


@contextmanager
def begun(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("command", ["ask", "chat"])
def test_what_the_model_of_a_server_knows_is_said(server: Server, command: str) -> None:
    """A server that says nothing of it, or another model of it, is not spoken for."""
    words = [QUESTION] if command == "ask" else []
    shown = run(command, server.clip, *words, "--max-tokens", "1", *server.options, stdin=f"{QUESTION}\n")
    assert shown.exit_code == 0, shown.output
    knows = "the shapes that `epd demo` draws, and nothing else"
    note = f"note: shapes-vl-2 knows {knows}; for real pictures: epd serve Qwen/Qwen3-VL-2B-Instruct"
    assert shown.stderr.splitlines() == [note]


def test_a_dialogue_says_what_answers_cost_where_it_is_asked_to(server: Server) -> None:
    shown = run("chat", server.clip, *server.options, "-v", stdin=f"{QUESTION}\n")
    assert "encode" in shown.stderr
    assert "first token after" in shown.stderr.splitlines()[-1]


def test_a_dialogue_without_a_server(server: Server) -> None:
    shown = run("chat", server.clip, "--frames", "4", stdin="What is shown?\n")
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.strip() == asked(server, server.clip, "What is shown?", "--frames", "4")["answer"]


def test_a_server_of_a_command_is_for_that_command_alone(server: Server, tmp_path: Path) -> None:
    assert httpx.get(f"{server.url}/v1/models", timeout=200).status_code == 401
    other = write_video(tmp_path / "other.mp4")
    shown = run("ask", other.as_uri(), QUESTION, *server.options)
    assert shown.exit_code == 2
    assert "status 400" in shown.stderr


def line_of(result: Result, exit_code: int) -> str:
    assert result.exit_code == exit_code, result.output
    lines = result.stderr.splitlines()
    assert len(lines) == 1, lines
    assert result.stdout == ""
    return lines[0]


def test_what_cannot_be_asked_is_one_line(server: Server) -> None:
    ask = ("ask", server.clip, QUESTION)
    assert line_of(run(*ask, "--url", server.url), 2).endswith("gave status 401; give its --api-key")
    assert "--api-key" in line_of(run(*ask, "--url", server.url, "--model", "m", "--api-key", "no"), 2)
    assert "ConnectError" in line_of(run(*ask, "--url", "http://127.0.0.1:9"), 2)
    for option in (
        ("--device", "cpu"),
        ("--dtype", "float32"),
        ("--skip-static", "0"),
        ("--draft", "auto"),
        ("--tower-share", "0.5"),
        ("--tensor-parallel-size", "2"),
        ("--enforce-eager",),
    ):
        assert f"received {option[0]}" in line_of(run(*ask, *server.options, *option), 2)
    assert "the question is empty" in line_of(run("ask", server.clip, " ", *server.options), 2)
    assert "status 404" in line_of(run(*ask, *server.options, "--model", "another"), 2)
    assert "status 400" in line_of(run(*ask, *server.options, "--frames", "1000000000"), 2)
    for url in ("127.0.0.1:9", "http://127.0.0.1:port", "http://[::1"):
        assert "write http://HOST:PORT" in line_of(run(*ask, "--url", url), 2)


def test_files_are_held_to_the_limit_of_the_server(server: Server, tmp_path: Path) -> None:
    """Before any is read or sent. 64 KiB of a body are for the question, and base64 has 4 bytes for 3."""
    large = tmp_path / "large.mp4"
    large.write_bytes(server.clip.read_bytes())
    os.truncate(large, 101 << 20)
    allowed = ((128 << 20) - (64 << 10)) // 4 * 3
    words = f"received files of {101 << 20:,} bytes; allowed {allowed:,} in one question"
    for model in ((), ("--model", "shapes-vl")):
        assert words in line_of(run("ask", large, QUESTION, *server.options, *model), 2)


@pytest.mark.parametrize(
    ("limits", "allowed"),
    [
        ({"max_body_bytes": (64 << 10) + 8}, 6), ({"max_body_bytes": 1}, 0),
        (None, 10), ({}, 10), ({"max_body_bytes": "9"}, 10),
    ],
)  # fmt: skip
def test_a_server_need_not_say_its_limit(
    server: Server, limits: dict[str, Any] | None, allowed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation, "MAX_FILE_BYTES", 10)
    models = json.dumps({"data": [{"id": "other", "limits": limits}]}).encode()
    with replying(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + models) as url:
        line = line_of(run("ask", server.clip, QUESTION, "--url", url), 2)
    assert f"allowed {allowed} in one question" in line


def test_a_named_model_need_not_be_listed(server: Server) -> None:
    """The reply is the same to both requests: the file is sent although no model is listed."""
    with replying(b"HTTP/1.1 404 Gone\r\nconnection: close\r\n\r\n") as url:
        line = line_of(run("ask", server.clip, QUESTION, "--url", url, "--model", "m"), 2)
        assert line == f"error: {url} gave status 404"
        assert f"{url}/v1/models gave" in line_of(run("ask", server.clip, QUESTION, "--url", url), 2)


@contextmanager
def replying(reply: bytes) -> Iterator[str]:
    """A server that sends the same bytes to whoever asks, and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    with connection.makefile("rb") as received:  # all of it, or the end resets what was sent
                        lines = iter(received.readline, b"\r\n")
                        head = dict(line.lower().split(b":", 1) for line in lines if b":" in line)
                        received.read(int(head.get(b"content-length", 0)))
                    connection.sendall(reply)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(5)


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
BEGUN = event(choices=[{"delta": {"content": "a circ"}}])


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (HEAD + BEGUN, "ended before the answer did"),
        (
            HEAD + BEGUN + event(error={"message": "the worker is lost"}),
            "ended the answer: the worker is lost",
        ),
        (HEAD + b"data: 17\n\n", "an event that is no JSON object"),
        (b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\nconnection: close\r\n\r\nbusy", "gave status 503"),
        (b"no HTTP at all\r\n\r\n", "RemoteProtocolError"),
    ],
)
def test_an_answer_that_is_cut_short_is_said_to_be(reply: bytes, words: str) -> None:
    with replying(reply) as url:
        result = run("ask", "--url", url, "--model", "m", "http://127.0.0.1/a.png", QUESTION)
    assert result.exit_code == 3, result.output
    assert words in result.stderr.splitlines()[-1]


def test_an_ordinary_server_of_the_api_is_enough() -> None:
    """It reports nothing of stages and frames."""
    usage = event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 2})
    ended = event(choices=[{"delta": {"content": "le"}, "finish_reason": "stop"}])
    with replying(HEAD + BEGUN + ended + usage + b"data: [DONE]\n\n") as url:
        result = run("ask", "--url", url, "--model", "m", "http://127.0.0.1/a.png", QUESTION, "--json")
    record = json.loads(result.stdout)
    assert record["answer"] == "a circle"
    assert (record["usage"]["prompt_tokens"], record["usage"]["completion_tokens"]) == (7, 2)


@pytest.mark.parametrize(
    ("words", "expected"), [("epd st", "status"), ("epd ask --max-v", "--max-visual-tokens")]
)
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands_and_options(shell: str, words: str, expected: str) -> None:
    """By the variables that the shell's script sets; nothing heavy is imported for it."""
    code = (
        "import sys; sys.argv[0] = 'epd'\nfrom epd.serve_app.cli.program import main\n"
        "try:\n main()\nfinally:\n assert not {'torch', 'ray'} & sys.modules.keys()"
    )
    variables = {
        "_EPD_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
        "_TYPER_COMPLETE_ARGS": words,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    completed = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | variables, capture_output=True, text=True, check=False
    )
    assert completed.stdout.count("\n") == 1
    assert re.findall(r"^[\w-]+|(?<=\(\(\")[\w-]+", completed.stdout)[-1] == expected, completed.stderr
