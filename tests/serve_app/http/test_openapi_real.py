"""All that the API offers, over real workers in threads: no answer is 5xx, no worker is lost, nothing stays.

Operations of the OpenAPI document are drawn, lines of batches too, and damaged media go to each route that
takes media. `make soak` does the same with many more.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from schemathesis import Case, GenerationMode

from epd.control.request_budget import RequestLimits
from epd.sampling_params import SamplingParams
from epd.serve_app.files.settings import FileSettings
from epd.serve_app.http.api import ApiSettings
from epd.video import FetchPolicy
from tests.serve_app.conftest import JSON, QUESTION, image_part, media_settings, video_part
from tests.serve_app.hostile import url_of
from tests.serve_app.http.test_openapi import CHECKS, DRAWN, OPERATIONS, operations
from tests.serve_app.real_app import RealApp, real_app
from tests.serve_app.server import wait_until
from tests.video.corpus import DAMAGES, Variant, corpus
from tests.video.recipes import GOP15, Recipe, make

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")

IS_SOAK = "EPD_SOAK" in os.environ
NUM_DRAWN, NUM_LINES, NUM_OF_EACH_DAMAGE = (500, 600, 12) if IS_SOAK else (30, 24, 1)
MANY = settings(DRAWN, max_examples=NUM_DRAWN, derandomize=not IS_SOAK)
HANG_S = 600.0
MEDIA_ROUTES = ("/v1/chat/completions", "/v1/responses", "/invocations", "/v1/epd/estimate", "/tokenize")
BATCH_ROUTES = ("/v1/chat/completions", "/v1/completions")
WITH_BODIES = [
    *(
        f"POST {route}"
        for route in (
            *MEDIA_ROUTES,
            "/v1/completions",
            "/v1/epd/picture",
            "/detokenize",
            "/v1/batches",
            "/v1/uploads",
        )
    )
]
DRAWN_OF = [
    *((label, GenerationMode.POSITIVE) for label in sorted(OPERATIONS)),
    *((label, GenerationMode.NEGATIVE) for label in WITH_BODIES),
]
MODES = {GenerationMode.POSITIVE: {200, 403, 404}, GenerationMode.NEGATIVE: {400, 405, 415, 422}}
SECRETS = ("/proc", "epd-media", "Traceback")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("real")


@pytest.fixture(scope="module")
def app(checkpoints: dict[str, Path], folder: Path) -> Iterator[RealApp]:
    """Answers are short: what is drawn may ask for 2^63 tokens."""
    for name in ("spool", "media"):
        (folder / name).mkdir()
    policy = FetchPolicy(allowed_hosts=frozenset(), media_folder=folder / "media", max_s=1.0)
    path = checkpoints["qwen2_5_vl"]
    api = ApiSettings(
        limits=RequestLimits(max_answer_tokens=128),
        default_params=SamplingParams(max_tokens=8),
        files=FileSettings(folder / "kept", max_batches=10_000, max_uploads=10_000),
    )
    media = replace(media_settings(policy, folder / "spool"), model=path)
    with real_app(path, "1e1p1d", api, media) as app:
        yield app


def check_unhurt(app: RealApp, folder: Path) -> None:
    """A question is answered, no worker was lost, and nothing of any request is held."""
    answer = app.http.post("/v1/chat/completions", json=QUESTION)
    assert answer.status_code == 200, answer.text
    assert app.num_workers_lost == 0
    app.wait_until_empty()
    wait_until(lambda: held_bytes(app) == 0)
    wait_until(lambda: not list((folder / "spool").rglob("*.part")))


def held_bytes(app: RealApp) -> float:
    names = "epd_held_body_bytes|epd_spooled_media_bytes"
    found = re.findall(rf"^(?:{names})(?:{{.*}})? (\S+)", app.http.get("/metrics").text, re.MULTILINE)
    assert len(found) == 2, found
    return sum(map(float, found))


def uploaded(app: RealApp, lines: list[bytes]) -> str:
    file = {"file": ("lines.jsonl", b"\n".join(lines))}
    reply = app.http.post("/v1/files", data={"purpose": "batch"}, files=file)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["id"])


def begun(app: RealApp, lines: list[bytes], endpoint: str) -> str:
    asked = {"input_file_id": uploaded(app, lines), "endpoint": endpoint, "completion_window": "24h"}
    reply = app.http.post("/v1/batches", json=asked)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["id"])


def upload_begun(app: RealApp) -> str:
    asked = {"filename": "a.mp4", "bytes": 1000, "purpose": "user_data", "mime_type": "video/mp4"}
    reply = app.http.post("/v1/uploads", json=asked)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["id"])


def whole_part(app: RealApp, upload_id: str) -> str:
    reply = app.http.post(f"/v1/uploads/{upload_id}/parts", files={"data": ("blob", b"x" * 1000)})
    assert reply.status_code == 200, reply.text
    return str(reply.json()["id"])


def line(number: int, endpoint: str, body: Any) -> bytes:
    return json.dumps({"custom_id": str(number), "method": "POST", "url": endpoint, "body": body}).encode()


def live(app: RealApp, names: set[str]) -> dict[str, str]:
    """What exists, for the parameters of a path: a file, a batch that has just begun, the model."""
    makers = {
        "file_id": lambda: uploaded(app, [line(0, BATCH_ROUTES[0], QUESTION)]),
        "upload_id": lambda: upload_begun(app),
        "batch_id": lambda: begun(app, [line(0, BATCH_ROUTES[0], QUESTION)], BATCH_ROUTES[0]),
        "name": lambda: str(app.http.get("/v1/models").json()["data"][0]["id"]),
    }
    return {name: make() for name, make in makers.items() if name in names}


@pytest.mark.parametrize(("label", "mode"), DRAWN_OF)
def test_no_request_costs_a_worker(app: RealApp, folder: Path, label: str, mode: GenerationMode) -> None:
    operation = operations(app.url)[label]
    seen: Counter[int] = Counter()

    @given(case=operation.as_strategy(generation_mode=mode), is_live=st.booleans())
    @MANY
    def ask(case: Case, is_live: bool) -> None:
        if is_live and case.path_parameters:
            case.path_parameters = {**case.path_parameters, **live(app, set(case.path_parameters))}
        if is_live and isinstance(case.body, dict) and "input_file_id" in case.body:
            case.body = {**case.body, "input_file_id": live(app, {"file_id"})["file_id"]}
        if is_live and label.endswith("complete"):
            case.body = {"part_ids": [whole_part(app, case.path_parameters["upload_id"])]}
        response = case.call(timeout=HANG_S)
        case.validate_response(response, checks=CHECKS)
        seen[response.status_code] += 1

    ask()
    print(label, mode.value, dict(seen))
    # Little that is drawn for these is a conversation, or has a picture.
    is_strict = label in {"POST /v1/chat/completions", "POST /v1/epd/picture"}
    assert seen.keys() & ({400} if is_strict else MODES[mode]), seen
    if "{" in label or label == "POST /v1/batches":
        assert seen[200] or mode is GenerationMode.NEGATIVE or label.endswith("cancel"), seen
    check_unhurt(app, folder)


@pytest.mark.parametrize("endpoint", BATCH_ROUTES)
def test_no_line_of_a_batch_costs_a_worker(app: RealApp, folder: Path, endpoint: str) -> None:
    bodies: list[Any] = [
        QUESTION,
        {"prompt": "so"},
        {"input": "so"},
        [],
        None,
        "x",
        1e308,
        {"messages": [[]]},
    ]
    operation = operations(app.url)[f"POST {endpoint}"]
    for mode in MODES:

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(MANY, max_examples=NUM_LINES)
        def draw(case: Case) -> None:
            if isinstance(case.body, dict | list | str | int | float):
                bodies.append(case.body)

        draw()
    lines = [line(number, endpoint, body) for number, body in enumerate(bodies)]
    statuses = statuses_of(app, lines, endpoint)
    print(endpoint, len(lines), dict(Counter(statuses.values())))
    assert statuses.keys() == {str(number) for number in range(len(lines))}
    assert set(statuses.values()) <= {200, 400, 404, 413, 422}, statuses
    assert {200, 400} <= set(statuses.values())
    check_unhurt(app, folder)


def statuses_of(app: RealApp, lines: list[bytes], endpoint: str) -> dict[str, int]:
    """The status of each line of a batch, by its id."""
    batch_id = begun(app, lines, endpoint)

    def batch() -> JSON:
        found: JSON = app.http.get(f"/v1/batches/{batch_id}").json()
        return found

    wait_until(lambda: batch()["status"] in ("completed", "failed"))
    done = batch()
    assert done["status"] == "completed", done
    found: dict[str, int] = {}
    for name in ("output_file_id", "error_file_id"):
        text = app.http.get(f"/v1/files/{done[name]}/content").text if done[name] else ""
        for record in map(json.loads, text.splitlines()):
            assert record["custom_id"] not in found, record
            found[record["custom_id"]] = record["response"]["status_code"]
    return found


def damaged_videos(folder: Path) -> Iterator[Variant]:
    recipes = [Recipe("small.mp4", options=GOP15, num_frames=30, width=96, height=64)]
    if IS_SOAK:
        pieces = {"movflags": "frag_keyframe+empty_moov"}
        recipes += [
            replace(recipes[0], name="small.mkv"),
            replace(recipes[0], name="pieces.mp4", container_options=pieces),
            replace(recipes[0], name="small.avi", codec="mpeg4", options={}),
        ]
    sources = {recipe.name: make(recipe, folder / recipe.name) for recipe in recipes}
    return corpus(sources, NUM_OF_EACH_DAMAGE)


def damaged_images(image: Path) -> Iterator[Variant]:
    for kind in ("PNG", "JPEG", "WEBP", "GIF") if IS_SOAK else ("PNG", "JPEG"):
        out = BytesIO()
        Image.open(image).convert("RGB").save(out, kind)
        for damage in DAMAGES[:4]:
            for seed in range(NUM_OF_EACH_DAMAGE):
                rng = random.Random(f"{kind} {damage.__name__} {seed}")
                yield Variant(f"{damage.__name__}-{seed}.{kind.lower()}", damage(out.getvalue(), rng))


def question(route: str, part: JSON) -> JSON:
    """What a route is asked about an image or a video."""
    ours = {"epd": {"num_frames": 4}} if part["type"] == "video_url" else {}
    if route == "/v1/responses":
        if part["type"] == "image_url":
            part = {"type": "input_image", "image_url": part["image_url"]["url"]}
        content = [part, {"type": "input_text", "text": "What?"}]
        return {"input": [{"role": "user", "content": content}], "max_output_tokens": 2, **ours}
    content = [part, {"type": "text", "text": "What?"}]
    most = {} if route == "/tokenize" else {"max_tokens": 2}
    return {"messages": [{"role": "user", "content": content}], **most, **ours}


def test_damaged_media_cost_no_worker_on_any_route(
    app: RealApp, folder: Path, media: dict[str, Path], tmp_path: Path
) -> None:
    variants = [*damaged_videos(tmp_path), *damaged_images(media["image"])]
    asked: list[tuple[str, str, JSON]] = []
    for number, variant in enumerate(variants):
        path = folder / "media" / f"{number}-{variant.name}"
        path.write_bytes(variant.data)
        part = image_part if path.suffix in (".png", ".jpeg", ".webp", ".gif") else video_part
        urls = [url_of("", variant.data), path.as_uri()]
        routes = MEDIA_ROUTES if IS_SOAK else MEDIA_ROUTES[number % len(MEDIA_ROUTES) :][:1]
        for place, route in enumerate(routes):
            asked.append((variant.name, route, question(route, part(urls[(number + place) % 2]))))

    def status(each: tuple[str, str, JSON]) -> int:
        name, route, body = each
        reply = app.http.post(route, json=body, timeout=HANG_S)
        assert reply.status_code < 500, (name, route, reply.text)
        assert not any(word in reply.text for word in (str(folder), *SECRETS)), (name, route, reply.text)
        return reply.status_code

    with ThreadPoolExecutor(4) as clients:
        statuses = Counter(clients.map(status, asked))
    print(len(variants), "files", len(asked), "requests", dict(statuses))
    assert set(statuses) <= {200, 400, 413, 415, 422}, statuses
    assert statuses[200] > len(asked) // 10  # some damage is harmless
    assert len(asked) - statuses[200] > len(asked) // 3
    check_unhurt(app, folder)


def test_damaged_media_in_a_batch_cost_no_worker(
    app: RealApp, folder: Path, media: dict[str, Path], tmp_path: Path
) -> None:
    route = MEDIA_ROUTES[0]
    images = [image_part(url_of("", each.data)) for each in damaged_images(media["image"])]
    videos = [video_part(url_of("", each.data)) for each in damaged_videos(tmp_path)]
    lines = [line(number, route, question(route, part)) for number, part in enumerate([*images, *videos])]
    statuses = statuses_of(app, lines, route)
    print(len(lines), "lines", dict(Counter(statuses.values())))
    assert len(statuses) == len(lines)
    assert set(statuses.values()) <= {200, 400, 413, 415, 422}, statuses
    check_unhurt(app, folder)
