"""What a release and its project's page are made of: packages, workflows, forms."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
import zipfile
from base64 import urlsafe_b64encode
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import yaml

import epd
from tests import ROOT
from tests.deploy.release import sbom, twice

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
_TIME_S = 1_700_000_000  # of the commit, which is in all files; an archive has even seconds


def test_two_builds_of_a_wheel_have_equal_bytes(tmp_path: Path) -> None:
    wheel = twice(tmp_path / "one", _TIME_S)
    with zipfile.ZipFile(wheel) as archive:
        files = archive.infolist()
        names = [file.filename for file in files]
        record = archive.read(names[-1]).decode().splitlines()
        (name,) = (each for each in names if each.endswith(".dist-info/sboms/epd-vlm.cdx.json"))
        text = archive.read(name)
    assert [name for name in names if name.endswith("licenses/NOTICE")]
    digest = urlsafe_b64encode(sha256(text).digest()).rstrip(b"=").decode()
    assert f"{name},sha256={digest},{len(text)}" in record
    assert sorted(line.split(",")[0] for line in record) == sorted(names)
    assert json.loads(text) == sbom()
    assert {datetime(*file.date_time, tzinfo=UTC).timestamp() for file in files} == {_TIME_S}


def test_the_list_in_a_wheel_has_every_dependency_in_its_tested_version() -> None:
    listed = sbom()
    tested = re.findall(
        r"^\S+==[^\s;]+", (ROOT / "constraints-hashes.txt").read_text().replace("_", "-"), re.MULTILINE
    )
    parts = {each["name"]: each["version"] for each in listed["components"]}
    assert len(parts) == len(PROJECT["dependencies"])
    assert [name for name, version in parts.items() if f"{name}=={version}" not in tested] == []
    assert listed["metadata"]["component"]["purl"] == f"pkg:pypi/{PROJECT['name']}@{epd.__version__}"
    (edge,) = listed["dependencies"]
    assert edge["dependsOn"] == [each["purl"] for each in listed["components"]]


def jobs(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())["jobs"]
    return found


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_of_others_are_pinned_by_digest(path: Path) -> None:
    used = [step["uses"] for job in jobs(path).values() for step in job.get("steps", ()) if "uses" in step]
    assert used
    assert [each for each in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", each)] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_read_and_nothing_else_unless_a_job_says_so(path: Path) -> None:
    assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}
    for name, job in jobs(path).items():
        assert "uses" in job or job["timeout-minutes"] <= 90, name


def test_make_targets_of_workflows_are_there() -> None:
    made = {line.partition(":")[0] for line in (ROOT / "Makefile").read_text().splitlines()}
    steps = [step for path in WORKFLOWS for job in jobs(path).values() for step in job.get("steps", ())]
    named = {word for step in steps for word in re.findall(r"\bmake (\w+)", step.get("run", ""))}
    assert named
    assert named <= made


def test_the_tests_run_on_every_python_that_is_allowed() -> None:
    job = jobs(ROOT / ".github" / "workflows" / "test.yml")["test"]
    versions = job["strategy"]["matrix"]["python"]
    assert f">={versions[0]}" == PROJECT["requires-python"]
    assert versions == [f"3.{minor}" for minor in range(11, 11 + len(versions))]


@pytest.mark.parametrize(("tag", "code"), [(f"v{epd.__version__}", 0), ("v99.0.0", 1), (epd.__version__, 1)])
def test_a_tag_that_is_not_the_version_is_no_release(tag: str, code: int) -> None:
    steps = jobs(ROOT / ".github" / "workflows" / "release.yml")["build"]["steps"]
    (check,) = (step["run"] for step in steps if step.get("name") == "the tag is the version")
    done = subprocess.run(
        ["bash", "-c", check], cwd=ROOT, env={"GITHUB_REF_NAME": tag, "PATH": "/usr/bin:/bin"}
    )
    assert done.returncode == code


def test_hooks_before_a_commit_are_make_check() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    recipes = re.findall(
        r"^\t(?:nice )?\$\(BIN\)/(ruff.*|mypy.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    ours = [hook["entry"].removeprefix(".venv/bin/") for hook in hooks]
    assert ours == [
        recipe for recipe in recipes if recipe in ("ruff check .", "ruff format --check .", "mypy")
    ]


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_forms_ask_for_something(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    if path.stem == "config":
        return
    assert {"name", "description", "body"} <= set(form)
    ids = [field["id"] for field in form["body"]]
    assert len(set(ids)) == len(ids)
    assert any(field.get("validations", {}).get("required") for field in form["body"])


def test_the_citation_is_of_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (cited["version"], cited["license"]) == (epd.__version__, PROJECT["license"])
