"""What a newcomer types, and the one line that is said: right and wrong spellings of every command."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from epd import __version__
from epd.client.conversation import Conversation, Medium
from epd.client.endpoint import Endpoint
from epd.serve_app.cli.options import seconds_of
from epd.serve_app.cli.program import _COMMANDS, app

CLIP, MISSING, FOLDER = "clip.mp4", "nothing.mp4", "videos"
WRITE_BOTH = 'received neither media nor a question; write both: epd ask clip.mp4 "What happens?"'
NO_QUESTION = "received no question about 'clip.mp4'; write it in quotes behind the media: epd ask clip.mp4"
NO_SUCH_FILE = "no file at nothing.mp4: received a path to nothing; give the path of a video or image"
IS_FOLDER = (
    "'videos' is a folder; name its files, as videos/*.mp4 without quotes, or ask about each of them: epd"
)
WITHOUT_NAMES = "; write the media and then the question, without names"
A_MODEL = ", or a name: shapes-vl, shapes-vl-2, or of the hub as Qwen/Qwen3-VL-2B-Instruct"


def meant(command: str, wrong: str, right: str) -> tuple[str, str]:
    """A row for an option that is written wrongly."""
    media = {"ask": " clip.mp4 What", "chat": " clip.mp4", "batch": " a.jsonl b.jsonl"}.get(command, "")
    return f"{command}{media} {wrong} 1", f"epd {command} has no option {wrong}; did you mean {right}?"


ROWS: tuple[tuple[str, str], ...] = (
    # commands
    ("aks clip.mp4 What", "no such command 'aks'; did you mean ask?"),
    ("sak clip.mp4 What", "no such command 'sak'; did you mean ask?"),
    ("chatt clip.mp4", "no such command 'chatt'; did you mean chat?"),
    ("cht clip.mp4", "no such command 'cht'; did you mean chat?"),
    ("server", "no such command 'server'; did you mean serve?"),
    ("servr", "no such command 'servr'; did you mean serve?"),
    ("bacth a.jsonl b.jsonl", "no such command 'bacth'; did you mean batch, cache, bench?"),
    ("benchmark", "no such command 'benchmark'; did you mean bench?"),
    ("bnech", "no such command 'bnech'; did you mean bench, batch?"),
    ("plans", "no such command 'plans'; did you mean plan?"),
    ("simulat", "no such command 'simulat'; did you mean simulate?"),
    ("profil", "no such command 'profil'; did you mean profile?"),
    ("evaluate", "no such command 'evaluate'; did you mean eval?"),
    ("evl", "no such command 'evl'; did you mean eval?"),
    ("demos", "no such command 'demos'; did you mean demo?"),
    ("demo_video out.mp4", "no such command 'demo_video'; did you mean demo-video?"),
    ("stats", "no such command 'stats'; did you mean status?"),
    ("confg show", "no such command 'confg'; did you mean config?"),
    ("config shw", "no such command 'shw'; did you mean show?"),
    ("config list", "no such command 'list'; epd config --help has all"),
    ("run clip.mp4", "no such command 'run'; epd --help has all"),
    ("clip.mp4 What", "no such command 'clip.mp4'; epd --help has all"),
    ("help aks", "no such command 'aks'; did you mean ask?"),
    # options of the program
    ("--verson", "epd has no option --verson; did you mean --version?"),
    ("--model x ask", "epd has no option --model; options stand behind the command: epd COMMAND --model"),
    ("--url http://a ask", "epd has no option --url; options stand behind the command: epd COMMAND --url"),
    ("cache --json ls", "epd cache has no option --json; options stand behind the command: epd cache COMMA"),
    ("--hlp", "epd has no option --hlp; did you mean --help?"),
    ("-V", "epd has no option -V; epd --help has all"),
    # what is asked, and about what
    ("ask", WRITE_BOTH),
    ("ask --json", WRITE_BOTH),
    ("ask clip.mp4", NO_QUESTION),
    ("ask clip.mp4 clip.mp4", NO_QUESTION),
    ("ask nothing.mp4", NO_QUESTION.replace("clip.mp4'", "nothing.mp4'")),
    ("ask https://a.org/b.mp4", NO_QUESTION.replace("clip.mp4'", "https://a.org/b.mp4'")),
    ("ask -", NO_QUESTION.replace("clip.mp4'", "-'")),
    (
        "ask 'What is it?'",
        "received 'What is it?' and no video or image; write one before it: epd ask clip.mp4",
    ),
    ("ask nothing.mp4 What", NO_SUCH_FILE),
    ("ask What nothing.mp4", NO_SUCH_FILE),
    ("ask clip.mp4 nothing.mp4 What", NO_SUCH_FILE),
    ("ask file://nothing.mp4/nothing.mp4 What", "no file at /nothing.mp4: received a path to nothing"),
    ("ask videos What", IS_FOLDER),
    ("ask videos/ What", IS_FOLDER.replace("'videos'", "'videos/'")),
    ("ask '*.mov' What", "no file matches '*.mov'; give the path of a video or image"),
    ("ask 'shot[1].png' What", "no file matches 'shot[1].png'; give the path of a video or image"),
    ("ask empty.mp4 What", "empty.mp4 is empty: 0 bytes, allowed 1 or more; check how it was written"),
    ("ask notes.txt What", "notes.txt is not a video that can be read"),
    ("ask notes.txt clip.mp4 What", "notes.txt is not a video that can be read"),
    ("ask clip.mp4 ''", "the question is empty; ask something about the media"),
    ("ask clip.mp4 ' '", "the question is empty; ask something about the media"),
    ("ask - What", "received - for media, and stdin is a terminal; pipe a file into it, or name one"),
    # numbers
    ("ask clip.mp4 What --fps 0", "received --fps 0.0; allowed: more than 0"),
    ("ask clip.mp4 What --fps -1", "received --fps -1.0; allowed: more than 0"),
    ("ask clip.mp4 What --fps nan", "received --fps nan; allowed: more than 0"),
    ("ask clip.mp4 What --fps fast", "invalid value for '--fps': "),
    ("ask clip.mp4 What --frames 0", "received --frames 0; allowed: more than 0"),
    ("ask clip.mp4 What --frames 8.5", "invalid value for '--frames': "),
    ("ask clip.mp4 What --frames", "option '--frames' requires an argument; epd ask --help has all"),
    ("ask clip.mp4 What --fps 1 --frames 8", "received --fps 1.0 and --frames 8; give one of the two"),
    ("ask clip.mp4 What --max-tokens 0", "received --max-tokens 0; allowed: more than 0"),
    (
        "ask clip.mp4 What --start now",
        "received the time 'now'; allowed: seconds, or 1:30 for a minute and a h",
    ),
    (
        "ask clip.mp4 What --start 1:",
        "received the time '1:'; allowed: seconds, or 1:30 for a minute and a hal",
    ),
    (
        "ask clip.mp4 What --end 1:2:3:4",
        "received the time '1:2:3:4'; allowed: seconds, or 1:30 for a minute",
    ),
    (
        "ask clip.mp4 What --end 1:-2",
        "received the time '1:-2'; allowed: seconds, or 1:30 for a minute and a",
    ),
    ("ask clip.mp4 What --retention 2", "received a retention of 2"),
    ("ask clip.mp4 What --reduction magic", "received the reduction method 'magic'"),
    ("ask clip.mp4 What --device gpu", "received the device 'gpu'"),
    ("ask clip.mp4 What --dtype int8", "received the dtype 'int8'; allowed: auto, bfloat16"),
    ("ask clip.mp4 What --draft magic", "received a draft of 'magic'; allowed: none, prompt"),
    ("ask clip.mp4 What --max-draft 0", "received"),
    (
        "ask clip.mp4 What --tensor-parallel-size 0",
        "received --tensor-parallel-size 0; allowed: at least 1; chan",
    ),
    (
        "ask clip.mp4 What --gpu-memory-utilization 2",
        "received --gpu-memory-utilization 2.0; allowed: at most 1",
    ),
    ("ask clip.mp4 What --temperature 3", "invalid value for '--temperature': "),
    ("ask clip.mp4 What --temperature warm", "invalid value for '--temperature': "),
    ("ask clip.mp4 What --seed x", "invalid value for '--seed': "),
    ("ask clip.mp4 What --schema nothing.json", "cannot read 'nothing.json': "),
    ("ask clip.mp4 What --schema notes.txt", "cannot read 'notes.txt': "),
    ("ask clip.mp4 What --schema list.json", "'list.json' holds a list; allowed: a JSON schema, an object"),
    meant("ask", "--temp", "--temperature"),
    # files to write
    (
        "ask clip.mp4 What -o no/such/answer.txt",
        "cannot write 'no/such/answer.txt'; give a file name in a folder",
    ),
    ("ask clip.mp4 What --out videos", "cannot write 'videos'; give a file name in a folder that exists"),
    # models
    (
        "ask clip.mp4 What --model nowhere",
        "no model folder at 'nowhere'; give the path of a folder that holds c",
    ),
    (
        "ask clip.mp4 What --model shapes-vl-3",
        "no model folder at 'shapes-vl-3'; give the path of a folder that",
    ),
    (
        "ask clip.mp4 What --model ./no/model",
        "/no/model'; give the path of a folder that holds config.json",
    ),
    (
        "ask clip.mp4 What --model videos",
        "'videos' holds no config.json; give the path of a model in Hugging Fac",
    ),
    (
        "ask clip.mp4 What --model videos/tiny",
        "no model folder at 'videos/tiny'; give the path of a folder that",
    ),
    ("ask clip.mp4 What --model clip.mp4", "'clip.mp4' is a file; give a folder in Hugging Face layout"),
    (
        "ask clip.mp4 What --model x.gguf",
        "no model folder at 'x.gguf'; give the path of a folder that holds conf",
    ),
    (
        "ask clip.mp4 What --model shapes-vl --revision v1",
        "received the revision 'v1' of 'shapes-vl', which is no",
    ),
    ("serve nowhere", "no model folder at 'nowhere'; give the path of a folder that holds config.json"),
    ("config show model=nowhere", f"give the path of a folder that holds config.json{A_MODEL}"),
    # options by other names
    meant("ask", "--frmes", "--frames"),
    meant("ask", "--frame", "--frames"),
    meant("ask", "--num-frames", "--frames"),
    meant("ask", "--num_frames", "--frames"),
    meant("ask", "--max_tokens", "--max-tokens"),
    meant("ask", "--max-new-tokens", "--max-tokens"),
    meant("ask", "--maxtokens", "--max-tokens"),
    meant("ask", "--modl", "--model"),
    meant("ask", "--model-path", "--model"),
    meant("ask", "--Model", "--model"),
    meant("ask", "--retentoin", "--retention"),
    meant("ask", "--tp", "--tensor-parallel-size"),
    meant("ask", "--tensor_parallel_size", "--tensor-parallel-size"),
    meant("ask", "--gpu", "--device"),
    meant("ask", "--precision", "--dtype"),
    meant("ask", "--from", "--start"),
    meant("ask", "--to", "--end"),
    meant("ask", "--output", "--out"),
    meant("ask", "--server", "--url"),
    meant("ask", "--base-url", "--url"),
    meant("ask", "--apikey", "--api-key"),
    meant("ask", "--jsn", "--json"),
    meant("ask", "--verbos", "--verbose"),
    ("ask --video clip.mp4 What", f"epd ask has no option --video{WITHOUT_NAMES}"),
    ("ask --image a.png --prompt What", f"epd ask has no option --image{WITHOUT_NAMES}"),
    ("ask clip.mp4 --prompt What", f"epd ask has no option --prompt{WITHOUT_NAMES}"),
    ("ask clip.mp4 --question What", f"epd ask has no option --question{WITHOUT_NAMES}"),
    ("ask clip.mp4 What -q", "epd ask has no option -q; epd ask --help has all"),
    ("ask clip.mp4 What --beam-search", "epd ask has no option --beam-search; epd ask --help has all"),
    meant("chat", "--frmes", "--frames"),
    meant("chat", "--max_tokens", "--max-tokens"),
    meant("chat", "--modle", "--model"),
    (
        "chat",
        "epd chat lacks PATH: Videos, images and audio, in the order the model gets them; epd chat --help",
    ),
    ("chat nothing.mp4", NO_SUCH_FILE),
    ("chat videos", IS_FOLDER),
    ("chat '*.mov'", "no file matches '*.mov'; give the path of a video or image"),
    (
        "chat clip.mp4 --start late",
        "received the time 'late'; allowed: seconds, or 1:30 for a minute and a half",
    ),
    ("chat clip.mp4 --fps 0", "received --fps 0.0; allowed: more than 0"),
    meant("batch", "--num-frames", "--frames"),
    ("batch a.jsonl b.jsonl --question 1", "and questions; allowed: --question or --questions with media"),
    meant("batch", "--topolgy", "--topology"),
    (
        "batch",
        "epd batch lacks IN: JSON lines, a .csv or Parquet; with --question(s) also media: one, a pattern in "
        "quotes, a folder of videos, a .txt of them. A path, - for lines from stdin, s3:// or gs://; epd",
    ),
    (
        "batch a.jsonl",
        "epd batch lacks OUT: Results: OUT.jsonl or OUT.csv, failures go to OUT.errors.jsonl; or a folder of "
        "Parquet, a name that ends in / or .parquet, s3:// or gs://; epd batch",
    ),
    (
        "batch videos out.jsonl",
        "received media, 'videos', and no question; allowed: with --question or --questions; give one",
    ),
    ("batch a.jsonl b.jsonl c.jsonl", "got unexpected extra argument(s) (c.jsonl); epd batch --help has all"),
    ("batch - out.jsonl", "received - for lines, and stdin is a terminal; pipe a file into it, or name one"),
    ("batch '*.mov' out.jsonl --question What", "no file matches '*.mov'; give the path of a video or image"),
    ("batch clip.mp4 out.jsonl", "received media, 'clip.mp4', and no question; allowed: with --question or"),
    ("batch a.jsonl out.jsonl --temperature 3", "invalid value for '--temperature': "),
    ("batch a.jsonl out.jsonl --schema nothing.json", "cannot read 'nothing.json': "),
    ("batch a.jsonl out.jsonl --start now", "received the time 'now'; allowed: seconds, or 1:30 for a"),
    ("batch notes.txt out.jsonl --frames 0", "received --frames 0; allowed: more than 0"),
    (
        "batch notes.txt out.jsonl --fps 1 --frames 8",
        "received --fps 1.0 and --frames 8; give one of the two",
    ),
    meant("serve", "--media-folder", "--allowed-media-path"),
    meant("serve", "--allowed-local-media-path", "--allowed-media-path"),
    meant("serve", "--served-model-name", "--model-name"),
    meant("serve", "--root-path", "--route-prefix"),
    meant("serve", "--api_key", "--api-key"),
    meant("serve", "--prot", "--port"),
    meant("serve", "--tp", "--tensor-parallel-size"),
    meant("serve", "--toplogy", "--topology"),
    meant("serve", "--locl", "--local"),
    ("serve --model x", "epd serve has no option --model; write the model without a name: epd serve MODEL"),
    ("serve --model-path x", "no option --model-path; write the model without a name: epd serve MODEL"),
    ("serve --port 99999", "invalid value for '--port': "),
    ("serve --port http", "invalid value for '--port': "),
    ("serve --topology 1x", "topology"),
    ("serve --retention 2", "--retention: "),
    ("serve one two", "got unexpected extra argument(s) (two); epd serve --help has all"),
    (
        "serve --local --address auto",
        "received --local and --address auto; allowed: one of them; leave one out",
    ),
    ("plan --budget many", "received the rate 'many'; allowed: a number above 0, alone for each second, or"),
    meant("plan", "--slo-ttft", "--slo-ttft-s"),
    meant("plan", "--gpu", "--gpus"),
    meant("simulate", "--workloads", "--workload"),
    meant("profile", "--repeat", "--repeats"),
    ("profile nope@h100", "model is 'nope'; known are "),
    ("eval", "got no questions; give one of QUESTIONS, --demo N and --table FILE"),
    meant("eval", "--demos", "--demo"),
    ("bench", "epd bench lacks --url [NAME=]URL: Server to measure, without /v1"),
    ("bench http://127.0.0.1:9", "epd bench lacks --url [NAME=]URL: Server to measure, without /v1"),
    ("bench --url 127.0.0.1:9", "'127.0.0.1:9' is not an endpoint; write http://HOST:PORT or NAME=http"),
    ("status http://127.0.0.1:9", "extra argument(s) (http://127.0.0.1:9); did you mean --url http://127.0"),
    ("status x y", "got unexpected extra argument(s) (x y); epd status --help has all"),
    ("demo-video", "epd demo-video lacks OUT.mp4: File to write; a JSON file with the truth goes beside it"),
    ("demo-video out.mp4 --size big", "size"),
    ("demo-video out.mp4 --second 3", "epd demo-video has no option --second; did you mean --seconds?"),
    ("config show modl=x", "there is no argument modl; did you mean model?"),
    ("config show max-requests=3", "there is no argument max-requests; did you mean max_requests?"),
    ("config show media_folder=.", "there is no argument media_folder; "),
    (
        "config show limits.max_frame=3",
        "there is no argument limits.max_frame; did you mean limits.max_frames?",
    ),
    ("config show topology", "received 'topology'; allowed: NAME=VALUE; write an equals sign"),
    ("config show --fil x.yaml", "epd config show has no option --fil; did you mean --file?"),
    ("config show --file", "option '--file' requires an argument; epd config show --help has all"),
    ("config show --file nothing.yaml", "cannot read 'nothing.yaml': "),
)


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stand_in(tmp_path_factory.mktemp("newcomer"))


def stand_in(folder: Path) -> Path:
    """Where a newcomer stands: a video, a folder of them, and files that are none."""
    from tests.media import write_video

    write_video(folder / CLIP)
    (folder / FOLDER).mkdir()
    (folder / "empty.mp4").touch()
    (folder / "list.json").write_text("[]")
    (folder / "notes.txt").write_text("the minutes of the meeting\n" * 9)
    return folder


def words_of(typed: str) -> list[str]:
    """As a shell parts them, with quotes around what has spaces."""
    return [quoted[1:-1] if quoted[:1] == "'" else quoted for quoted in re.findall(r"'[^']*'|\S+", typed)]


def run(typed: str, **environment: str) -> Result:
    variables = {"NO_COLOR": "1", "COLUMNS": "60", "EPD_URL": "", **environment}
    return CliRunner().invoke(app, words_of(typed), env=variables)


@pytest.mark.parametrize(("typed", "said"), ROWS, ids=[typed for typed, _ in ROWS])
def test_what_is_wrong_is_said_in_one_line(
    typed: str, said: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On stderr, in one line however narrow the terminal is, with the exit code of wrong usage."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("epd.serve_app.cli.early_checks.is_terminal", lambda: True)
    shown = run(typed)
    assert (shown.exit_code, shown.stdout) == (2, ""), shown.output
    assert shown.stderr.startswith("error: ")
    assert said in shown.stderr
    assert shown.stderr.count("\n") == 1


def test_nothing_heavy_is_imported_to_say_it(folder: Path) -> None:
    """One process says all of it, without torch, transformers and Ray."""
    program = (
        "import json, os, sys\nos.dup2(os.open(os.devnull, os.O_RDWR), 0)\n"
        "from typer.testing import CliRunner\nfrom epd.serve_app.cli.program import app\n"
        "from epd.serve_app.cli import early_checks\nearly_checks.is_terminal = lambda: True\n"
        "codes = [CliRunner().invoke(app, words).exit_code for words in json.load(open(sys.argv[1]))]\n"
        "print(json.dumps([codes, sorted({'torch', 'transformers', 'ray'} & sys.modules.keys())]))"
    )
    rows = folder / "rows.json"
    rows.write_text(json.dumps([words_of(typed) for typed, _ in ROWS]))
    done = subprocess.run(
        [sys.executable, "-c", program, str(rows)], cwd=folder, capture_output=True, timeout=800, check=True
    )
    assert json.loads(done.stdout) == [[2] * len(ROWS), []]


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("name", ["", *_COMMANDS, "config show"])
def test_help_is_shown_by_both_flags_and_by_the_word(name: str, flag: str) -> None:
    shown = run(f"{name} {flag}")
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert shown.stdout.startswith(f"Usage: epd {name}".rstrip())
    assert "\x1b" not in shown.stdout
    assert run(f"help {name}").stdout == shown.stdout


@pytest.mark.parametrize("name", [*_COMMANDS, "config show", "cache ls", "keys new"])
def test_help_names_values_as_people_do(name: str) -> None:
    """In usage, what may be left out stands in one pair of brackets."""
    shown = run(f"{name} --help", COLUMNS="200").stdout
    assert re.findall(r"<[a-zA-Z\[\] ]+>", shown) == []
    usage = shown.partition("\n")[0]
    assert not re.search(r"\[\[|\]\.\.\.|[{}]", usage.removesuffix(" COMMAND [ARGS]...")), usage


def test_the_version_is_said() -> None:
    assert run("--version").stdout == f"epd {__version__}\n"


def test_the_help_of_ask_begins_with_examples_and_keeps_research_apart() -> None:
    shown = run("ask --help", COLUMNS="100").stdout
    assert '  epd ask clip.mp4 "What happens?"\n' in shown
    titles = re.findall(r"^(\S.*):$", shown, re.MULTILINE)
    assert titles == [
        "Arguments",
        "Options",
        "Fewer visual tokens",
        "Size of pictures",
        "How the model runs",
        "Research: less work for a picture",
    ]
    everyday, _, rest = shown.partition("Fewer visual tokens:")
    assert "--model " in everyday
    assert "--skip-static" in rest.partition("Research: ")[2]


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("1:30", 90), ("01:30.5", 90.5), ("1:00:01", 3601), ("0.25", 0.25)]
)
def test_times_are_written_as_people_do(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


def test_a_port_in_use_is_said_before_the_model_is_looked_at() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        shown = run(f"serve --local --port {port}")
    said = f"error: cannot listen on 127.0.0.1:{port}: Address already in use; give another --port"
    assert (shown.exit_code, shown.stderr.startswith(said)) == (2, True), shown.stderr


def test_epd_url_names_the_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    shown = run("ask clip.mp4 What", EPD_URL="http://127.0.0.1:9")
    assert (shown.exit_code, shown.stderr.startswith("error: http://127.0.0.1:9/v1/models gave Conn")) == (
        2,
        True,
    )


def test_an_answer_follows_a_schema_and_keeps_to_its_options(folder: Path) -> None:
    from tests.media import write_image

    schema = folder / "schema.json"
    schema.write_text(json.dumps({"type": "string", "enum": ["a red one", "a blue one"]}))
    words = ["ask", str(write_image(folder / "one.png")), "What is shown?", "--schema", str(schema)]
    shown = CliRunner().invoke(app, [*words, "--system", "Be brief.", "--temperature", "1", "--seed", "3"])
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout) in ("a red one", "a blue one")


class Noted(Conversation):
    """Notes the bodies of requests."""

    def _events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self.body = body
        yield {"choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}]}


def test_the_system_message_stands_before_the_media_and_all_turns() -> None:
    medium = Medium("video", "https://a.org/clip.mp4")
    talk = Noted(Endpoint("here", "http://127.0.0.1:9"), "m", [medium], {"seed": 3})
    talk.instruct("Be brief.")
    talk.ask("What?")
    talk.ask("And then?")
    parts = [{"type": "video_url", "video_url": {"url": medium.name}}, {"type": "text", "text": "What?"}]
    assert talk.body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "And then?"},
    ]
    assert talk.body["seed"] == 3


@pytest.mark.parametrize("typed", ["ask nothing.mp4 What", "aks", "--version", "ask clip.mp4 What --frmes 1"])
def test_a_process_says_the_same(typed: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    command = [sys.executable, "-m", "epd", *words_of(typed)]
    variables = {**os.environ, "NO_COLOR": "1", "COLUMNS": "60", "EPD_URL": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=variables, check=False)
    same = run(typed)
    assert (done.returncode, done.stdout, done.stderr) == (same.exit_code, same.stdout, same.stderr)


@pytest.mark.parametrize(
    "order", [(CLIP, "Which shape appears first?"), ("Which shape appears first?", CLIP)]
)
def test_an_answer_stands_alone_and_the_question_may_come_first(order: tuple[str, str], folder: Path) -> None:
    """By a pipe, a file:// URL or a name; into a file where one is named."""
    from tests.media import write_video

    clip = write_video(folder / "asked.mp4")
    words = [str(clip) if word == CLIP else word for word in order]
    shown = CliRunner().invoke(app, ["ask", *words])
    assert shown.exit_code == 0, shown.output
    assert [line.partition(" ")[0] for line in shown.stderr.splitlines()] == ["note:"]
    by_url = [clip.as_uri() if word == str(clip) else word for word in words]
    out = folder / "answer.txt"
    silent = CliRunner().invoke(app, ["ask", *by_url, "-o", str(out)])
    assert (silent.exit_code, silent.stdout, out.read_text()) == (0, "", shown.stdout)
    piped = CliRunner().invoke(app, ["ask", "-", order[order[0] == CLIP]], input=clip.read_bytes())
    assert (piped.exit_code, piped.stdout) == (0, shown.stdout)
