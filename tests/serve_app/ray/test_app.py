"""The whole application on Ray, asked over HTTP: the tokens of the colocated pipeline in every topology."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, OpenAI

from epd.types import Answer
from tests.colocated import ColocatedPipeline
from tests.serve_app.conftest import JSON, data_url, image_part, video_part
from tests.serve_app.ray.conftest import KEY, SHARED_TOPOLOGY
from tests.serve_app.ray.declared_app import DeclaredApp
from tests.serve_app.ray.ray_session import IGNORED, RaySession, running_app
from tests.serve_app.server import wait_until

pytestmark = [pytest.mark.filterwarnings(each) for each in IGNORED]

# `make test-topologies` asks all of them.
TOPOLOGIES = os.environ.get("EPD_TEST_TOPOLOGIES", SHARED_TOPOLOGY).split()
NUM_FRAMES, MAX_TOKENS, NUM_QUESTIONS = 6, 10, 32
KINDS: tuple[tuple[str, ...], ...] = (
    (),
    ("image",),
    ("video",),
    ("wide_image", "image"),
    ("tall_video",),
    ("image", "video"),
)


@dataclass(frozen=True)
class App:
    """A running application, and clients of it."""

    url: str
    http: httpx.Client
    openai: OpenAI

    def status(self) -> JSON:
        status: JSON = self.http.get("/v1/epd/status").json()
        return status

    def is_empty(self) -> bool:
        status = self.status()
        return status["num_requests"] == 0 and not any(
            worker["num_waiting"] or worker["num_running"] or worker["kv_usage"]
            for worker in status["workers"]
        )


@pytest.fixture(scope="module", params=TOPOLOGIES)
def url(
    request: pytest.FixtureRequest,
    ray_session: RaySession,
    checkpoints: dict[str, Path],
    media: dict[str, Path],
) -> Iterator[str]:
    if request.param == SHARED_TOPOLOGY:
        shared: DeclaredApp = request.getfixturevalue("shared_app")
        yield shared.url
        return
    with running_app(
        ray_session,
        model=checkpoints["qwen2_5_vl"],
        topology=request.param,
        model_name="tiny",
        api_key=KEY,
        allowed_media_path=media["video"].parent,
        num_kv_tokens=16_384,
        hang_s=60,
    ) as url:
        yield url


@pytest.fixture(scope="module")
def app(url: str) -> Iterator[App]:
    """Nothing of any request may be left at its end."""
    headers = {"Authorization": f"Bearer {KEY}"}
    options: dict[str, Any] = {"trust_env": False, "timeout": 300}
    with (
        httpx.Client(base_url=url, headers=headers, **options) as http,
        httpx.Client(**options) as openai_http,
    ):
        client = OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, http_client=openai_http)
        app = App(url, http, client)
        assert app.status()["topology"] in TOPOLOGIES
        yield app
        wait_until(app.is_empty)


def part(path: Path) -> JSON:
    if path.suffix == ".mp4":
        return video_part(path.as_uri())
    return image_part(data_url(path, "image/png"))


def body(media: list[Path], text: str, **more: Any) -> JSON:
    content = [*map(part, media), {"type": "text", "text": text}]
    ours = {"epd": {"num_frames": NUM_FRAMES}} | more.pop("extra_body", {})
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": MAX_TOKENS,
        "extra_body": ours,
        **more,
    }


def questions(media: dict[str, Path]) -> list[tuple[list[Path], str]]:
    """Of all kinds of media, no two alike."""
    return [
        ([media[name] for name in KINDS[number % len(KINDS)]], f"What is shown? Ä 漢 {number}")
        for number in range(NUM_QUESTIONS)
    ]


@pytest.fixture(scope="module")
def expected(checkpoints: dict[str, Path], media: dict[str, Path]) -> list[Answer]:
    """What the colocated pipeline answers."""
    pipeline = ColocatedPipeline.load(checkpoints["qwen2_5_vl"])
    return [
        pipeline.ask(paths, text, num_frames=NUM_FRAMES, max_tokens=MAX_TOKENS)
        for paths, text in questions(media)
    ]


def test_tokens_equal_the_colocated_pipeline(
    app: App, media: dict[str, Path], expected: list[Answer]
) -> None:
    """All at once; every other one streams."""

    async def run() -> list[tuple[str, int]]:
        async with httpx.AsyncClient(trust_env=False, timeout=200) as http:
            client = AsyncOpenAI(base_url=f"{app.url}/v1", api_key=KEY, max_retries=0, http_client=http)
            asking = [
                asked(client, paths, text, is_stream=number % 2 == 1)
                for number, (paths, text) in enumerate(questions(media))
            ]
            return list(await asyncio.gather(*asking))

    answers = asyncio.run(run())
    assert answers == [(answer.text, len(answer.token_ids)) for answer in expected]


async def asked(client: AsyncOpenAI, paths: list[Path], text: str, *, is_stream: bool) -> tuple[str, int]:
    """The answer, and how many tokens it has."""
    create: Any = client.chat.completions.create
    if not is_stream:
        done = await create(**body(paths, text))
        return done.choices[0].message.content, done.usage.completion_tokens
    pieces, num_tokens = [], 0
    async for chunk in await create(**body(paths, text, stream=True, stream_options={"include_usage": True})):
        pieces += [choice.delta.content or "" for choice in chunk.choices]
        num_tokens = chunk.usage.completion_tokens if chunk.usage else num_tokens
    return "".join(pieces), num_tokens


def test_a_second_question_about_a_video_computes_only_the_question(app: App, tmp_path: Path) -> None:
    """The least of five times to a first token is compared: one waited half a second for a core."""
    from tests.media import write_video

    path = write_video(tmp_path / "new.mp4", num_frames=80, seed=11)
    create: Any = app.openai.chat.completions.create
    url = data_url(path, "video/mp4")
    asked = [
        create(
            model="tiny",
            max_tokens=4,
            messages=[{"role": "user", "content": [video_part(url), {"type": "text", "text": text}]}],
            extra_body={"epd": {"num_frames": 40}},
        )
        for text in ("What is it?", *(f"And the colour of {number}?" for number in range(5)))
    ]
    first, *others = (answer.epd for answer in asked)
    for other in others:
        assert first["cached_tokens"] < first["visual_tokens"] <= other["cached_tokens"]
        assert first["stages_s"]["encode"] > 0 == other["stages_s"]["encode"]
    assert min(other["ttft_s"] for other in others) < first["ttft_s"]


def test_other_ways_in_give_the_answer_of_the_chat(app: App) -> None:
    question: Any = [{"role": "user", "content": "What is it?"}]
    chat = app.openai.chat.completions.create(model="tiny", messages=question, max_tokens=8, temperature=0)
    response = app.openai.responses.create(
        model="tiny", input=question, max_output_tokens=8, temperature=0, stream=True
    )
    (text,) = (event.text for event in response if event.type == "response.output_text.done")
    token_ids = app.http.post("/tokenize", content=json.dumps({"messages": question})).json()["tokens"]
    completion = app.openai.completions.create(
        model="tiny", prompt=[token_ids, token_ids], max_tokens=8, temperature=0
    )
    assert [text, *(each.text for each in completion.choices)] == [chat.choices[0].message.content] * 3
    wait_until(app.is_empty)


def test_a_client_that_leaves_frees_everything(
    app: App, media: dict[str, Path], ray_session: RaySession
) -> None:
    create: Any = app.openai.chat.completions.create
    more = {"ignore_eos": True, "max_tokens": 2000, "extra_body": {}}
    more["extra_body"] = {"ignore_eos": more.pop("ignore_eos")}
    with ray_session.holding():
        stream = create(**body([media["video"]], "What is shown?", stream=True, **more))
        next(iter(stream))
        wait_until(lambda: not app.is_empty())  # another front may say so, which hears of it later
        stream.close()
        wait_until(app.is_empty)


def test_a_named_medium_is_known_whichever_front_is_asked(app: App, media: dict[str, Path]) -> None:
    """The proxy chooses one of two fronts for each request."""
    image = image_part(data_url(media["image"], "image/png"))

    def estimated(part: JSON) -> JSON:
        messages = [{"role": "user", "content": [{**part, "uuid": "door"}]}]
        response = app.http.post("/v1/epd/estimate", content=json.dumps({"messages": messages}))
        assert response.status_code == 200, response.text
        found: JSON = response.json()
        return found

    expected = estimated(image)
    alone = {"type": "image_url", "uuid": "door"}
    assert [estimated(alone) for _ in range(16)] == [expected] * 16


def test_settings_reach_the_front(app: App, media: dict[str, Path]) -> None:
    with httpx.Client(base_url=app.url, trust_env=False, timeout=300) as stranger:
        assert stranger.get("/health").status_code == 200
        assert stranger.get("/v1/models").status_code == 401
    assert [model.id for model in app.openai.models.list()] == ["tiny"]
    elsewhere = video_part(Path(__file__).as_uri())
    refused = app.http.post(
        "/v1/chat/completions",
        content=json.dumps({"messages": [{"role": "user", "content": [elsewhere]}]}),
    )
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "media_forbidden")
    assert "epd_" in app.http.get("/metrics").text


def test_the_cluster_asks_for_a_token(ray_session: RaySession) -> None:
    """On Ray releases that can. Who reaches its ports could run code otherwise."""
    raylet = pytest.importorskip("ray._raylet")
    assert os.environ["RAY_AUTH_TOKEN"]
    assert raylet.get_authentication_mode() == raylet.AuthenticationMode.TOKEN
