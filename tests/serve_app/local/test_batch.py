"""Batches in one process: answers equal those of the plain loop, media are worked on once."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from epd.batch.driver import BatchPlan, run_batch
from epd.batch.in_flight import OWN_REQUESTS
from epd.batch.line_index import LineIndex
from epd.batch.lines import LineDefaults
from epd.batch.summary import Summary
from epd.batch.tasks import Backend, MediaTask
from epd.control.admission import AdmissionQueue
from epd.encoders import MediaPlan
from epd.encoders.groups import FrameEncoder
from epd.engine_config import EngineConfig
from epd.reduction import ReductionPolicy
from epd.serve_app.app_args import AppArgs
from epd.serve_app.cli.own_model import open_model
from epd.serve_app.local.own_batch import OwnBackend
from epd.serve_app.local.own_service import OwnService
from epd.serve_app.orchestration.live_answer import LiveAnswer
from epd.serve_app.orchestration.placement import RequestPlacer
from epd.serve_app.orchestration.requests import Attempt
from epd.stages.engine.sequence import TokenSequence
from tests.colocated import ColocatedPipeline
from tests.media import write_image, write_video
from tests.serve_app.server import wait_until

QUESTIONS = ("What is shown?", "Which colour?", "How many squares are there, and where do they go?")
MAX_TOKENS = 6


def run(folder: Path, backend: OwnBackend, records: list[dict[str, Any]], **defaults: Any) -> Summary:
    (folder / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))

    @contextmanager
    def opened(_: LineIndex) -> Iterator[Backend]:
        yield backend

    plan = BatchPlan(folder / "in.jsonl", folder / "out.jsonl", LineDefaults(folder, **defaults))
    return run_batch(plan, opened)


def read(path: Path) -> dict[Any, dict[str, Any]]:
    """Records by the id of their line."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return {record.get("custom_id", record["id"]): record for record in records}


def test_answers_equal_those_of_one_by_one_and_media_are_worked_on_once(
    tmp_path: Path,
    media: dict[str, Path],
    backend: OwnBackend,
    service: OwnService,
    colocated: ColocatedPipeline,
) -> None:
    names = (["video"], ["tall_video"], ["image", "wide_image"], ["image"])
    lines, asked = [], {}
    for question in QUESTIONS:
        for paths in [[media[name] for name in each] for each in names]:
            line_id = f"{question} {len(asked)}"
            asked[line_id] = (paths, question)
            about = (
                {"video": str(paths[0])} if paths[0].suffix == ".mp4" else {"images": list(map(str, paths))}
            )
            lines.append({"id": line_id, "question": question, **about})
    summary = run(tmp_path, backend, lines, num_frames=6, max_tokens=MAX_TOKENS)
    out = tmp_path / "out.jsonl"
    answers = {line_id: record["answer"] for line_id, record in read(out).items()}
    assert answers == {
        line_id: colocated.ask(paths, question, num_frames=6, max_tokens=MAX_TOKENS).text
        for line_id, (paths, question) in asked.items()
    }
    assert len(set(answers.values())) > 6
    assert summary.num_groups == 4
    assert 3 <= (summary.counts.num_encoded or 0) <= 4  # the image of the last group may be encoded by then
    cached = [record["usage"]["prompt_tokens_details"]["cached_tokens"] for record in read(out).values()]
    assert sum(num > 0 for num in cached) >= len(cached) - summary.num_groups
    assert_nothing_left(service)


def assert_nothing_left(service: OwnService) -> None:
    """Once the workers have reported that requests have ended."""

    def is_idle() -> bool:
        workers = service.status.workers
        return all((each.num_waiting, each.num_running, each.kv_usage or 0) == (0, 0, 0) for each in workers)

    wait_until(is_idle)


