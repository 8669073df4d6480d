"""`epd ask` as a user meets it: streams, tables, JSON, and one line for whatever goes wrong."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from epd.encoders import ADAPTERS
from epd.engine_config import EngineConfig
from epd.serve_app.cli.ask import cost_line
from epd.serve_app.cli.program import app
from epd.stages.engine.engine import LanguageEngine
from epd.stages.engine.setup import build_engine
from epd.types import Answer, StageTimings, Usage
from tests.media import write_audio_only, write_image, write_video
from tests.serve_app.cli.conftest import Dropped

QUESTION = "What is shown?"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def missing(folder: Path) -> Path:
    return folder / "nothing.mp4"


def empty(folder: Path) -> Path:
    (folder / "empty.mp4").touch()
    return folder / "empty.mp4"


def text_named_mp4(folder: Path) -> Path:
    (folder / "notes.mp4").write_text("these are the minutes of the meeting\n" * 50, encoding="utf-8")
    return folder / "notes.mp4"


def truncated_without_a_frame(folder: Path) -> Path:
    """The first bytes of a real video, its index lost with the rest."""
    whole = write_video(folder / "whole.mp4").read_bytes()
    (folder / "cut.mp4").write_bytes(whole[:100])
    return folder / "cut.mp4"


def header_without_a_frame(folder: Path) -> Path:
    """An index that promises frames, and none of their bytes: every packet is past the end of the file."""
    import av

    whole = write_video(folder / "whole.mp4")
    faststart = folder / "faststart.mp4"
    with (
        av.open(str(whole)) as source,
        av.open(str(faststart), "w", format="mp4", options={"movflags": "+faststart"}) as target,
    ):
        stream = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(source.streams.video[0]):
            if packet.dts is not None:
                packet.stream = stream
                target.mux(packet)
    data = faststart.read_bytes()
    (folder / "promise.mp4").write_bytes(data[: data.index(b"mdat") + 4])
    return folder / "promise.mp4"


def audio_only(folder: Path) -> Path:
    return write_audio_only(folder / "song.mp4")


def needle(folder: Path) -> Path:
    """An image that no vision tower here takes."""
    return write_image(folder / "needle.png", height=3, width=900)


BAD_FILES: tuple[Callable[[Path], Path], ...] = (
    missing,
    empty,
    text_named_mp4,
    truncated_without_a_frame,
    header_without_a_frame,
    audio_only,
    needle,
)


def assert_one_clear_line(result: Result, *words: str) -> None:
    """`serve` says what it starts before it looks at the machine."""
    *steps, line = result.stderr.splitlines()
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert [step for step in steps if " INFO epd.serve_app." not in step] == []
    assert line.startswith("error: ")
    for word in words:
        assert word in line


@pytest.mark.parametrize("make", BAD_FILES, ids=lambda make: make.__name__)
def test_a_bad_file_gives_one_line_that_names_it(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    path = make(tmp_path)
    assert_one_clear_line(run("ask", path, QUESTION), path.name)


def test_a_video_that_tells_no_length_gives_one_line(
    media: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = SimpleNamespace(num_frames=0, fps=0.0, height=90, width=160)
    monkeypatch.setattr(sys.modules["epd.video.containers.look"], "probe_open", lambda *_, **__: silent)
    assert_one_clear_line(run("ask", media["video"], QUESTION), media["video"].name, "length")


@pytest.mark.parametrize("question", ["", "   \n"])
def test_an_empty_question_gives_one_line(media: dict[str, Path], question: str) -> None:
    assert_one_clear_line(run("ask", media["image"], question), "question is empty")


def test_an_unknown_model_path_gives_one_line(media: dict[str, Path], tmp_path: Path) -> None:
    model = tmp_path / "nowhere"
    assert_one_clear_line(run("ask", media["image"], QUESTION, "--model", model), str(model), "config.json")


def test_a_folder_without_a_model_gives_one_line(media: dict[str, Path], tmp_path: Path) -> None:
    assert_one_clear_line(run("ask", media["image"], QUESTION, "--model", tmp_path), "config.json")


def test_a_broken_model_config_gives_one_line(
    media: dict[str, Path], tmp_path: Path, checkpoints: dict[str, Path]
) -> None:
    model = shutil.copytree(checkpoints["qwen2_5_vl"], tmp_path / "model")
    (model / "config.json").write_text("{", encoding="utf-8")
    assert_one_clear_line(run("ask", media["image"], QUESTION, "--model", model), "config.json")


def test_a_model_without_weights_gives_one_line(
    media: dict[str, Path], tmp_path: Path, checkpoints: dict[str, Path]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(checkpoints["qwen2_5_vl"], model, ignore=shutil.ignore_patterns("*.safetensors"))
    assert_one_clear_line(run("ask", media["image"], QUESTION, "--model", model), str(model))


def test_damaged_weights_give_one_line(
    media: dict[str, Path], tmp_path: Path, checkpoints: dict[str, Path]
) -> None:
    model = shutil.copytree(checkpoints["qwen2_5_vl"], tmp_path / "model")
    os.truncate(model / "model.safetensors", 5000)
    assert_one_clear_line(run("ask", media["image"], QUESTION, "--model", model), str(model), "is cut off")


def test_weights_that_lack_a_tensor_give_one_line(
    media: dict[str, Path], tmp_path: Path, checkpoints: dict[str, Path]
) -> None:
    """transformers would make one up, and warn."""
    model = shutil.copytree(checkpoints["qwen2_5_vl"], tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    assert_one_clear_line(
        run("ask", media["image"], QUESTION, "--model", model), "1 tensors", "lm_head.weight"
    )


@pytest.mark.parametrize("is_eager", [True, False])
def test_passes_are_captured_unless_it_is_told_not_to(
    media: dict[str, Path], monkeypatch: pytest.MonkeyPatch, is_eager: bool
) -> None:
    told: list[bool] = []

    def build(*args: Any, options: EngineConfig, **more: Any) -> LanguageEngine:
        told.append(options.enforce_eager)
        return build_engine(*args, options=options, **more)

    monkeypatch.setattr("epd.serve_app.worker.worker_stages.build_engine", build)
    options = ["--enforce-eager"] if is_eager else []
    assert run("ask", media["image"], QUESTION, *options).exit_code == 0
    assert told == [is_eager]


def test_an_unsupported_model_type_lists_the_supported(
    media: dict[str, Path], tmp_path: Path, checkpoints: dict[str, Path]
) -> None:
    model = shutil.copytree(checkpoints["qwen2_5_vl"], tmp_path / "model")
    (model / "config.json").write_text('{"model_type": "bert"}', encoding="utf-8")
    assert_one_clear_line(run("ask", media["image"], QUESTION, "--model", model), "'bert'", *ADAPTERS)


@pytest.mark.parametrize(
    "options",
    [
        ("--fps", "0"),
        ("--frames", "0"),
        ("--fps", "1", "--frames", "4"),
        ("--max-tokens", "0"),
        ("--retention", "0.01"),
        ("--skip-static", "-1"),
        ("--tower-share", "0.1"),
        ("--tensor-parallel-size", "4"),
        ("--tower-merge-layer", "2"),
        ("--tower-merge-layer", "4", "--tower-share", "0.5"),
        ("--start", "9.5"),
        ("--start", "2.25", "--end", "1"),
        ("--reduction", "magic"),
        ("--device", "gpu"),
        ("--dtype", "int8"),
    ],
)
def test_an_option_that_makes_no_sense_gives_one_line(
    media: dict[str, Path], options: tuple[str, ...]
) -> None:
    assert_one_clear_line(run("ask", media["video"], QUESTION, *options), options[1])


@pytest.mark.parametrize("arguments", [("chat", "{video}"), ("eval", "--demo", "1")])
def test_ranks_among_which_heads_cannot_be_shared_give_one_line(
    media: dict[str, Path], arguments: tuple[str, ...]
) -> None:
    given = [str(media["video"]) if each == "{video}" else each for each in arguments]
    assert_one_clear_line(run(*given, "--tensor-parallel-size", "3"), "which has 4 heads and 2 of keys")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize(
    "arguments", [("ask", "{video}", QUESTION), ("eval", "--demo", "1"), ("profile",), ("serve", "--local")]
)
def test_a_gpu_that_is_not_there_gives_one_line(media: dict[str, Path], arguments: tuple[str, ...]) -> None:
    given = [str(media["video"]) if each == "{video}" else each for each in arguments]
    assert_one_clear_line(run(*given, "--device", "cuda"), "the device 'cuda'; allowed here: cpu")


@pytest.mark.parametrize(
    "arguments", [("ask",), ("ask", "one.mp4"), ("ask", "a.mp4", "b", "--nope"), ("nope",)]
)
def test_wrong_usage_exits_2_and_says_how(arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


def test_answer_on_stdout_and_table_on_stderr(media: dict[str, Path], checkpoints: dict[str, Path]) -> None:
    options = ("--model", checkpoints["qwen2_5_vl"], "--frames", "4", "--max-tokens", "6")
    result = run("ask", media["video"], media["image"], QUESTION, *options, "-v")
    record = json.loads(run("ask", media["video"], media["image"], QUESTION, *options, "--json").stdout)

    assert result.exit_code == 0, result.output
    assert result.stdout == record["answer"] + "\n"
    for word in ("probe", "decode video", "preprocess", "encode", "prefill", "decode", "total", "seconds"):
        assert word in result.stderr
    usage = record["usage"]
    assert f"{usage['num_frames']} frames, {usage['visual_tokens']} visual tokens" in result.stderr
    assert f"{usage['prompt_tokens']} prompt tokens, 6 completion tokens" in result.stderr


def test_a_kept_share_of_the_visual_tokens_is_told(
    media: dict[str, Path], checkpoints: dict[str, Path]
) -> None:
    options = ("--model", checkpoints["qwen2_5_vl"], "--max-tokens", "2", "--retention", "0.5")
    result = run("ask", media["video"], QUESTION, *options, "--reduction", "evs", "-v")
    usage = json.loads(run("ask", media["video"], QUESTION, *options, "--json").stdout)["usage"]
    assert usage["visual_tokens"] == round(usage["visual_tokens_before"] / 2)
    assert f"{usage['visual_tokens']} of {usage['visual_tokens_before']} visual tokens" in result.stderr


def test_mustdrop_drops_in_the_tower_at_prefill_and_at_decode(
    media: dict[str, Path], checkpoints: dict[str, Path], dropped: Dropped
) -> None:
    """By its name alone. Of 32 visual tokens 24 are cached, and 8 read by later layers and in decode."""
    options = ("--model", checkpoints["qwen2_5_vl"], "--max-tokens", "3", "--reduction", "mustdrop", "--json")
    usage = json.loads(run("ask", media["video"], QUESTION, *options, "--retention", "0.25").stdout)["usage"]
    assert (usage["visual_tokens"], usage["visual_tokens_before"]) == (24, 32)
    assert dropped.tower == {(8, 6)}
    assert dropped.read == [(24, 8, 8)]
    assert set(dropped.held) == {(usage["prompt_tokens"], usage["prompt_tokens"] - 16)}


def test_only_a_part_is_looked_at(media: dict[str, Path], checkpoints: dict[str, Path]) -> None:
    """One second of 4 at 10 frames a second, and every frame of it."""
    options = ("--model", checkpoints["qwen2_5_vl"], "--fps", "10", "--max-tokens", "2", "--json")
    part = json.loads(run("ask", media["video"], QUESTION, *options, "--start", "1", "--end", "2").stdout)
    whole = json.loads(run("ask", media["video"], QUESTION, *options).stdout)
    assert (part["usage"]["num_frames"], whole["usage"]["num_frames"]) == (10, 40)


def test_units_that_do_not_change_are_told(still_video: Path, checkpoints: dict[str, Path]) -> None:
    options = ("--model", checkpoints["qwen2_5_vl"], "--frames", "20", "--max-tokens", "6")
    plain = run("ask", still_video, QUESTION, *options, "-v")
    result = run("ask", still_video, QUESTION, *options, "--skip-static", "0", "-v")
    record = json.loads(run("ask", still_video, QUESTION, *options, "--skip-static", "0", "--json").stdout)
    assert result.stdout == plain.stdout == record["answer"] + "\n"
    assert record["num_units_skipped"] == 6
    assert "; 6 units of frames did not change\n" in result.stderr
    assert "did not change" not in plain.stderr


def test_merging_in_the_tower_leaves_the_prompt_as_it_is(
    media: dict[str, Path], checkpoints: dict[str, Path]
) -> None:
    options = ("--model", checkpoints["qwen2_5_vl"], "--frames", "4", "--max-tokens", "12", "--json")
    whole, merged = (
        json.loads(run("ask", media["video"], QUESTION, *options, *more).stdout)
        for more in ((), ("--tower-share", "0.3", "--tower-merge-layer", "1"))
    )
    assert merged["usage"]["visual_tokens"] == whole["usage"]["visual_tokens"]
    assert merged["answer"] != whole["answer"]


def test_frames_that_could_not_be_decoded_are_reported(
    damaged_video: Path, media: dict[str, Path], checkpoints: dict[str, Path]
) -> None:
    options = ("--model", checkpoints["qwen2_5_vl"], "--frames", "8", "--max-tokens", "2")
    result = run("ask", damaged_video, QUESTION, *options)
    assert result.stderr == "note: 1 of 8 frames could not be decoded and shows a neighbour\n"
    record = json.loads(run("ask", damaged_video, QUESTION, *options, "--json").stdout)
    assert record["usage"]["num_substituted_frames"] == 1
    whole = json.loads(run("ask", media["video"], QUESTION, *options, "--json").stdout)
    assert whole["usage"]["num_substituted_frames"] == 0
    assert "could not be decoded" not in run("ask", media["video"], QUESTION, *options).stderr


def test_json_is_one_object_with_the_promised_fields(
    media: dict[str, Path], checkpoints: dict[str, Path]
) -> None:
    result = run(
        "ask", media["image"], QUESTION, "--model", checkpoints["qwen3_vl"], "--max-tokens", "4", "--json"
    )
    record = json.loads(result.stdout)

    assert result.stderr == ""
    assert set(record) == {"answer", "ttft_s", "timings", "usage"}
    assert set(record["timings"]) == {field.name for field in StageTimings.__dataclass_fields__.values()}
    assert 0 < record["ttft_s"] < record["timings"]["total_s"]
    assert record["usage"]["completion_tokens"] == 4


def program(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "epd", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_the_real_program_prints_one_line_and_no_traceback(tmp_path: Path) -> None:
    done = program("ask", text_named_mp4(tmp_path), QUESTION)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "notes.mp4" in done.stderr


def read_all(terminal: int) -> bytes:
    """What is written to a terminal until its other end is closed."""
    pieces = []
    with suppress(OSError):  # the end of a terminal is an error
        while piece := os.read(terminal, 4096):
            pieces.append(piece)
    os.close(terminal)
    return b"".join(pieces)


def test_progress_is_drawn_on_a_terminal_and_nowhere_else(media: dict[str, Path]) -> None:
    """With the embedded model, which starts without transformers."""
    arguments = ("ask", str(media["video"]), QUESTION, "--frames", "8")
    terminal, stderr = pty.openpty()
    command = [sys.executable, "-m", "epd", *arguments, "--max-tokens", "3"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr)
    os.close(stderr)
    drawn = read_all(terminal)
    stdout, _ = process.communicate(timeout=200)

    assert process.returncode == 0
    assert b"loading the model" in drawn
    assert b"frames" in drawn
    assert b"8/8" in drawn
    assert b"\x1b" not in stdout
    assert "\x1b" not in run(*arguments, "--max-tokens", "3").output


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "av")
    imported = "import sys, epd.serve_app.cli.program as _"
    probe = f"{imported}; sys.exit(any(name in sys.modules for name in {heavy}))"
    assert subprocess.run([sys.executable, "-c", probe], timeout=200, check=False).returncode == 0
    before = os.times()
    done = program("ask", "--help")
    after = os.times()
    assert done.returncode == 0
    for word in ("PATH", "QUESTION", "--model", "--fps", "--frames", "--max-tokens", "--json"):
        assert word in done.stdout
    cpu_s = sum(after[2:4]) - sum(before[2:4])  # of children: the machine may be busy
    assert cpu_s < 5, "an order of magnitude above what it takes"


def test_the_last_line_says_what_was_not_seen_of_animated_pictures() -> None:
    timings = StageTimings()
    seen, some = (
        Answer("", (), "stop", 0.5, timings, Usage(1, 4, 9, 1, num_unseen_frames=n)) for n in (0, 23)
    )
    assert "; 23 more frames were not looked at: send animated pictures as videos" in cost_line(some)
    assert "animated" not in cost_line(seen)


def test_a_url_of_this_machine_is_what_the_user_means(media: dict[str, Path]) -> None:
    """Servers refuse private addresses, since others name them. A camera of one's own is none."""
    folder = partial(SimpleHTTPRequestHandler, directory=media["image"].parent)
    with ThreadingHTTPServer(("127.0.0.1", 0), folder) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            url = f"http://127.0.0.1:{server.server_port}/{media['image'].name}"
            from_url, from_file = run("ask", url, QUESTION), run("ask", media["image"], QUESTION)
        finally:
            server.shutdown()
    assert (from_url.exit_code, from_url.stdout) == (0, from_file.stdout)


def test_the_embedded_model_says_what_it_knows_after_its_answer(media: dict[str, Path]) -> None:
    knows = "the shapes that `epd demo` draws, and nothing else"
    note = f"note: shapes-vl-2 knows {knows}; for real pictures: --model Qwen/"
    shown = run("ask", media["image"], QUESTION)
    assert (shown.exit_code, shown.stderr.splitlines()[-1].startswith(note)) == (0, True)
    assert "note" not in shown.stdout
