"""Constraints with hashes: from what pip says that it would install."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests import ROOT
from tests.deploy.hashes import HEAD, lines
from tests.deploy.test_image import STAGES


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


def test_the_image_takes_the_tested_versions_by_their_hashes() -> None:
    """Of each package one archive, and no address: pip asks the index that it is configured for."""
    text = (ROOT / "constraints-hashes.txt").read_text()
    assert text.startswith(HEAD)
    kept = dict[str, str]()
    for line in text.removeprefix(HEAD).splitlines():
        found = re.fullmatch(r"([a-z0-9._-]+)==([\w.+!]+) --hash=sha256:[0-9a-f]{64}", line)
        assert found is not None, line
        kept[found[1].replace("_", "-")] = found[2]
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    tested = (each.split("==") for each in constraints if "==" in each)
    both = {name: (version, kept[name]) for name, version in tested if name in kept}
    assert {"torch", "av", "transformers", "ray", "pillow", "fastapi"} <= both.keys()
    assert all(one == other for one, other in both.values()), both
    steps = [step.rest for step in STAGES["cpu"].steps]
    assert any("--require-hashes -r /wheels/constraints-hashes.txt" in step for step in steps)