def test_what_is_wrong_with_one_medium_or_line_stays_there(
    tmp_path: Path,
    media: dict[str, Path],
    backend: OwnBackend,
    service: OwnService,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "text.mp4").write_text("no video\n" * 99)
    broken = write_video(tmp_path / "broken.mp4", seed=9, width=320)
    patches = FrameEncoder.patches

    def break_one(encoder: FrameEncoder, frames: Any, plan: MediaPlan) -> Any:
        if plan.resized[1] > 3 * plan.resized[0]:
            raise RuntimeError("no memory")
        return patches(encoder, frames, plan)

    monkeypatch.setattr(FrameEncoder, "patches", break_one)
    push = TokenSequence.push

    def break_one_answer(choice: TokenSequence, token: Any) -> Any:
        if choice.request.max_tokens == 2:
            raise ZeroDivisionError("a bug")
        return push(choice, token)

    monkeypatch.setattr(TokenSequence, "push", break_one_answer)
    video = str(media["video"])
    lines = [
        {"id": "good", "video": video, "question": "What?"},
        {"id": "missing", "video": "none.mp4", "question": "What?"},
        {"id": "missing too", "video": "none.mp4", "question": "Which?"},
        {"id": "text", "video": "text.mp4", "question": "What?"},
        {"id": "an image as a video", "video": str(media["image"]), "question": "What?"},
        {"id": "reserved", "video": video, "question": "What is <|video_pad|>?"},
        {"id": "too long", "video": video, "question": "What? " * 2000},
        {"id": "a bug in its pass", "video": video, "question": "What?", "max_tokens": 2},
        {"id": "no number", "video": video, "question": "What?", "max_tokens": "three"},
        {"id": "fps and frames", "video": video, "question": "What?", "fps": 1, "num_frames": 2},
        {"id": "not encoded", "video": str(broken), "question": "What?"},
        {"id": "not encoded too", "video": str(broken), "question": "Which?"},
        {"id": "fine", "video": video, "question": "Which?"},
    ]
    summary = run(tmp_path, backend, lines, max_tokens=3)
    kinds = {line_id: each["error"]["type"] for line_id, each in read(tmp_path / "out.errors.jsonl").items()}
    assert kinds == {
        "missing": "MediaNotFoundError",
        "missing too": "MediaNotFoundError",
        "text": "UnsupportedMediaError",
        "an image as a video": "UnsupportedMediaError",
        "reserved": "RequestError",
        "too long": "RequestBudgetError",
        "a bug in its pass": "InternalError",
        "no number": "RequestError",
        "fps and frames": "RequestError",
        "not encoded": "EncodeError",
        "not encoded too": "EncodeError",
    }
    assert read(tmp_path / "out.jsonl").keys() == {"good", "fine"}
    assert summary.tally.num_failed == 11
    assert_nothing_left(service)


def test_frames_that_could_not_be_decoded_are_in_the_result(
    tmp_path: Path, media: dict[str, Path], damaged_video: Path, backend: OwnBackend
) -> None:
    parts = [
        {"type": "video_url", "video_url": {"url": damaged_video.as_uri()}},
        {"type": "text", "text": "Where?"},
    ]
    body = {"messages": [{"role": "user", "content": parts}], "epd": {"num_frames": 8}, "max_tokens": 3}
    lines = [
        {"id": "damaged", "video": str(damaged_video), "question": "What?"},
        {"id": "damaged too", "video": str(damaged_video), "question": "Which?"},
        {"id": "whole", "video": str(media["video"]), "question": "What?"},
        {"custom_id": "openai", "method": "POST", "url": "/v1/chat/completions", "body": body},
    ]
    run(tmp_path, backend, lines, num_frames=8, max_tokens=3)
    results = read(tmp_path / "out.jsonl")
    assert results["damaged"]["substituted_frames"] == results["damaged too"]["substituted_frames"] == 1
    assert "substituted_frames" not in results["whole"]
    assert results["openai"]["response"]["body"]["epd"]["substituted_frames"] == 1


