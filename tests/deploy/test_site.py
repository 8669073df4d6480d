"""The site: each page of the documents stands in one list, llms.txt has them all, versions lie side by side.

`make site` makes it with Sphinx, which the tests have not, and fails where a link is dead.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import epd
from tests import ROOT

sys.path.insert(0, str(ROOT / "docs" / "site"))

from contents import listed, pages
from links import dead
from versions import versions, write

ELSEWHERE = ("docs/decisions/", "docs/log/", "docs/site/")


def test_every_page_is_on_the_site_once() -> None:
    documents = {str(path.relative_to(ROOT).with_suffix("")) for path in (ROOT / "docs").rglob("*.md")}
    expected = {page for page in documents if not page.startswith(ELSEWHERE)}
    found = pages()
    assert len(found) == len(set(found))
    assert expected - set(found) == set()
    assert [page for page in found if not Path(ROOT / f"{page}.md").exists()] == []


def test_models_read_what_each_page_is_for() -> None:
    text = listed()
    lines = [line for line in text.splitlines() if line.startswith("- [")]
    assert len(lines) == len(pages())
    assert text.startswith("# epd\n\n> Ask questions about images and long videos.")
    assert "- [Serve a model on one GPU](docs/how-to/serve-one-gpu.html): You have one GPU" in text
    assert [line for line in lines if line.endswith("): .")] == []


def made(folder: Path, *names: str) -> Path:
    """A site with these versions, each of one page."""
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "index.html").write_text('<p id="here"><a href="../versions.html">others</a>')
    return folder


def test_the_newest_version_comes_first_by_number(tmp_path: Path) -> None:
    site = made(tmp_path, "0.2.0", "0.10.0", "0.9.1", "_static")
    write(site)
    assert versions(site) == ["0.10.0", "0.9.1", "0.2.0"]
    assert 'content="0; url=0.10.0/index.html"' in (site / "index.html").read_text()
    assert "refresh" not in (site / "versions.html").read_text()
    assert dead(site) == []


def test_a_folder_without_a_version_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="run `make site`"):
        write(made(tmp_path, "next"))


@pytest.mark.parametrize(
    "link", ["away.html", "0.2.0/", "#there", "0.2.0/index.html#there", "../a.html", "?q#x"]
)
def test_a_dead_link_is_found(tmp_path: Path, link: str) -> None:
    (tmp_path / "0.2.0").mkdir()
    (tmp_path / "0.2.0" / "index.htm").touch()
    (tmp_path / "0.2.0" / "index.html").write_text('<p id="here">') if "index" in link else None
    (tmp_path / "page.html").write_text(f'<a href="{link}">')
    assert dead(tmp_path) == [f"page.html: {link}"]


def test_links_that_lead_somewhere_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "a b.html").write_text('<p id="the-end"><a name="old">')
    links = [
        "a%20b.html#the-end",
        "a%20b.html#old",
        "https://example.org/none",
        "mailto:a@example.org",
        "page.html",
        ".",
    ]
    (tmp_path / "index.html").touch()
    (tmp_path / "page.html").write_text("".join(f'<a href="{link}">' for link in links))
    assert dead(tmp_path) == []


def git(folder: Path, *words: str) -> str:
    named = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "init.defaultBranch=main"]
    done = subprocess.run(["git", *named, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


def released(repository: Path, version: str) -> None:
    """What the workflow of a release does, after `make site`."""
    (repository / "epd").mkdir(exist_ok=True)
    (repository / "epd" / "__init__.py").write_text(f'__version__ = "{version}"\n')
    made(repository / "build" / "site", version)
    (repository / "build" / "site" / version / "_static").mkdir()
    (repository / "build" / "site" / version / "_static" / "a.css").touch()
    names = {
        f"GIT_{who}_{what}": f"a@{what}" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }
    script = repository / "docs" / "site" / "publish.sh"
    subprocess.run(["bash", str(script)], env={**os.environ, **names}, check=True)


def test_a_release_adds_its_version_beside_the_others(tmp_path: Path) -> None:
    """The branch has the sites alone, whatever the repository holds and ignores."""
    origin, repository = tmp_path / "origin", tmp_path / "repository"
    git(tmp_path, "init", "--bare", str(origin))
    git(tmp_path, "clone", str(origin), str(repository))
    (repository / "docs" / "site").mkdir(parents=True)
    for name in ("publish.sh", "versions.py"):
        shutil.copy(ROOT / "docs" / "site" / name, repository / "docs" / "site" / name)
    (repository / ".gitignore").write_text("build/\n_static/\n")
    git(repository, "add", ".")
    git(repository, "commit", "--message", "Begin")
    for version in ("0.9.0", "0.10.0", "0.10.0"):
        shutil.rmtree(repository / "build", ignore_errors=True)
        released(repository, version)
    files = git(origin, "ls-tree", "-r", "--name-only", "gh-pages").split()
    each = [
        f"{version}/{name}" for version in ("0.10.0", "0.9.0") for name in ("_static/a.css", "index.html")
    ]
    assert files == [".nojekyll", *each, "index.html", "versions.html"]
    assert "url=0.10.0/" in git(origin, "show", "gh-pages:index.html")
    assert git(repository, "worktree", "list").count("\n") == 1


def test_make_site_makes_the_version_that_the_release_publishes() -> None:
    command = ["make", "--dry-run", "--always-make", "site"]
    steps = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert steps[-3].endswith(f"-c docs/site . build/site/{epd.__version__}")
    assert "--fail-on-warning" in steps[-3]
    assert [line.split()[1:] for line in steps[-2:]] == [
        ["docs/site/versions.py", "build/site"],
        ["docs/site/links.py", "build/site"],
    ]
