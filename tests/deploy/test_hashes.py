"""Constraints with hashes: from what pip says that it would install."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deploy.hashes import lines


def package(name: str, version: str, **source: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "version": version}, "download_info": source}


def archive(digest: str) -> dict[str, Any]:
    return {"url": "https://index.example/a.whl", "archive_info": {"hashes": {"sha256": digest}}}


def test_each_package_has_its_version_and_hash_and_no_index_is_named() -> None:
    own = package("epd-vlm", "0.1.0", url="file:///here", dir_info={})
    found = lines(
        {"install": [package("Ray", "2.60.0", **archive("bb")), own, package("av", "18", **archive("aa"))]}
    )
    assert found == ["av==18 --hash=sha256:aa", "ray==2.60.0 --hash=sha256:bb"]


def test_what_has_no_hash_is_told() -> None:
    with pytest.raises(ValueError, match="av 18 has no sha256"):
        lines({"install": [package("av", "18", url="https://index.example", vcs_info={})]})
