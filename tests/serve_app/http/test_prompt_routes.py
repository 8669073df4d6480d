"""What prompts would use, and texts as tokens and back, against the real orchestrator."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from epd.encoders import load_adapter
from tests.serve_app.conftest import JSON, data_url, image_part, video_part
from tests.serve_app.http.test_frame_lists import drawn as drawn_frames
from tests.serve_app.http.test_frame_lists import listed
from tests.serve_app.real_app import RealApp, real_app


@pytest.fixture(scope="module")
def app(checkpoints: dict[str, Path]) -> Iterator[RealApp]:
    with real_app(checkpoints["shapes-vl"], "1epd") as app:
        yield app
        app.wait_until_empty()


def drawn(seed: int, media: dict[str, Path]) -> JSON:
    """A question about some media, with options that change how many tokens they have."""
    draw = random.Random(seed)
    parts: list[JSON] = []
    if draw.random() < 0.5:
        parts.append(image_part(data_url(media["image"], "image/png")))
    if draw.random() < 0.7:
        parts.append(video_part(data_url(media["video"], "video/mp4")))
    parts.append({"type": "text", "text": " ".join(["red"] * draw.randint(1, 30))})
    ours: JSON = {"num_frames": draw.randint(1, 9)} if draw.random() < 0.5 else {"fps": draw.uniform(0.5, 4)}
    if draw.random() < 0.3:
        ours["start_s"] = draw.uniform(0, 2)
    if draw.random() < 0.5:
        ours["retention"] = draw.choice([0.3, 0.5, 0.8])
    elif draw.random() < 0.5:
        ours["max_visual_tokens"] = draw.choice([25, 40])
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1, "epd": ours}
    return resized(with_list(body, draw), draw)


def with_list(body: JSON, draw: random.Random) -> JSON:
    """The question, at times about frames that the client has extracted too, from any part of a video."""
    if draw.random() > 0.4:
        return body
    count = draw.randint(1, 7)
    body["messages"][0]["content"].insert(0, listed(drawn_frames(count), draw.choice(["PNG", "JPEG"])))
    for name in ("start_s", "num_frames"):
        body["epd"].pop(name, None)
    body["epd"].setdefault("fps", draw.uniform(0.5, 4))
    times: JSON = {"total_num_frames": 60} if draw.random() < 0.5 else {}
    if draw.random() < 0.5:
        times |= {"frames_indices": sorted(draw.sample(range(60), count)), "total_num_frames": 60}
    return body | {"media_io_kwargs": {"video": times}}


def resized(body: JSON, draw: random.Random) -> JSON:
    """The question, at times about media of other sizes."""
    for part in body["messages"][0]["content"]:
        if part["type"] == "image_url":
            part["image_url"]["detail"] = draw.choice([None, "auto", "low", "high"])
    least, most = sorted(draw.randint(1, 13_000) for _ in range(2))
    asked: list[JSON] = [
        {},
        {"max_pixels": most},
        {"min_pixels": least},
        {"min_pixels": least, "max_pixels": most},
        {"size": {"shortest_edge": least, "longest_edge": most}},
    ]
    return body | {"mm_processor_kwargs": draw.choice(asked)}


@pytest.mark.parametrize("seed", range(200 if "EPD_SOAK" in os.environ else 8))
def test_an_estimate_is_the_usage_of_the_answer(app: RealApp, media: dict[str, Path], seed: int) -> None:
    body = drawn(seed, media)
    estimate = app.http.post("/v1/epd/estimate", json=body)
    answer = app.http.post("/v1/chat/completions", json=body)
    assert (estimate.status_code, answer.status_code) == (200, 200), estimate.text + answer.text
    found, report = estimate.json(), answer.json()["epd"]
    assert found["fits"]
    assert found["prompt_tokens"] == answer.json()["usage"]["prompt_tokens"]
    for name in ("frames", "video_s", "visual_tokens", "visual_tokens_before_reduction", "retention"):
        assert found[name] == report[name], name


def test_an_estimate_encodes_nothing(app: RealApp, media: dict[str, Path]) -> None:
    def num_encoded() -> float:
        return sum(core.load().counters.get("encoded_groups", 0) for core in app.deployment.cores())

    body = drawn(4, media) | {"cache_salt": "asked for the first time"}
    before = num_encoded()
    assert app.http.post("/v1/epd/estimate", json=body).json()["visual_tokens"] > 0
    assert num_encoded() == before
    assert app.http.post("/v1/chat/completions", json=body).status_code == 200
    assert num_encoded() > before


def test_what_does_not_fit_is_said_with_the_error_of_the_answer(app: RealApp) -> None:
    context = app.http.get("/v1/models").json()["data"][0]["max_model_len"]
    body = {"messages": [{"role": "user", "content": "red " * context}]}
    answer = app.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    found = app.http.post("/v1/epd/estimate", json=body).json()
    assert (found["fits"], found["prompt_tokens"]) == (False, None)
    assert found["reason"] == answer.json()["error"]["message"]


def test_an_estimate_of_what_is_wrong_is_refused_as_the_answer(app: RealApp) -> None:
    body = {"messages": [{"role": "user", "content": "red"}], "temprature": 1}
    response = app.http.post("/v1/epd/estimate", json=body)
    assert response.status_code == 400
    assert "did you mean temperature?" in response.json()["error"]["message"]


def test_a_text_becomes_tokens_and_a_text_again(app: RealApp, checkpoints: dict[str, Path]) -> None:
    tokenizer = load_adapter(checkpoints["shapes-vl"]).tokenizer
    found = app.http.post("/tokenize", json={"prompt": "a red circle", "return_token_strs": True}).json()
    ids = tokenizer("a red circle")["input_ids"]
    assert found["tokens"] == ids
    assert found["count"] == len(ids)
    assert found["token_strs"] == tokenizer.convert_ids_to_tokens(ids)
    assert found["max_model_len"] == app.http.get("/v1/models").json()["data"][0]["max_model_len"]
    again = app.http.post("/detokenize", json={"tokens": found["tokens"]})
    assert again.json() == {"prompt": "a red circle"}


def test_a_conversation_has_the_tokens_of_its_answer(app: RealApp, media: dict[str, Path]) -> None:
    body = drawn(3, media)
    names = ("messages", "epd", "mm_processor_kwargs", "media_io_kwargs")
    messages = {name: body[name] for name in names if name in body}
    found = app.http.post("/tokenize", json=messages).json()
    usage = app.http.post("/v1/chat/completions", json=body).json()["usage"]
    assert found["count"] == len(found["tokens"]) == usage["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/tokenize", {}, "received prompt and messages, or neither"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "one of the two"),
        ("/tokenize", {"prompt": "x" * (2 << 20) + "x"}, "max_text_bytes"),
        ("/tokenize", {"prompt": "x", "padding": True}, "padding: unknown field"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "add_special_tokens": True}, "false"),
        ("/detokenize", {"tokens": [10**15]}, f"received the token {10**15}; allowed: 0 to"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1] * 300_000}, "max_json_values"),
    ],
)
def test_hostile_prompts_are_refused(app: RealApp, path: str, body: JSON, words: str) -> None:
    response = app.http.post(path, json=body)
    assert response.status_code == 400, response.text
    assert words in response.json()["error"]["message"]


def test_a_bias_chooses_the_token(app: RealApp) -> None:
    (wanted,) = app.http.post("/tokenize", json={"prompt": "circle"}).json()["tokens"]
    body: JSON = {"messages": [{"role": "user", "content": "what?"}], "max_tokens": 3, "temperature": 1}
    answer = app.http.post("/v1/chat/completions", json=body | {"logit_bias": {str(wanted): 100}}).json()
    assert answer["choices"][0]["message"]["content"] == "circle" * 3
    refused = app.http.post("/v1/chat/completions", json=body | {"logit_bias": {"1000000": 1}})
    assert refused.status_code == 400
    assert "received the token 1000000; allowed: 0 to" in refused.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_bad_words_are_not_in_the_answer(app: RealApp, stream: bool) -> None:
    body: JSON = {"messages": [{"role": "user", "content": "what?"}], "max_tokens": 8, "temperature": 0}
    biased = tokens_of(app, "circle", " circle", "square", " square")
    body |= {"logit_bias": {str(token_id): 50 for token_id in biased}}
    found = []
    for words in ([], [" circle"], ["circle", "square"], ["circle"] * 500):
        reply = app.http.post("/v1/chat/completions", json=body | {"bad_words": words, "stream": stream})
        assert reply.status_code == 200, reply.text
        found.append([word for word in ("circle", "square") if word in reply.text])
    assert found == [["circle", "square"], ["square"], [], ["square"]]


def tokens_of(app: RealApp, *texts: str) -> list[int]:
    """The tokens of texts, each of which is one."""
    found = [app.http.post("/tokenize", json={"prompt": text}).json()["tokens"] for text in texts]
    assert {len(token_ids) for token_ids in found} == {1}
    return [token_id for (token_id,) in found]


def test_an_unknown_model_is_not_found(app: RealApp) -> None:
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
        assert app.http.post(path, json=body | {"model": "gpt"}).status_code == 404


def test_models_have_their_limits(app: RealApp) -> None:
    model = app.http.get("/v1/models").json()["data"][0]
    assert (model["root"], model["parent"]) == (model["id"], None)
    assert model["limits"]["max_media"] == 64
    assert model["limits"]["max_body_bytes"] == 128 << 20
    assert model["limits"].keys() >= {"max_frames", "max_image_pixels", "max_text_bytes"}