def test_openai_lines_give_openais_completions(
    tmp_path: Path, media: dict[str, Path], backend: OwnBackend, colocated: ColocatedPipeline
) -> None:
    image = write_image(tmp_path / "own.png", height=96, width=200)  # which no cache has yet
    data = base64.b64encode(image.read_bytes()).decode()
    picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    text = {"type": "text", "text": QUESTIONS[0]}

    def line(name: str, content: Any, **more: Any) -> dict[str, Any]:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": MAX_TOKENS, **more}
        return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}

    lines = [
        line("plain", [picture, text]),
        line("logprobs", [picture, text], logprobs=True, top_logprobs=2),
        line("two", [picture, text], n=2, temperature=0.8, seed=1),
        line("words alone", "Hello?"),
        line("other model", [picture, text], model="gpt"),
        line("tools", [picture, text], tools=[{}]),
    ]
    summary = run(tmp_path, backend, lines)
    answered, failed = read(tmp_path / "out.jsonl"), read(tmp_path / "out.errors.jsonl")
    bodies = {name: record["response"]["body"] for name, record in answered.items()}
    expected = colocated.ask([image], QUESTIONS[0], max_tokens=MAX_TOKENS)
    assert bodies["plain"]["choices"][0]["message"]["content"] == expected.text
    assert bodies["plain"]["usage"]["completion_tokens"] == len(expected.token_ids)
    assert bodies["plain"]["usage"]["prompt_tokens"] == expected.usage.prompt_tokens
    logprobs = bodies["logprobs"]["choices"][0]["logprobs"]["content"]
    assert len(logprobs) == len(expected.token_ids)
    assert len(logprobs[0]["top_logprobs"]) == 2
    assert [choice["index"] for choice in bodies["two"]["choices"]] == [0, 1]
    assert failed["other model"]["response"]["status_code"] == 404
    assert failed["tools"]["error"]["code"] == "RequestError"
    assert summary.counts.num_encoded == 1


def test_the_media_are_prefilled_once_though_the_first_questions_cannot_be_asked(
    tmp_path: Path, media: dict[str, Path], backend: OwnBackend, service: OwnService
) -> None:
    """Whatever is asked about them: what stands before the media belongs to them, not to a question."""
    picture = {"type": "image_url", "image_url": {"url": media["image"].as_uri()}}

    def line(name: str, question: str, system: str = "Be brief.") -> dict[str, Any]:
        parts = [{"type": "text", "text": "Look:"}, picture, {"type": "text", "text": question}]
        messages = [{"role": "system", "content": system}, {"role": "user", "content": parts}]
        body = {"messages": messages, "max_tokens": MAX_TOKENS}
        return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}

    def answers(lines: list[dict[str, Any]], folder: str) -> dict[str, str]:
        (tmp_path / folder).mkdir()
        run(tmp_path / folder, backend, lines)
        records = read(tmp_path / folder / "out.jsonl")
        return {
            name: each["response"]["body"]["choices"][0]["message"]["content"]
            for name, each in records.items()
        }

    good = [line(question, question) for question in QUESTIONS]
    bad = [line("reserved", "What is <|video_pad|>?"), line("too long", "What? " * 2000)]
    num_encoded = service.counters()["encoded_groups"]
    found = answers([*bad, *good], "all")
    assert service.counters()["encoded_groups"] <= num_encoded + 1
    assert found == {
        name: answer for each in good for name, answer in answers([each], each["custom_id"]).items()
    }
    assert answers([line("system", "What?", "Say <|image_pad|>."), *good], "refused") == found
    assert_nothing_left(service)


def test_media_wait_for_room_in_a_small_cache(
    tmp_path: Path, media: dict[str, Path], checkpoints: dict[str, Path], colocated: ColocatedPipeline
) -> None:
    """Room for about one video and an answer: they come one after the other, and none is given up."""
    context = colocated.prefill_media([media["video"]], num_frames=6)
    num_tokens = len(context.prefix_ids) + 100
    config = EngineConfig(num_threads=1, num_kv_tokens=num_tokens)
    videos = [write_video(tmp_path / f"{number}.mp4", seed=number) for number in range(3)]
    lines = [
        {"id": f"{path.name} {question}", "video": str(path), "question": question}
        for question in QUESTIONS
        for path in videos
    ]
    run_again = tmp_path / "again"
    run_again.mkdir()
    with open_model(checkpoints["qwen2_5_vl"], config) as service:
        backend = OwnBackend(service, max_requests=56)
        summary = run(tmp_path, backend, lines, num_frames=6, max_tokens=40)
        assert (summary.tally.num_answered, summary.tally.num_failed) == (9, 0)
        assert_nothing_left(service)
        summary = run(run_again, backend, [{**lines[0], "num_frames": 40}, lines[1]], max_tokens=40)
    assert (summary.tally.num_answered, summary.tally.num_failed) == (1, 1)
    assert "fit" in (run_again / "out.errors.jsonl").read_text()


