"""Media that were named need not be sent again, by the client that named them alone, while there is room."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from epd.errors import RequestError
from epd.serve_app.http.api import ApiSettings
from epd.serve_app.http.requests.chat_messages import MAX_UUID_CHARS
from epd.serve_app.http.requests.named_media import NamedMedia, namespace_of
from epd.serve_app.service import MediaReference
from epd.types import MediaKind
from tests.serve_app.conftest import JSON, data_url, image_part, video_part
from tests.serve_app.http.test_frame_lists import drawn, listed
from tests.serve_app.real_app import RealApp, real_app

CHAT = "/v1/chat/completions"
ESTIMATES = ("/v1/epd/estimate", "/tokenize")


@pytest.fixture(scope="module")
def app(checkpoints: dict[str, Path]) -> Iterator[RealApp]:
    settings = ApiSettings(api_key="one", admin_api_key="two", max_body_bytes=100_000)
    with real_app(checkpoints["shapes-vl"], "1e1p1d", settings) as app:
        app.http.headers["authorization"] = "Bearer one"
        yield app
        app.wait_until_empty()
        assert app.num_workers_lost == 0


def named(part: JSON, uuid: str) -> JSON:
    return {**part, "uuid": uuid}


def alone(kind: str, uuid: str, **more: Any) -> JSON:
    return {"type": f"{kind}_url", "uuid": uuid, **more}


def body_of(*parts: JSON, **more: Any) -> JSON:
    content = [*parts, {"type": "text", "text": "What is shown?"}]
    return {"messages": [{"role": "user", "content": content}], **more}


def asked(app: RealApp, *parts: JSON, **more: Any) -> Any:
    """The answer, without what differs between two of the same."""
    response = app.http.post(CHAT, json=body_of(*parts, temperature=0, max_tokens=8, **more))
    assert response.status_code == 200, response.text
    found = response.json()
    usage = {name: found["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
    return found["choices"], usage, found["epd"]["frames"], found["epd"]["visual_tokens"]


def refusal(app: RealApp, *parts: JSON, status: int = 400, **more: Any) -> str:
    response = app.http.post(CHAT, json=body_of(*parts, **more))
    assert response.status_code == status, response.text
    message: str = response.json()["error"]["message"]
    return message


def test_a_name_stands_for_the_medium(app: RealApp, media: dict[str, Path]) -> None:
    parts = {
        "image": image_part(data_url(media["image"], "image/png")),
        "video": video_part(data_url(media["video"], "video/mp4")),
    }
    for kind, part in parts.items():
        expected = asked(app, named(part, "mine"))
        assert asked(app, part) == expected
        assert asked(app, alone(kind, "mine")) == expected
        assert asked(app, alone(kind, "mine", **{f"{kind}_url": None})) == expected
        for route in ESTIMATES:
            replies = [app.http.post(route, json=body_of(each)) for each in (part, alone(kind, "mine"))]
            assert [each.status_code for each in replies] == [200, 200], replies[1].text
            assert replies[0].json() == replies[1].json()
    both = asked(app, alone("video", "mine"), alone("image", "mine"))
    assert both == asked(app, parts["video"], parts["image"])


def test_options_are_those_of_the_request(app: RealApp, media: dict[str, Path]) -> None:
    part = image_part(data_url(media["image"], "image/png"))
    asked(app, named(part, "small"))
    smaller: JSON = {"mm_processor_kwargs": {"max_pixels": 4000}}
    assert asked(app, alone("image", "small"), **smaller) == asked(app, part, **smaller)
    frames = listed(drawn(5))
    asked(app, named(frames, "list"))
    times: JSON = {"media_io_kwargs": {"video": {"fps": 3.0, "frames_indices": [0, 2, 4, 6, 9]}}}
    assert asked(app, alone("video", "list"), **times) == asked(app, frames, **times)


def test_an_estimate_names_media_too(app: RealApp, media: dict[str, Path]) -> None:
    part = image_part(data_url(media["wide_image"], "image/png"))
    assert app.http.post("/v1/epd/estimate", json=body_of(named(part, "estimated"))).status_code == 200
    assert asked(app, alone("image", "estimated")) == asked(app, part)


def test_the_last_medium_of_a_name_counts(app: RealApp, media: dict[str, Path]) -> None:
    first, second = (image_part(data_url(media[name], "image/png")) for name in ("image", "wide_image"))
    asked(app, named(first, "door"))
    assert asked(app, named(second, "door")) == asked(app, second)
    assert asked(app, alone("image", "door")) == asked(app, second) != asked(app, first)


def test_names_belong_to_a_key_and_a_salt(app: RealApp, media: dict[str, Path]) -> None:
    asked(app, named(image_part(data_url(media["image"], "image/png")), "private"), cache_salt="mine")
    asked(app, alone("image", "private"), cache_salt="mine")
    for more in ({}, {"cache_salt": "yours"}):
        assert "received the uuid 'private' without image_url" in refusal(
            app, alone("image", "private"), **more
        )
    other = app.http.post(
        CHAT,
        json=body_of(alone("image", "private"), cache_salt="mine"),
        headers={"authorization": "Bearer two"},
    )
    assert other.status_code == 400
    assert "send it again with its URL" in other.json()["error"]["message"]
    assert other.json()["error"]["code"] == "unknown_uuid"


def test_a_name_is_of_a_kind(app: RealApp, media: dict[str, Path]) -> None:
    asked(app, named(image_part(data_url(media["image"], "image/png")), "picture"))
    assert "without video_url; allowed: one sent before" in refusal(app, alone("video", "picture"))


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (alone("image", "never sent"), "image, number 1 of the media: received the uuid 'never sent'"),
        (alone("video", "x" * MAX_UUID_CHARS), "x" * 60 + "' without video_url"),
        (alone("image", "x" * (MAX_UUID_CHARS + 1)), "content[0].uuid"),
        (alone("image", ""), "content[0].uuid"),
        ({"type": "image_url"}, "received neither a URL nor a uuid"),
        ({"type": "video_url", "video_url": None, "uuid": None}, "received neither a URL nor a uuid"),
        ({"type": "image_url", "image_url": {"url": ""}, "uuid": "x"}, "received neither a URL nor a uuid"),
        (alone("image", "x", image_url={}), "received the uuid 'x' without image_url"),
        ({"type": "image_url", "image_url": {}}, "received neither a URL nor a uuid"),
    ],
)
def test_what_names_nothing_is_refused(app: RealApp, part: JSON, words: str) -> None:
    assert words in refusal(app, part)


def test_a_medium_that_cannot_be_read_has_no_name(app: RealApp) -> None:
    refusal(app, named(image_part("data:image/png;base64,AAAA"), "broken"))
    assert "received the uuid 'broken'" in refusal(app, alone("image", "broken"))


def test_media_that_are_named_count_as_if_they_were_sent(app: RealApp, media: dict[str, Path]) -> None:
    url = data_url(media["video"], "video/mp4")
    asked(app, named(video_part(url), "counted"))
    few = int(100_000 / len(url)) + 1
    assert len(url) < 60_000
    assert "the body has more than 100000 bytes" in refusal(
        app, *[alone("video", "counted")] * few, status=413
    )


def reference(uuid: str, url: str, kind: MediaKind = "image") -> MediaReference:
    return MediaReference(kind, url, "the medium", uuid=uuid)


def test_what_is_kept_is_bounded_in_number_and_size() -> None:
    """Drawn names against a plain list; the newest are there, and no byte is lost."""
    store, draw = NamedMedia(max_media=8, max_bytes=1000), random.Random(3)
    space = namespace_of("", "")
    for _ in range(2000):
        uuid, url = f"{draw.randrange(20):02}", draw.choice("ab\u6f22") * draw.randint(1, 400)
        store.keep(space, [reference(uuid, url)])
        size = (1 if url.isascii() else 4) * len(url) + 2
        if size <= 250:
            assert store.found(space, [reference(uuid, "")]) == (reference(uuid, url),)
        assert len(store) <= 8
        assert store.num_bytes <= 1000
    left = [key for key in range(20) if _has(store, space, f"{key:02}")]
    assert len(left) == len(store)
    found = store.found(space, [reference(f"{key:02}", "") for key in left])
    assert store.num_bytes == sum((1 if x.url.isascii() else 4) * len(x.url) + 2 for x in found)


def _has(store: NamedMedia, space: bytes, uuid: str) -> bool:
    try:
        store.found(space, [reference(uuid, "")])
    except RequestError:
        return False
    return True


def test_the_one_that_was_asked_for_last_stays() -> None:
    store, space = NamedMedia(max_media=2, max_bytes=1000), namespace_of("", "")
    store.keep(space, [reference("a", "x"), reference("b", "x")])
    assert _has(store, space, "a")
    store.keep(space, [reference("c", "x")])
    assert [_has(store, space, uuid) for uuid in "abc"] == [True, False, True]


def test_namespaces_do_not_run_into_each_other() -> None:
    spaces = {namespace_of(*each) for each in (("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc"), ("", ""))}
    assert len(spaces) == 5


def test_a_client_with_many_names_loses_its_own() -> None:
    store = NamedMedia(max_media=8, max_bytes=1000)
    mine, theirs = namespace_of("", "mine"), namespace_of("", "theirs")
    store.keep(mine, [reference("a", "x"), reference("b", "x" * 200)], "me")
    for number in range(100):  # in spaces of its own, each with a name or two
        store.keep(namespace_of("", f"salt {number % 50}"), [reference(f"{number}", "x" * 240)], "other")
    assert [_has(store, mine, uuid) for uuid in "ab"] == [True, True]
    for number in range(100):
        store.keep(theirs, [reference(f"{number}", "")], "other")
    assert [_has(store, mine, uuid) for uuid in "ab"] == [True, True]
    assert store.num_bytes <= 1000
