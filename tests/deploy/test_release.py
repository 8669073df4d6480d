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
from jsonschema import Draft202012Validator

import epd
from tests import ROOT
from tests.deploy.release import before_the_tag, sbom, twice

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
SCHEMAS = yaml.safe_load((ROOT / "tests" / "deploy" / "github_schemas.yaml").read_text())
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


READY = {
    "epd/__init__.py": '__version__ = "0.3.0"\n',
    "CHANGELOG.md": "## [Unreleased]\n\n## [0.3.0] - 2026-12-01\n\n- A.\n\n## [0.2.0] - 2026-11-27\n\n- B.\n",
    "CITATION.cff": "version: 0.3.0\n",
    "docs/deploy/chart/Chart.yaml": "version: 0.3.0\nappVersion: 0.3.0\n",
    "docs/openapi.json": '{"info": {"version": "0.3.0"}}\n',
}


def git(folder: Path, *words: str) -> None:
    named = [
        "-c",
        "user.name=a",
        "-c",
        "user.email=a@example.org",
        "-c",
        "tag.gpgSign=false",
        "-c",
        "commit.gpgSign=false",
    ]
    subprocess.run(["git", *named, *words], cwd=folder, check=True, stdout=subprocess.DEVNULL)


def committed(folder: Path, changed: dict[str, str]) -> Path:
    """A repository that is ready for the tag v0.3.0, but for these files."""
    git(folder, "init", "--quiet")
    for name, text in {**READY, **changed}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "Begin")
    return folder


def test_a_repository_that_is_ready_lacks_nothing_and_so_does_its_tag(tmp_path: Path) -> None:
    ready = committed(tmp_path, {})
    assert before_the_tag(ready) == []
    git(ready, "tag", "v0.3.0")
    assert before_the_tag(ready) == []
    git(ready, "commit", "--quiet", "--allow-empty", "--message", "Go on")
    assert before_the_tag(ready) == ["v0.3.0 is the tag of an older commit: raise the version"]


@pytest.mark.parametrize(
    ("name", "text", "lacks"),
    [
        ("CITATION.cff", "version: 0.2.0\n", "CITATION.cff is of another version than 0.3.0"),
        ("docs/openapi.json", '{"version": "0.3.1"}', "docs/openapi.json is of another version than 0.3.0"),
        (
            "CHANGELOG.md",
            "## [Unreleased]\n\n### Added\n\n- A.\n- B.\n\n## [0.3.0] - 2026-12-01\n\n- C.\n",
            "CHANGELOG.md lists 2 changes as unreleased: they belong below 0.3.0",
        ),
        (
            "CHANGELOG.md",
            "## [0.2.0] - 2026-11-27\n",
            "CHANGELOG.md has no heading such as: ## [0.3.0] - 2026-01-31",
        ),
    ],
)  # fmt: skip
def test_what_a_release_lacks_is_told(tmp_path: Path, name: str, text: str, lacks: str) -> None:
    assert before_the_tag(committed(tmp_path, {name: text})) == [lacks]


def test_files_that_no_commit_has_are_told(tmp_path: Path) -> None:
    (committed(tmp_path, {}) / "CITATION.cff").write_text("version: 0.3.0 # new\n")
    assert before_the_tag(tmp_path) == [
        "CITATION.cff is of another version than 0.3.0",
        "some files differ from the last commit",
    ]


def test_a_release_stops_where_something_is_missing() -> None:
    steps = [
        step.get("run", "") for step in jobs(ROOT / ".github" / "workflows" / "release.yml")["build"]["steps"]
    ]
    assert steps.index("make release") < steps.index(".venv/bin/python -m tests.deploy.release --ready")


def jobs(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())["jobs"]
    return found


def refused(kind: str, found: Any) -> list[str]:
    """What is wrong of a file of .github. PyYAML reads the key `on` as true."""
    if isinstance(found, dict) and True in found:
        found = {**found, "on": found[True]}
        del found[True]
    return [
        f"{each.json_path}: {each.message}" for each in Draft202012Validator(SCHEMAS[kind]).iter_errors(found)
    ]


DEPENDABOT = ROOT / ".github" / "dependabot.yml"
GITHUB = [("workflow", path) for path in WORKFLOWS] + [
    ("form", path) for path in FORMS if path.stem != "config"
]


@pytest.mark.parametrize(("kind", "path"), [*GITHUB, ("dependabot", DEPENDABOT)], ids=str)
def test_files_for_the_page_have_the_keys_that_it_reads(kind: str, path: Path) -> None:
    assert refused(kind, yaml.safe_load(path.read_text())) == []


@pytest.mark.parametrize("key", ["runs-on", "timeout-minutes", "steps"])
def test_a_wrong_key_of_a_workflow_is_seen(key: str) -> None:
    found = yaml.safe_load(WORKFLOWS[-1].read_text())
    job = found["jobs"]["site"]
    job[f"{key}s"] = job.pop(key)
    assert len(refused("workflow", found)) == 1


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_job_waits_for_jobs_that_are_there(path: Path) -> None:
    found = jobs(path)
    assert [job["needs"] for job in found.values() if job.get("needs", "") not in {"", *found}] == []
    for job in found.values():
        inside = job.get("uses", "").removeprefix("./")
        assert not inside or (ROOT / inside).is_file()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_only_a_job_that_pushes_keeps_the_token(path: Path) -> None:
    for job in jobs(path).values():
        steps = job.get("steps", ())
        kept = [step["with"]["persist-credentials"] for step in steps if "checkout@" in step.get("uses", "")]
        assert kept in ([], [job.get("permissions") == {"contents": "write"}])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_what_others_wrote_is_no_part_of_a_command(path: Path) -> None:
    """A name of a branch or a tag comes as a variable: in a command it could be one."""
    runs = [step.get("run", "") for job in jobs(path).values() for step in job.get("steps", ())]
    assert [run for run in runs if "${{" in run] == []


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
