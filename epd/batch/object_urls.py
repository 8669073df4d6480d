"""Turns s3:// and gs:// URIs of media into URLs that a server reads for an hour or two without credentials.

    s3://bucket/a.mp4  ->  https://bucket.s3.eu-west-3.amazonaws.com/a.mp4?X-Amz-Expires=...&X-Amz-Signature=...

The process that asks signs, and knows the credentials. Who reads media has the URL of one object alone.
Without credentials the URL is that of a public object. A URL stays the same for some minutes, so that
questions about one object are about one URL.

Source: AWS Signature Version 4, query parameters. Google's stores take it too, with an HMAC key.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any
from urllib.parse import quote, urlsplit

from epd.batch.places import REMOTE, is_remote
from epd.errors import RequestError

_VALID_S = 7200
_SAME_S = 900
_DEFAULT_REGION = "us-east-1"
_GOOGLE = "https://storage.googleapis.com"


@dataclass(frozen=True, slots=True)
class Credentials:
    """Holds a key of a store. token: of a session that ends."""

    access_key: str
    secret: str = field(repr=False)
    token: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class _Store:
    """Is where objects are. host_url: without the bucket. has_bucket_host: whether it is part of the host."""

    host_url: str
    region: str
    credentials: Credentials | None
    has_bucket_host: bool = False


def endpoint_url(environment: Mapping[str, str] = os.environ) -> str | None:
    """Returns where s3:// objects are, None for AWS."""
    return environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")


def url_of(uri: str, *, now_s: float | None = None, environment: Mapping[str, str] = os.environ) -> str:
    """Returns the URL of an object, signed with the credentials of this process. now_s: since 1970.

    Raises RequestError for a URI without a bucket or an object.
    """
    scheme, _, rest = uri.partition("://")
    bucket, _, key = rest.partition("/")
    if f"{scheme}://" not in REMOTE or not bucket or not key:
        raise RequestError(f"received {uri[:100]!r}; allowed: s3://BUCKET/OBJECT, gs://BUCKET/OBJECT")
    store = _google(environment) if scheme == "gs" else _amazon(environment)
    base, path = store.host_url, f"/{quote(bucket)}/{quote(key)}"
    if store.has_bucket_host and "." not in bucket:  # a certificate covers one name below the host
        base, path = base.replace("://", f"://{bucket}."), f"/{quote(key)}"
    query = "" if store.credentials is None else _query(base, path, store, now_s or time.time())
    return f"{base}{path}{query}"


def _amazon(environment: Mapping[str, str]) -> _Store:
    region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or _DEFAULT_REGION
    own = endpoint_url(environment)
    host_url = own.rstrip("/") if own else f"https://s3.{region}.amazonaws.com"
    return _Store(host_url, region, _amazon_key(environment), has_bucket_host=not own)


def _amazon_key(environment: Mapping[str, str]) -> Credentials | None:
    """Returns the key of the environment, or the one that botocore finds, such as a machine's role."""
    access_key, secret = environment.get("AWS_ACCESS_KEY_ID"), environment.get("AWS_SECRET_ACCESS_KEY")
    if access_key and secret:
        return Credentials(access_key, secret, environment.get("AWS_SESSION_TOKEN", ""))
    try:
        found = import_module("botocore.session").get_session().get_credentials()
    except ImportError:
        return None
    key = None if found is None else found.get_frozen_credentials()
    return None if key is None else Credentials(key.access_key, key.secret_key, key.token or "")


def _google(environment: Mapping[str, str]) -> _Store:
    access_key, secret = environment.get("GS_ACCESS_KEY_ID"), environment.get("GS_SECRET_ACCESS_KEY")
    return _Store(_GOOGLE, "auto", Credentials(access_key, secret) if access_key and secret else None)


def _query(base: str, path: str, store: _Store, now_s: float) -> str:
    """Returns the query that lets anybody read one object until it expires."""
    assert store.credentials is not None
    at = time.gmtime(now_s // _SAME_S * _SAME_S)
    day, moment = time.strftime("%Y%m%d", at), time.strftime("%Y%m%dT%H%M%SZ", at)
    scope = f"{day}/{store.region}/s3/aws4_request"
    fields = {
        "X-Amz-Algorithm": "AWS4-HMAC-SHA256",
        "X-Amz-Credential": f"{store.credentials.access_key}/{scope}",
        "X-Amz-Date": moment,
        "X-Amz-Expires": str(_VALID_S),
        "X-Amz-SignedHeaders": "host",
    }
    if store.credentials.token:
        fields["X-Amz-Security-Token"] = store.credentials.token
    query = "&".join(f"{name}={quote(value, safe='')}" for name, value in sorted(fields.items()))
    asked = f"GET\n{path}\n{query}\nhost:{urlsplit(base).netloc}\n\nhost\nUNSIGNED-PAYLOAD"
    text = f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{hashlib.sha256(asked.encode()).hexdigest()}"
    key = f"AWS4{store.credentials.secret}".encode()
    for part in (day, store.region, "s3", "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    return f"?{query}&X-Amz-Signature={hmac.new(key, text.encode(), 'sha256').hexdigest()}"


def with_urls(value: Any) -> Any:
    """Returns the body of a request with the URLs of objects for their URIs; itself if there are none."""
    if isinstance(value, str):
        return url_of(value) if is_remote(value) else value
    if isinstance(value, list):
        return [with_urls(each) for each in value]
    if isinstance(value, dict):
        return {
            name: each if name in ("text", "question") else with_urls(each) for name, each in value.items()
        }
    return value
