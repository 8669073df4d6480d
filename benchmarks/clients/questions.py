"""Drawn images and videos, questions about them, and the answers that plain HTTP gives."""

from __future__ import annotations

import base64
import random
from io import BytesIO
from pathlib import Path

import httpx
from PIL import Image

from benchmarks.clients.asks import Case
from epd.shapes.questions import QuestionKind, make_questions
from epd.shapes.world import SceneRenderer, make_scene
from epd.video.demo_video import write_scene
from epd.workload.requests import Resolution, VideoSpec

_SIZE = Resolution(224, 160)
_VIDEO = VideoSpec(6.0, 4, _SIZE)
_KINDS = ("text", "image", "video")


def drawn_cases(url: str, folder: Path, count: int) -> list[Case]:
    """Returns cases with the answers of the server at `url`. folder: where videos are written."""
    with httpx.Client(base_url=url, trust_env=False, timeout=120) as http:
        return [_answered(http, _drawn(seed, folder)) for seed in range(count)]


def _drawn(seed: int, folder: Path) -> Case:
    scene = make_scene(seed, _VIDEO.duration_s)
    video = folder / f"{seed}.mp4"
    write_scene(video, seed, _VIDEO, lambda: None)
    image = BytesIO()
    middle_s = (scene.objects[0].start_s + scene.objects[0].end_s) / 2
    Image.fromarray(SceneRenderer(scene, _SIZE.height, _SIZE.width).frame(middle_s)).save(image, "PNG")
    questions = make_questions(scene, random.Random(seed))
    question = next(each for each in questions if each.kind == QuestionKind.COLOUR)
    return Case(question.text, _url("image/png", image.getvalue()), _url("video/mp4", video.read_bytes()), {})


def _url(media_type: str, data: bytes) -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def _answered(http: httpx.Client, case: Case) -> Case:
    def answer(kind: str) -> str:
        body = {"messages": case.messages(kind), "temperature": 0}
        reply = http.post("/v1/chat/completions", json=body).raise_for_status()
        text: str = reply.json()["choices"][0]["message"]["content"]
        return text

    prompt = http.post("/v1/completions", json={"prompt": case.question, "temperature": 0}).raise_for_status()
    expected = {"prompt": prompt.json()["choices"][0]["text"], **{kind: answer(kind) for kind in _KINDS}}
    return Case(case.question, case.image, case.video, expected)
