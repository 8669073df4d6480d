"""`epd batch` as its users meet it: the program in a process of its own, the embedded model, real H.264.

    python -m benchmarks.serving.batch [--quick] [--section videos|app|killed|hour]

videos: ten questions about each of twenty 60 s videos in random order: `epd batch`, then a sample of them one
by one in a process, and fewer one by one through `epd ask`; their times are scaled to all.
app: the same against the HTTP app in random order with eight in flight, and `epd batch --url` against that
app, on copies of the videos that it does not know. Answers are compared line by line.
killed: 1,000 lines, 5 % of them bad, killed with SIGKILL three times, then run to the end.
hour: one video of an hour, 5, 50 and 500 questions: peak memory.
Results go to benchmarks/results/batch.{json,md}. Videos are kept in the temporary folder.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

# Before torch is imported: its threads read it then, and those that wait by spinning would slow all others.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import json
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.reporting import Row, Section, run_sections, setting
from epd.batch.lines import LineDefaults, parse_line
from epd.batch.result_files import errors_path
from epd.models import embedded_model_path
from epd.shapes import Question, make_questions, make_scene
from epd.video.demo_video import write_demo_video
from tests.colocated import ColocatedPipeline

EPD = Path(sys.executable).with_name("epd")
CACHE = Path(tempfile.gettempdir()) / "epd-bench-batch"
Answers = dict[Any, str]


@dataclass(frozen=True, slots=True)
class Clip:
    """A video of the shapes world and questions about it."""

    path: Path
    questions: tuple[Question, ...]


def clip(seed: int, seconds: float, num_questions: int, fps: int = 24) -> Clip:
    path = CACHE / f"clip-{seconds:.0f}s-{seed}.mp4"
    scene = make_scene(seed, seconds)
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".draft.mp4")
        write_demo_video(draft, scene, fps=fps, height=360, width=640)
        draft.rename(path)
    rng = random.Random(seed)
    questions: list[Question] = []
    while len(questions) < num_questions:
        questions += make_questions(scene, rng, num_per_kind=2)
    return Clip(path, tuple(questions[:num_questions]))


def lines_of(clips: Sequence[Clip]) -> list[Row]:
    """Lines of the short form, in random order."""
    lines = [
        {"id": f"{each.path.stem} {number}", "video": str(each.path), "question": q.text, "answer": q.answer}
        for each in clips
        for number, q in enumerate(each.questions)
    ]
    random.Random(0).shuffle(lines)
    return lines


@dataclass(frozen=True, slots=True)
class BatchRun:
    """seconds, cpu_s: of the whole command, on the wall and of processors."""

    seconds: float
    cpu_s: float
    summary: Row
    answers: Answers


def run_batch(folder: Path, lines: Sequence[Row], *options: str) -> BatchRun:
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = folder / "out.jsonl"
    start = time.perf_counter()
    before = os.times()
    done = subprocess.run(
        [str(EPD), "batch", str(folder / "in.jsonl"), str(out), "--json", *options],
        check=True,
        capture_output=True,
        text=True,
    )
    return BatchRun(
        time.perf_counter() - start, _children_s(before), json.loads(done.stdout), answers_in(out)
    )


def answers_in(out: Path) -> Answers:
    records = [json.loads(line) for line in out.read_text().splitlines()]
    return {record["id"]: record["answer"] for record in records}


@contextmanager
def new_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="epd-bench-") as name:
        yield Path(name)


def videos_rows(num_videos: int, seconds: float, num_looped: int, num_asks: int) -> list[Row]:
    lines = lines_of([clip(100 + number, seconds, 10) for number in range(num_videos)])
    with new_folder() as folder:
        batch = run_batch(folder, lines)
    print(batch.summary, file=sys.stderr)
    rows = [
        {"how": "epd batch", **_row(batch.seconds, batch.answers, batch.answers), **_work(batch)},
        {"how": "one by one, one process", **_compared(in_one_process(lines[:num_looped]), batch)},
        {"how": "one by one, epd ask", **_compared(asked_alone(lines[:num_asks]), batch)},
    ]
    return _filled(rows)


@dataclass(frozen=True, slots=True)
class Sample:
    """Some lines asked in another way: seconds on the wall and of processors, and what was answered."""

    seconds: float
    cpu_s: float
    answers: Answers


def _compared(sample: Sample, batch: BatchRun) -> Row:
    """Scaled to all lines; `epd batch` counts with its start."""
    scale = len(batch.answers) / len(sample.answers)
    return {
        **_row(sample.seconds * scale, sample.answers, batch.answers),
        "over_epd_batch": round(sample.seconds * scale / batch.seconds, 2),
        "cpu_s": round(sample.cpu_s * scale, 1),
        "cpu_over_epd_batch": round(sample.cpu_s * scale / batch.cpu_s, 2),
    }


def _row(seconds: float, answers: Answers, truth: Answers) -> Row:
    num_equal = sum(truth[line_id] == answer for line_id, answer in answers.items())
    return {"wall_s": round(seconds, 1), "equal": f"{num_equal}/{len(answers)}"}


def _work(batch: BatchRun) -> Row:
    summary = batch.summary
    shares = summary["utilisation"]
    return {
        "wall_without_start_s": summary["wall_s"],
        "encoded": summary["num_encoded"],
        "right": summary["num_right"],
        "lines at work": ", ".join(f"{name} {number:.2f}" for name, number in shares.items()),
        "cpu_s": round(batch.cpu_s, 1),
        "peak_mb": summary["peak_bytes"] >> 20,
    }


def _filled(rows: list[Row]) -> list[Row]:
    """All rows with the same columns."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return [{name: row.get(name, "") for name in names} for row in rows]


