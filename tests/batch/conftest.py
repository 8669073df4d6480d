"""The object store of tests of batches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.batch.object_store import ObjectStore, object_store_on_loopback


@pytest.fixture(scope="session")
def _object_store() -> Iterator[ObjectStore]:
    with object_store_on_loopback() as store:
        yield store


@pytest.fixture
def object_store(_object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """Empty, and named by this process's environment."""
    for name in _object_store.names():
        _object_store.client.delete_object(Bucket=_object_store.bucket, Key=name)
    for name, value in _object_store.environment.items():
        monkeypatch.setenv(name, value)
    return _object_store