def test_what_stands_still_is_encoded_once(
    tmp_path: Path, checkpoints: dict[str, Path], still_video: Path, backend: OwnBackend
) -> None:
    """The answers are those of a pipeline that encodes every unit, and the summary tells what was skipped."""
    config = EngineConfig(num_threads=1, num_kv_tokens=8192, skip_static=0.0)
    lines = [{"id": text, "video": str(still_video), "question": text} for text in QUESTIONS]
    answers, summaries = [], []
    with open_model(checkpoints["qwen2_5_vl"], config) as skipping:
        for name, each in (("plain", backend), ("skipping", OwnBackend(skipping, max_requests=56))):
            folder = tmp_path / name
            folder.mkdir()
            summaries.append(run(folder, each, lines, num_frames=20, max_tokens=MAX_TOKENS))
            answers.append({key: record["answer"] for key, record in read(folder / "out.jsonl").items()})
    assert answers[0] == answers[1]
    assert len(set(answers[0].values())) > 1
    assert [each.counts.num_units_skipped for each in summaries] == [0, 6]
    assert "not encoded: 6" in summaries[1].lines()[-2]


def test_parts_of_a_video_are_answered_as_if_they_were_all_of_it(
    tmp_path: Path, media: dict[str, Path], backend: OwnBackend, colocated: ColocatedPipeline
) -> None:
    parts: list[dict[str, float]] = [{}, {"start_s": 1.0, "end_s": 3.0}, {"start_s": 2.5}]
    about = {"video": str(media["video"]), "question": QUESTIONS[0]}
    lines = [{"id": number, **about, **part} for number, part in enumerate([*parts, {"start_s": 9.0}])]
    summary = run(tmp_path, backend, lines, fps=5.0, max_tokens=MAX_TOKENS)
    records = read(tmp_path / "out.jsonl")
    for number, part in enumerate(parts):
        answer = colocated.ask([media["video"]], QUESTIONS[0], fps=5.0, max_tokens=MAX_TOKENS, **part)
        assert records[number]["answer"] == answer.text
        assert records[number]["usage"]["prompt_tokens"] == answer.usage.prompt_tokens
    assert len({records[number]["usage"]["prompt_tokens"] for number in range(3)}) == 3
    assert summary.tally.num_failed == 1
    assert "[9, 4) s, in which no frame begins" in (tmp_path / "out.errors.jsonl").read_text()


def test_leaving_early_leaves_nothing_behind(
    media: dict[str, Path], backend: OwnBackend, service: OwnService, tmp_path: Path
) -> None:
    lines = [
        {"id": number, "video": str(media["video"]), "question": f"What is {number}?"}
        for number in range(200)
    ]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    index = LineIndex(path, LineDefaults(tmp_path, max_tokens=40))
    index.build()
    tasks = (MediaTask(group.first, index.lines(group)) for group in index.groups())
    with backend.run(tasks) as outcomes:
        assert next(outcome for outcome in outcomes if outcome is not None)
    assert_nothing_left(service)
    index.close()


def test_a_repeated_line_has_the_same_draws(
    tmp_path: Path, media: dict[str, Path], backend: OwnBackend
) -> None:
    picture = {"type": "image_url", "image_url": {"url": media["image"].as_uri()}}
    parts = [picture, {"type": "text", "text": "What?"}]
    body = {"messages": [{"role": "user", "content": parts}], "temperature": 2, "max_tokens": 12}
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body} for name in "abc"
    ]
    runs = []
    for name in ("once", "again"):
        (tmp_path / name).mkdir()
        run(tmp_path / name, backend, lines)
        records = read(tmp_path / name / "out.jsonl")
        runs.append({key: each["response"]["body"]["choices"][0]["message"] for key, each in records.items()})
    assert runs[0] == runs[1]
    assert len({message["content"] for message in runs[0].values()}) == 3


