"""Frames that a client has extracted are a video of its own times, against transformers' processor."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor
from transformers.video_utils import VideoMetadata

from epd import video
from epd.encoders import FrameSampling, ListedTimes, VideoFacts, load_adapter
from epd.encoders.sampling import MAX_LISTED_S
from epd.types import UInt8Array
from tests.media import draw_frames
from tests.reference import MAX_TOKENS, generated
from tests.serve_app.conftest import JSON, data_url, video_part
from tests.serve_app.real_app import RealApp, real_app
from tests.tiny_models import load_reference
from tests.video.plain_decoder import reference_decode

TEXT = "What is shown?"
TIMES: list[JSON] = [
    {},
    {"fps": 2.0},
    {"fps": 10.0, "frames_indices": [0, 7, 15, 22, 30], "total_num_frames": 40, "duration": 4.0},
    {"fps": 24.0, "total_num_frames": 240},
]


@pytest.fixture(
    scope="module",
    params=[("shapes-vl", "1e1p1d"), ("qwen2_5_vl", "2epd"), ("qwen3_vl", "1e1p1d")],
    ids=lambda each: each[0],
)
def served(request: pytest.FixtureRequest, checkpoints: dict[str, Path]) -> Iterator[tuple[Path, RealApp]]:
    name, topology = request.param
    with real_app(checkpoints[name], topology) as app:
        yield checkpoints[name], app
        app.wait_until_empty()


@pytest.fixture(scope="module")
def app(checkpoints: dict[str, Path]) -> Iterator[RealApp]:
    with real_app(checkpoints["shapes-vl"], "1epd") as app:
        yield app
        app.wait_until_empty()
        assert app.num_workers_lost == 0


def drawn(num_frames: int = 5, height: int = 84, width: int = 112) -> list[UInt8Array]:
    return list(draw_frames(num_frames, height, width, seed=3))


def encoded(frame: UInt8Array, form: str = "PNG") -> str:
    file = io.BytesIO()
    Image.fromarray(frame).save(file, form)
    return base64.b64encode(file.getvalue()).decode()


def listed(frames: Sequence[UInt8Array], form: str = "PNG") -> JSON:
    return video_part("data:video/jpeg;base64," + ",".join(encoded(frame, form) for frame in frames))


def body_of(*parts: JSON, **more: Any) -> JSON:
    content = [*parts, {"type": "text", "text": TEXT}]
    return {"messages": [{"role": "user", "content": content}], "temperature": 0, **more}


def reference_inputs(path: Path, frames: Sequence[UInt8Array], times: JSON) -> Any:
    processor = AutoProcessor.from_pretrained(path, local_files_only=True)
    content = [{"type": "video"}, {"type": "text", "text": TEXT}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    fps, total = times.get("fps", 1.0), times.get("total_num_frames", len(frames))
    metadata = VideoMetadata(
        total_num_frames=total,
        fps=fps,
        duration=times.get("duration", total / fps),
        frames_indices=times.get("frames_indices", list(range(len(frames)))),
    )
    pixels = torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2)
    return processor(
        text=[text],
        videos=[pixels],
        video_metadata=[metadata],
        do_sample_frames=False,
        return_tensors="pt",
    )


def test_every_frame_has_the_tokens_of_generate(served: tuple[Path, RealApp], media: dict[str, Path]) -> None:
    path, app = served
    info = video.probe(media["video"])
    times_s = [(index + 0.5) / info.fps for index in range(info.num_frames)]
    frames = list(reference_decode(media["video"], times_s).data)
    inputs = reference_inputs(path, frames, {"fps": info.fps})
    part = video_part(data_url(media["video"], "video/mp4"))
    body = body_of(part, max_tokens=MAX_TOKENS, mm_processor_kwargs={"do_sample_frames": False})

    found = app.http.post("/v1/chat/completions", json=body).json()

    assert found["epd"]["frames"] == info.num_frames == 40
    assert (
        app.http.post("/v1/epd/estimate", json=body).json()["prompt_tokens"] == inputs["input_ids"].shape[1]
    )
    assert found["usage"]["prompt_tokens"] == inputs["input_ids"].shape[1]
    tokenizer = AutoProcessor.from_pretrained(path, local_files_only=True).tokenizer
    expected = tokenizer.decode(generated(load_reference(path), inputs), skip_special_tokens=True)
    assert found["choices"][0]["message"]["content"] == expected


@pytest.mark.parametrize("times", TIMES, ids=["none", "rate", "indices", "part of a video"])
def test_listed_frames_have_the_tokens_of_generate(served: tuple[Path, RealApp], times: JSON) -> None:
    path, app = served
    inputs = reference_inputs(path, drawn(), times)
    body = body_of(listed(drawn()), max_tokens=MAX_TOKENS, media_io_kwargs={"video": times})
    prompt = {name: body[name] for name in ("messages", "media_io_kwargs")}

    assert app.http.post("/tokenize", json=prompt).json()["tokens"] == inputs["input_ids"][0].tolist()

    estimate = app.http.post("/v1/epd/estimate", json=body).json()
    answer = app.http.post("/v1/chat/completions", json=body | {"logprobs": True})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert estimate["prompt_tokens"] == found["usage"]["prompt_tokens"] == inputs["input_ids"].shape[1]
    assert estimate["frames"] == found["epd"]["frames"] == 5
    tokenizer = AutoProcessor.from_pretrained(path, local_files_only=True).tokenizer
    expected = generated(load_reference(path), inputs)
    assert found["usage"]["completion_tokens"] == len(expected)
    assert found["choices"][0]["message"]["content"] == tokenizer.decode(expected, skip_special_tokens=True)


@pytest.mark.parametrize("times", TIMES, ids=["none", "rate", "indices", "part of a video"])
@pytest.mark.parametrize("name", ["qwen2_5_vl", "shapes-vl"])
def test_positions_have_the_seconds_of_the_processor(
    checkpoints: dict[str, Path], name: str, times: JSON
) -> None:
    inputs = reference_inputs(checkpoints[name], drawn(), times)
    indices = times.get("frames_indices")
    listed = ListedTimes(
        times.get("fps", 1.0), None if indices is None else tuple(indices), times.get("total_num_frames")
    )
    facts = VideoFacts(5, 1.0, 84, 112, is_frame_list=True)
    plan = load_adapter(checkpoints[name]).plan_video(facts, FrameSampling(listed=listed))
    assert plan.unit_span_s == pytest.approx(float(inputs["second_per_grid_ts"][0]))


def test_jpegs_a_single_frame_and_a_video_beside_them(app: RealApp, media: dict[str, Path]) -> None:
    two = body_of(listed(drawn(4), "JPEG"), video_part(data_url(media["video"], "video/mp4")), max_tokens=1)
    found = app.http.post("/v1/chat/completions", json=two | {"mm_processor_kwargs": {"fps": 1.0}}).json()
    assert found["epd"]["frames"] == 4 + 4
    one = app.http.post("/v1/chat/completions", json=body_of(listed(drawn(1), "JPEG"), max_tokens=1)).json()
    assert one["epd"]["frames"] == 1


def test_a_number_takes_the_first_frames(app: RealApp) -> None:
    times: JSON = {"num_frames": 2, "fps": 3.0, "frames_indices": [0, 9]}
    whole, first = (
        app.http.post("/tokenize", json=asked).json()["tokens"]
        for asked in (
            {"messages": body_of(listed(drawn()))["messages"], "media_io_kwargs": {"video": times}},
            {
                "messages": body_of(listed(drawn()[:2]))["messages"],
                "media_io_kwargs": {"video": {"fps": 3.0}},
            },
        )
    )
    assert whole == first


@pytest.mark.parametrize("most", [10, 25, 10_000])
def test_a_list_with_indices_is_held_to_a_budget(app: RealApp, most: int) -> None:
    """Its frames stay, so fewer of their tokens do; or the error is about the budget."""
    times: JSON = {"frames_indices": [0, 2, 4, 6, 9], "total_num_frames": 12}
    body = body_of(
        listed(drawn()), max_tokens=1, media_io_kwargs={"video": times}, epd={"max_visual_tokens": most}
    )
    answer = app.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["epd"]["frames"] == 5
    assert answer.json()["epd"]["visual_tokens"] <= most


GOOD = encoded(next(draw_frames(1, 84, 112, seed=0)))
OTHER_SIZE = encoded(next(draw_frames(1, 56, 112, seed=0)))
CUT = base64.b64encode(base64.b64decode(GOOD)[:60]).decode()


@pytest.mark.parametrize(
    ("frames", "times", "words"),
    [
        ([GOOD, ""], {}, "frame 1: received no bytes"),
        ([GOOD, "/w=A"], {}, "frame 1: received a data: URI that is not base64"),
        ([GOOD, base64.b64encode(b"no image").decode()], {}, "frame 1"),
        ([GOOD, OTHER_SIZE], {}, "frame 1 has 112 x 56 pixels, frame 0 has 112 x 84"),
        ([GOOD, CUT], {}, "frame 1"),
        ([GOOD] * 2, {"frames_indices": [1]}, "1 frames_indices for 2 frames"),
        ([GOOD] * 2, {"frames_indices": [1, -1]}, "frames_indices[1]"),
        ([GOOD] * 2, {"frames_indices": [1, 10**9]}, f"{MAX_LISTED_S:g} s"),
        ([GOOD] * 2, {"total_num_frames": 1}, "total_num_frames 1 for 2 frames"),
        ([GOOD] * 2, {"total_num_frames": 10**15}, f"{MAX_LISTED_S:g} s"),
        ([GOOD] * 2, {"duration": 1e300}, f"{MAX_LISTED_S:g} s"),
        ([GOOD] * 2, {"fps": 1e-300}, f"{MAX_LISTED_S:g} s"),
        ([GOOD] * 2, {"fps": 1e300}, "received fps 1e+300"),
        ([""] * 70_000, {}, "max_frames"),
    ],
)
def test_hostile_lists_are_refused(app: RealApp, frames: list[str], times: JSON, words: str) -> None:
    part = video_part("data:video/jpeg;base64," + ",".join(frames))
    response = app.http.post("/v1/chat/completions", json=body_of(part, media_io_kwargs={"video": times}))
    assert response.status_code == 400, response.text
    assert words in response.json()["error"]["message"]


@pytest.mark.parametrize("name", ["frames_indices", "total_num_frames", "duration"])
def test_times_without_a_list_are_refused_by_name(app: RealApp, media: dict[str, Path], name: str) -> None:
    part = video_part(data_url(media["video"], "video/mp4"))
    value: object = [1] if name == "frames_indices" else 1
    body = body_of(part, media_io_kwargs={"video": {name: value}})
    response = app.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert f"media_io_kwargs.video.{name}" in response.json()["error"]["message"]


def test_a_part_of_a_list_is_refused(app: RealApp) -> None:
    body = body_of(listed(drawn()), epd={"start_s": 1.0})
    response = app.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert "start_s or end_s with a list of frames" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("is_list", "more", "words"),
    [
        (False, {"fps": 1.0, "do_sample_frames": False}, "do_sample_frames false with fps or num_frames"),
        (False, {"do_sample_frames": 0}, "mm_processor_kwargs.do_sample_frames"),
        (True, {"do_sample_frames": True}, "do_sample_frames true with a list of frames"),
        (True, {"fps": 1.0, "do_sample_frames": False}, ""),
        (False, {"fps": 1.0, "do_sample_frames": True}, ""),
    ],
)
def test_sampling_or_not(app: RealApp, media: dict[str, Path], is_list: bool, more: JSON, words: str) -> None:
    part = listed(drawn()) if is_list else video_part(data_url(media["video"], "video/mp4"))
    response = app.http.post(
        "/v1/chat/completions", json=body_of(part, max_tokens=1, mm_processor_kwargs=more)
    )
    assert response.status_code == (400 if words else 200), response.text
    assert words in response.text


def test_a_list_is_no_image(app: RealApp) -> None:
    url = listed(drawn())["video_url"]["url"]
    body = body_of({"type": "image_url", "image_url": {"url": url}})
    response = app.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert "send it as video_url" in response.json()["error"]["message"]