def in_one_process(lines: Sequence[Row]) -> Sample:
    """The model is loaded before the clocks start."""
    pipeline = ColocatedPipeline.load(embedded_model_path())
    start, start_cpu = time.perf_counter(), time.process_time()
    answers = {line["id"]: pipeline.ask([line["video"]], line["question"]).text for line in lines}
    return Sample(time.perf_counter() - start, time.process_time() - start_cpu, answers)


def asked_alone(lines: Sequence[Row]) -> Sample:
    start, before = time.perf_counter(), os.times()
    answers = {}
    for line in lines:
        command = [str(EPD), "ask", line["video"], line["question"]]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        answers[line["id"]] = done.stdout.strip()
    return Sample(time.perf_counter() - start, _children_s(before), answers)


def _children_s(before: os.times_result) -> float:
    """Seconds of processors that child processes have taken since."""
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def app_rows(num_videos: int, seconds: float) -> list[Row]:
    lines = lines_of([clip(100 + number, seconds, 10) for number in range(num_videos)])
    with new_folder() as folder:
        local = run_batch(folder, lines)
    with serving() as url:
        seconds, answers = in_random_order(url, lines)
        copies = [{**line, "video": str(copied(Path(line["video"])))} for line in lines]
        with new_folder() as folder:
            batch = run_batch(folder, copies, "--url", url)
    for path in {line["video"] for line in copies}:
        Path(path).unlink()
    rows = [
        {
            "how": "epd batch",
            **_row(local.seconds, local.answers, local.answers),
            "wall_without_start_s": local.summary["wall_s"],
            "encoded": local.summary["num_encoded"],
        },
        {"how": "app (1epd), random order, 8 in flight", **_row(seconds, answers, local.answers)},
        {
            "how": "epd batch --url, the same app",
            **_row(batch.seconds, batch.answers, local.answers),
            "wall_without_start_s": batch.summary["wall_s"],
            "encoded": batch.summary["num_encoded"],
        },
    ]
    return _filled(rows)


def copied(path: Path) -> Path:
    """The same frames under another content hash: an MP4 box that readers skip follows them."""
    copy = path.with_name(f"{path.stem}-copy.mp4")
    if not copy.exists():
        shutil.copy(path, copy)
        with copy.open("ab") as file:
            file.write((12).to_bytes(4, "big") + b"free" + b"copy")
    return copy


@contextmanager
def serving() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    options = ["--topology", "1epd", "--port", port, "--allowed-media-path", str(CACHE)]
    command = [str(EPD), "serve", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            next(line for line in process.stdout if line.startswith("ready"))
            yield f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def in_random_order(url: str, lines: Sequence[Row]) -> tuple[float, Answers]:
    defaults = LineDefaults(CACHE)

    def ask(line: Row) -> tuple[Any, str]:
        body = parse_line(json.dumps(line).encode(), 1, defaults).body
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=600, trust_env=False)
        answer.raise_for_status()
        return line["id"], answer.json()["choices"][0]["message"]["content"]

    start = time.perf_counter()
    with ThreadPoolExecutor(8) as threads:
        answers = dict(threads.map(ask, lines))
    return time.perf_counter() - start, answers