def test_reduced_media_give_the_answers_of_the_colocated_pipeline(
    tmp_path: Path, media: dict[str, Path], backend: OwnBackend, colocated: ColocatedPipeline
) -> None:
    """The same video whole and reduced: two groups, of which each has its own tokens."""
    video = {"type": "video_url", "video_url": {"url": media["video"].as_uri()}}

    def line(name: str, **epd: Any) -> dict[str, Any]:
        content = [video, {"type": "text", "text": QUESTIONS[0]}]
        body = {"messages": [{"role": "user", "content": content}], "epd": {"num_frames": 20, **epd}}
        return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}

    summary = run(
        tmp_path,
        backend,
        [line("whole"), line("half", retention=0.5), line("none", retention=0)],
        max_tokens=6,
    )
    bodies = {name: each["response"]["body"] for name, each in read(tmp_path / "out.jsonl").items()}
    whole = colocated.prefill_media([media["video"]], num_frames=20)
    half = colocated.prefill_media([media["video"]], num_frames=20, reduction=ReductionPolicy(retention=0.5))
    for name, context in (("whole", whole), ("half", half)):
        answer = colocated.answer(context, QUESTIONS[0], max_tokens=6)
        assert bodies[name]["choices"][0]["message"]["content"] == answer.text
        assert bodies[name]["epd"]["visual_tokens"] == answer.usage.visual_tokens
    assert bodies["half"]["epd"]["visual_tokens"] < bodies["whole"]["epd"]["visual_tokens"]
    assert summary.tally.num_failed == 1
    assert "retention" in (tmp_path / "out.errors.jsonl").read_text()


@pytest.mark.parametrize("num_ahead", [0, 2])
def test_lines_wait_planned_for_the_places_of_those_that_end(
    tmp_path: Path, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, num_ahead: int
) -> None:
    """More lines are asked about than run at once, or the engine would idle while the next ones are read."""
    assert AppArgs.model_construct().scheduler(is_decode=True).on(0).max_num_seqs < OWN_REQUESTS
    waiting = waiting_at_ends(monkeypatch)
    lines = [
        {"id": seed, "images": [str(write_image(tmp_path / f"{seed}.png", seed=seed))], "question": "What?"}
        for seed in range(8)
    ]
    config = EngineConfig(num_threads=1, num_kv_tokens=8192)
    with open_model(checkpoints["qwen2_5_vl"], config, max_num_seqs=2) as service:
        backend = OwnBackend(service, max_requests=2 + num_ahead, lines_per_medium=1)
        summary = run(tmp_path, backend, lines, max_tokens=48)
    assert summary.tally.num_answered == len(waiting) == 8
    assert (max(waiting) > 0) == (num_ahead > 0), waiting


def waiting_at_ends(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list that gets, whenever an answer ends, how many planned requests wait for room.

    One whose worker has not said yet whether there is room, since it is in a pass, does not count.
    """
    waiting, queues, asked = list[int](), list[AdmissionQueue](), set[str]()
    enter, finish, ask_workers = AdmissionQueue.enter, LiveAnswer.finish, RequestPlacer._ask_workers

    def entered(queue: AdmissionQueue, *args: Any, **options: Any) -> None:
        queues[:] = [queue]
        enter(queue, *args, **options)

    async def asking(placer: RequestPlacer, attempt: Attempt) -> bool:
        asked.add(attempt.id)
        try:
            return await ask_workers(placer, attempt)
        finally:
            asked.discard(attempt.id)

    def finished(answer: LiveAnswer, worker: str) -> None:
        waiting.append(len(queues[0]) - len(asked))
        finish(answer, worker)

    monkeypatch.setattr(AdmissionQueue, "enter", entered)
    monkeypatch.setattr(RequestPlacer, "_ask_workers", asking)
    monkeypatch.setattr(LiveAnswer, "finish", finished)
    return waiting
