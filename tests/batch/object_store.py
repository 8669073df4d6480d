"""An object store on loopback, which the environment of this process names."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import boto3
from moto.server import ThreadedMotoServer

REGION = "eu-west-3"


@dataclass(frozen=True)
class ObjectStore:
    """environment: of processes that use the store."""

    url: str
    bucket: str
    client: Any

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "se/cr+et",
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_ENDPOINT_URL": self.url,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def put(self, name: str, data: bytes) -> str:
        """Returns the URI of the new object."""
        self.client.put_object(Bucket=self.bucket, Key=name, Body=data)
        return f"s3://{self.bucket}/{name}"

    def names(self) -> list[str]:
        return [each["Key"] for each in self.client.list_objects_v2(Bucket=self.bucket).get("Contents", [])]


@contextmanager
def object_store_on_loopback() -> Iterator[ObjectStore]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        _, port = server.get_host_and_port()
        url = f"http://127.0.0.1:{port}"
        client = boto3.client(
            "s3",
            region_name=REGION,
            endpoint_url=url,
            aws_access_key_id="key",
            aws_secret_access_key="se/cr+et",
        )
        client.create_bucket(Bucket="videos", CreateBucketConfiguration={"LocationConstraint": REGION})
        yield ObjectStore(url, "videos", client)
        client.close()
    finally:
        server.stop()