def killed_rows(num_lines: int) -> list[Row]:
    clips = [clip(200 + number, 20.0, num_lines // 10) for number in range(10)]
    lines = lines_of(clips)
    bad = random.Random(1).sample(range(num_lines), num_lines // 20)
    texts = [_spoilt(line, number, bad) for number, line in enumerate(lines)]
    with new_folder() as folder:
        source, out = folder / "in.jsonl", folder / "out.jsonl"
        source.write_text("\n".join(texts) + "\n")
        killed_at = [_killed(source, out, num_lines * (kill + 1) // 4) for kill in range(3)]
        subprocess.run(
            [str(EPD), "batch", str(source), str(out), "--allow-failures"], check=True, capture_output=True
        )
        answered = [json.loads(line) for line in out.read_text().splitlines()]
        failed = [json.loads(line) for line in errors_path(out).read_text().splitlines()]
    ids = [record["id"] for record in answered] + [record["id"] or record["line"] for record in failed]
    wanted = [line["id"] for number, line in enumerate(lines) if number not in bad]
    wanted += [number + 1 if number % 3 == 0 else lines[number]["id"] for number in bad]
    return [
        {
            "lines": num_lines,
            "bad": len(bad),
            "killed_after_lines": ", ".join(map(str, killed_at)),
            "answered": len(answered),
            "explained": len(failed),
            "missing": len(set(wanted) - set(ids)),
            "twice": sum(count > 1 for count in Counter(ids).values()),
            "unasked": len(set(ids) - set(wanted)),
        }
    ]


def _spoilt(line: Row, number: int, bad: Sequence[int]) -> str:
    """The line as text; a bad one is no JSON, or about a video that is not there, or asks nothing."""
    if number not in bad:
        return json.dumps(line)
    spoilt = {**line, "video": f"{line['video']}.gone"} if number % 3 == 1 else {**line, "question": ""}
    return json.dumps(line)[:-3] if number % 3 == 0 else json.dumps(spoilt)


def _killed(source: Path, out: Path, num_lines: int) -> int:
    """Runs until so many lines are there; returns how many are when it has been killed."""
    process = subprocess.Popen([str(EPD), "batch", str(source), str(out)], stdout=subprocess.DEVNULL)
    while _num_written(out) < num_lines and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return _num_written(out)


def _num_written(out: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in (out, errors_path(out)) if path.exists())


def hour_rows(seconds: float) -> list[Row]:
    rows = []
    for num_questions in (5, 50, 500, 5, 50, 500):
        with new_folder() as folder:
            batch = run_batch(folder, lines_of([clip(300, seconds, num_questions, fps=5)]))
        work = _work(batch)
        del work["lines at work"]  # from the first answer on, when nothing is left to decode
        rows.append({"seconds_of_video": seconds, "questions": num_questions, **work})
        print(rows[-1], file=sys.stderr)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="little of everything; writes nothing")
    parser.add_argument("--section", action="append", help="videos, app, killed or hour; may be repeated")
    options = parser.parse_args()
    quick = options.quick
    sections = {
        "videos": Section(
            "Ten questions about each video (aim: equal answers, a quarter of one by one, each video once)",
            lambda: videos_rows(*((2, 10.0, 5, 1) if quick else (20, 60.0, 40, 4))),
        ),
        "app": Section(
            "The same against the app (aim: equal answers)",
            lambda: app_rows(*((2, 10.0) if quick else (20, 60.0))),
        ),
        "killed": Section(
            "Killed with SIGKILL three times (aim: nothing missing, nothing twice)",
            lambda: killed_rows(100 if quick else 1000),
        ),
        "hour": Section(
            "One long video (aim: memory that does not grow with the questions)",
            lambda: hour_rows(60.0 if quick else 3600.0),
        ),
    }
    run_sections(
        "batch",
        "Batches",
        sections,
        options.section or list(sections),
        lambda: setting(("torch", "transformers", "ray"), checkpoint="shapes-vl, float32"),
        save=not quick,
    )


if __name__ == "__main__":
    main()
