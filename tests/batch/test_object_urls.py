"""URLs of objects are signed as Amazon's own library signs them, and a store takes them."""

from __future__ import annotations

import datetime
from typing import Any

import httpx
import pytest
from botocore.auth import S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials as AmazonKey

from epd.batch.object_urls import url_of, with_urls
from epd.errors import RequestError
from tests.batch.object_store import ObjectStore

_KEYS = {"AWS_ACCESS_KEY_ID": "AKID", "AWS_SECRET_ACCESS_KEY": "s/e+c", "AWS_REGION": "eu-west-3"}
_NOW_S = 1_800_000_123.0
_NAMES = ["a.mp4", "a dir/ü+~*'().mp4", "x/../y?z=1&q.mp4", "%20"]


def signed_by_amazon(url: str, token: str, monkeypatch: pytest.MonkeyPatch) -> str:
    at = datetime.datetime.fromtimestamp(_NOW_S // 900 * 900, datetime.UTC)
    monkeypatch.setattr("botocore.auth.get_current_datetime", lambda **_: at)
    request: Any = AWSRequest("GET", url)
    key = AmazonKey("AKID", "s/e+c", token or None)
    S3SigV4QueryAuth(key, "s3", "eu-west-3", expires=7200).add_auth(request)
    return str(request.url)


@pytest.mark.parametrize("token", ["", "to/k=en"])
@pytest.mark.parametrize("endpoint", ["", "http://127.0.0.1:9000"])
@pytest.mark.parametrize("name", _NAMES)
def test_a_url_is_signed_as_amazons_library_signs_it(
    name: str, endpoint: str, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {**_KEYS, "AWS_SESSION_TOKEN": token, "AWS_ENDPOINT_URL": endpoint}
    found = url_of(f"s3://bucket/{name}", now_s=_NOW_S, environment=environment)
    start = f"{endpoint}/bucket/" if endpoint else "https://bucket.s3.eu-west-3.amazonaws.com/"
    assert found.startswith(start)
    expected = signed_by_amazon(found.partition("?")[0], token, monkeypatch)
    assert dict(httpx.URL(found).params) == dict(httpx.URL(expected).params)
    assert "s/e+c" not in found


def test_a_store_gives_the_object_to_who_has_the_url(object_store: ObjectStore) -> None:
    for name in _NAMES[:2]:
        object_store.put(name, name.encode())
        assert httpx.get(url_of(f"s3://{object_store.bucket}/{name}"), timeout=None).content == name.encode()


def test_questions_about_an_object_are_about_one_url() -> None:
    urls = [url_of("s3://b/a.mp4", now_s=second, environment=_KEYS) for second in (1000, 1799, 1800)]
    assert urls[0] == urls[1] != urls[2]


def test_without_credentials_the_object_is_public(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("botocore.session.Session.get_credentials", lambda _: None)
    assert url_of("s3://a.b/c d", environment={}) == "https://s3.us-east-1.amazonaws.com/a.b/c%20d"
    assert url_of("gs://bucket/c", environment={}) == "https://storage.googleapis.com/bucket/c"


def test_a_key_of_google_signs_too() -> None:
    keys = {"GS_ACCESS_KEY_ID": "GOOG", "GS_SECRET_ACCESS_KEY": "x"}
    found = url_of("gs://bucket/c", now_s=_NOW_S, environment=keys)
    assert found.startswith("https://storage.googleapis.com/bucket/c?X-Amz-Algorithm=AWS4-HMAC-SHA256&")
    assert "GOOG%2F20270115%2Fauto%2Fs3%2Faws4_request" in found


@pytest.mark.parametrize("uri", ["s3://bucket", "s3:///key", "gs://bucket/"])
def test_a_uri_without_an_object_is_refused(uri: str) -> None:
    with pytest.raises(RequestError, match="allowed: s3://BUCKET/OBJECT"):
        url_of(uri)


def test_only_media_of_a_body_are_turned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    content = [
        {"type": "video_url", "video_url": {"url": "s3://b/a.mp4"}},
        {"type": "text", "text": "s3://b/a.mp4"},
    ]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 3}
    video, text = with_urls(body)["messages"][0]["content"]
    assert video["video_url"]["url"].startswith("https://b.s3.")
    assert text == content[1]
    assert content[0]["video_url"] == {"url": "s3://b/a.mp4"}
