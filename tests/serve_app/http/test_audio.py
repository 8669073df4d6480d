"""Sound over HTTP has the tokens of `generate` in split topologies; what cannot be heard gives one line."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest

from epd.serve_app.http.api import ApiSettings
from epd.serve_app.worker.worker_roles import EncodeRole
from tests.reference import MAX_TOKENS
from tests.serve_app.conftest import JSON, data_url
from tests.serve_app.real_app import RealApp, real_app
from tests.tiny_audio import WINDOW_S, Reference, heard, tones, write_audio

QUESTION = "What is heard?"


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("clips")
    return {
        "short": write_audio(folder / "short.wav", tones(0.7, 16_000), 16_000),
        "other": write_audio(folder / "other.mp3", tones(1.4, 44_100, 2, seed=1), 44_100, "libmp3lame"),
        "long": write_audio(folder / "long.wav", tones(2.5 * WINDOW_S, 22_050, seed=3), 22_050),
    }


@pytest.fixture(scope="module", params=["1e1p1d", "2e1p1d"])
def app(request: pytest.FixtureRequest, audio_checkpoint: Path) -> Iterator[RealApp]:
    with real_app(audio_checkpoint, request.param) as app:
        yield app
        app.wait_until_empty()
        assert app.num_workers_lost == 0


def input_audio(path: Path) -> JSON:
    data = base64.b64encode(path.read_bytes()).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": path.suffix[1:]}}


def audio_url(path: Path, mime: str = "audio/mpeg") -> JSON:
    return {"type": "audio_url", "audio_url": {"url": data_url(path, mime)}}


def text(words: str) -> JSON:
    return {"type": "text", "text": words}


def body_of(*parts: JSON, **more: object) -> JSON:
    messages = [{"role": "user", "content": list(parts)}]
    return {"messages": messages, "temperature": 0, "max_tokens": MAX_TOKENS, **more}


def answer_of(app: RealApp, body: JSON) -> JSON:
    response = app.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    found: JSON = response.json()
    return found


def num_clips_encoded(app: RealApp) -> int:
    roles = [core.hosted.get("encode") for core in app.deployment.cores()]
    return sum(role.stage.counts.num_groups for role in roles if isinstance(role, EncodeRole))


def said(audio_reference: Reference, tokens: tuple[int, ...]) -> str:
    return str(audio_reference.processor.tokenizer.decode(tokens, skip_special_tokens=True))


def test_answers_equal_generate(app: RealApp, audio_reference: Reference, clips: dict[str, Path]) -> None:
    """One clip, then several with text around them, of which two are known by then; then a part of one."""
    short, other, long = (heard(clips[name]) for name in ("short", "other", "long"))
    several = (input_audio(clips["short"]), audio_url(clips["other"]), input_audio(clips["short"]))
    cases = [
        ([input_audio(clips["short"]), text(QUESTION)], {}, [short], [None, QUESTION]),
        (
            [text("?"), *several, text(QUESTION)],
            {},
            [short, other, short],
            ["?", *[None] * 3, QUESTION],
        ),
        (
            [audio_url(clips["long"], "audio/wav"), text(QUESTION)],
            {"epd": {"start_s": 1.5, "end_s": 3.0}},
            [heard(clips["long"], 1.5, 3.0)],
            [None, QUESTION],
        ),
    ]
    answers = set()
    for parts, more, sounds, content in cases:
        expected = audio_reference.tokens(sounds, content)
        num_prompt = audio_reference.inputs(sounds, content)["input_ids"].shape[1]
        body = body_of(*parts, **more)
        estimate = app.http.post("/v1/epd/estimate", json=body).json()

        found = answer_of(app, body)

        assert found["choices"][0]["message"]["content"] == said(audio_reference, expected)
        assert found["usage"]["completion_tokens"] == len(expected)
        assert found["usage"]["prompt_tokens"] == estimate["prompt_tokens"] == num_prompt
        answers.add(said(audio_reference, expected))
    assert len(answers) == len(cases), "what is heard makes no difference"
    assert len(long) > WINDOW_S * 16_000


def test_a_second_question_finds_what_was_heard(app: RealApp, clips: dict[str, Path]) -> None:
    parts = (input_audio(clips["other"]), audio_url(clips["short"]))
    answer_of(app, body_of(*parts, text("What is said?")))
    num_encoded = num_clips_encoded(app)

    second = answer_of(app, body_of(*parts, text("Who says it?")))
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 40
    assert num_clips_encoded(app) == num_encoded

    part = answer_of(app, body_of(parts[0], text("Who says it?"), epd={"end_s": 0.5}))
    assert part["usage"]["prompt_tokens_details"]["cached_tokens"] < 40
    assert num_clips_encoded(app) == num_encoded + 1


def test_responses_hear_too(app: RealApp, audio_reference: Reference, clips: dict[str, Path]) -> None:
    content = [input_audio(clips["short"]), {"type": "input_text", "text": QUESTION}]
    asked = {
        "input": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_output_tokens": MAX_TOKENS,
    }
    found = app.http.post("/v1/responses", json=asked).json()
    expected = audio_reference.tokens([heard(clips["short"])], [None, QUESTION])
    assert found["output"][0]["content"][0]["text"] == said(audio_reference, expected)


@pytest.mark.parametrize("app", ["1e1p1d"], indirect=True)
def test_what_cannot_be_heard_gives_one_line(
    app: RealApp, clips: dict[str, Path], media: dict[str, Path]
) -> None:
    wrong = input_audio(clips["short"])
    wrong["input_audio"] = wrong["input_audio"] | {"format": "midi"}
    bad = {"type": "input_audio", "input_audio": {"data": "%%%", "format": "wav"}}
    none = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
    picture = {"type": "image_url", "image_url": {"url": data_url(media["image"], "image/png")}}
    cases = [
        (body_of(audio_url(clips["long"])), f"number 1 of the media has more than {WINDOW_S} s of sound"),
        (body_of(audio_url(media["video"])), "has no sound, only streams of kind"),
        (body_of(audio_url(media["image"])), "no sound"),
        (body_of(wrong), "'wav' or 'mp3'"),
        (body_of(bad), "base64"),
        (body_of(none), "empty"),
        (body_of(picture), "received an image for a model that hears"),
        (
            {"messages": [{"role": "system", "content": [wrong]}, {"role": "user", "content": "?"}]},
            "messages[0].content[0]",
        ),
    ]
    for body, words in cases:
        if body["messages"][-1]["content"] != "?":
            body["messages"][-1]["content"].append(text(QUESTION))
        response = app.http.post("/v1/chat/completions", json=body)
        message = response.json()["error"]["message"]
        assert 400 <= response.status_code < 500, message
        assert words in message
        assert "\n" not in message


def test_a_model_that_sees_refuses_sound(checkpoints: dict[str, Path], clips: dict[str, Path]) -> None:
    with real_app(checkpoints["shapes-vl"], "1epd", ApiSettings()) as app:
        body = body_of(input_audio(clips["short"]), text(QUESTION))
        for route in ("/v1/chat/completions", "/v1/epd/estimate"):
            response = app.http.post(route, json=body)
            assert (response.status_code, response.json()["error"]["code"]) == (400, "unsupported_media")
            assert "received audio for a model that hears nothing" in response.json()["error"]["message"]
        app.wait_until_empty()
