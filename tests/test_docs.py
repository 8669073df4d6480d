"""Documents name only things that exist: files, make targets, commands of the program, training steps."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
from pathlib import Path

import pytest
from typer.main import get_command

from epd.serve_app.cli.program import app
from tests import ROOT
from tests.modules_page import PACKAGES, page

# Folders whose files a document may name; other words with a slash are not meant as paths.
_FOLDERS = ("epd", "video", "encoders", "stages", "serve_app", "tests", "benchmarks", "docs", "training")
_LOG = ("docs/log.md", "docs/log/")
# These say what was, by the names of their day.
_PAST = (*_LOG, "docs/decisions/", "CHANGELOG.md")


def _documents() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split()]


def _code_of(text: str) -> str:
    """Everything in back-ticks and code blocks."""
    return "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, flags=re.DOTALL))


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return {str(path.relative_to(ROOT)): path.read_text() for path in _documents()}


def test_paths_exist(texts: dict[str, str]) -> None:
    pattern = re.compile(rf"(?<![\w/.-])((?:{'|'.join(_FOLDERS)})/[\w./-]+)")
    named = {
        (doc, path.rstrip("."))
        for doc, text in texts.items()
        if not doc.startswith((*_LOG, "CHANGELOG.md"))  # history may name what was
        for path in pattern.findall(_code_of(text))
    }
    assert len(named) > 5
    assert [entry for entry in sorted(named) if not (ROOT / entry[1]).exists()] == []


def test_symbols_are_defined_where_documents_say(texts: dict[str, str]) -> None:
    """Of each "`Symbol` in `path.py`"; history may name what was."""
    found = [
        (doc, symbol, path)
        for doc, text in texts.items()
        if not doc.startswith(_LOG)
        for symbol, path in re.findall(r"`(\w+)`\s+in\s+`([\w/]+\.py)`", text)
    ]
    assert len(found) > 20
    definition = r"^\s*(?:(?:async )?def|class) {0}\b|^\s*{0}(?::.*)? = |^\s+{0}: "
    assert [
        entry
        for entry in found
        if not re.search(definition.format(entry[1]), (ROOT / entry[2]).read_text(), flags=re.MULTILINE)
    ] == []


CHANGES = (
    "a model family", "a reduction method before the language model", "a reduction method inside of prefill",
    "how requests are routed", "a scheduling policy", "eviction of the encoder cache", "a transport",
    "an HTTP parameter", "a flag of `epd serve`", "a metric", "a wrong timestamp",
    "an option of the engine, for every command",
    "the prompt's order", "audio", "an error or its HTTP status",
)  # fmt: skip


def test_every_change_has_a_file_to_open(texts: dict[str, str]) -> None:
    table = texts["ARCHITECTURE.md"].split("## To change X, open Y")[1].split("\n## ")[0]
    rows = {row.split("|")[1].strip(): row.split("|")[2] for row in table.splitlines() if "`" in row}
    assert set(rows) == set(CHANGES)
    assert [change for change, first in rows.items() if not re.search(r"in `[\w/]+\.py`", first)] == []


def test_every_room_is_on_the_map(texts: dict[str, str]) -> None:
    table = texts["ARCHITECTURE.md"].split("## The rooms")[1].split("\n## ")[0]
    rooms = {path.parent for package in PACKAGES for path in (ROOT / package).glob("*/__init__.py")}
    rooms = {room for room in rooms if not room.is_symlink()}  # the other packages, in `epd/`
    shown = set(re.findall(r"^\| `([\w/]+)/` \|", table, flags=re.MULTILINE))
    assert {str(room.relative_to(ROOT)) for room in rooms} <= shown
    assert [room for room in shown if not (ROOT / room).is_dir()] == []
    first = re.findall(r"^\| `([\w/]+)/` \|.*\| `([\w/.]+)` \|$", table, flags=re.MULTILINE)
    assert len(first) > 40
    assert [path for path in first if not ROOT.joinpath(*path).is_file()] == []


def test_the_list_of_modules_has_each_in_one_sentence() -> None:
    """`make modules` prints it, so no module is found nowhere."""
    printed = page()
    listed = dict(re.findall(r"^- `([\w/]+\.py)`: (.*)$", printed, flags=re.MULTILINE))
    files = {path for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    modules = {path for path in files if path.name != "__init__.py"}
    assert set(listed) == {str(path.relative_to(ROOT)) for path in modules}
    assert [name for name, sentence in listed.items() if not re.search(r"[.:]$", sentence)] == []
    rooms = re.findall(r"^## `([\w/]+)`\n\n(.*)$", printed, flags=re.MULTILINE)
    assert {room for room, _ in rooms} == {str(path.parent.relative_to(ROOT)) for path in files}
    assert [room for room, sentence in rooms if not re.search(r"[.:]$", sentence)] == []


def test_links_lead_to_files(texts: dict[str, str]) -> None:
    for doc, text in texts.items():
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            assert ((ROOT / doc).parent / target).exists(), f"{doc} links to {target}"


def test_tables_are_whole(texts: dict[str, str]) -> None:
    """A blank line within a table makes text of the rows behind it."""
    for doc, text in texts.items():
        runs = re.findall(r"(?:^\|.*\n?)+", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), flags=re.M)
        assert [run for run in runs if not re.match(r"\|.*\n\|[-:| ]+\|\n", run)] == [], doc


def _anchor(heading: str) -> str:
    """Returns the name by which a link reaches a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-")


def test_links_lead_to_headings(texts: dict[str, str]) -> None:
    found = [
        (doc, target, anchor)
        for doc, text in texts.items()
        for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", text)
    ]
    assert len(found) > 5
    for doc, target, anchor in found:
        page = ((ROOT / doc).parent / target if target else ROOT / doc).read_text(encoding="utf-8")
        headings = re.findall(r"^#+ (.+)$", page, flags=re.MULTILINE)
        assert anchor in map(_anchor, headings), f"{doc} links to {target}#{anchor}"


def test_make_targets_exist(texts: dict[str, str]) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = {name for text in texts.values() for name in re.findall(r"\bmake ([a-z-]+)", _code_of(text))}
    assert named
    assert named <= targets


def test_make_names_the_files_of_all_timed_tests() -> None:
    """Those of another file would never run."""
    (line,) = re.findall(r"^TIMED +:= (.+)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    marked = r"^(?:pytestmark = |@)pytest\.mark\.timed$"
    files = [
        path for path in (ROOT / "tests").rglob("test_*.py") if re.search(marked, path.read_text(), re.M)
    ]
    assert {str(path.relative_to(ROOT)) for path in files} == set(line.split())


_MINUTES = (
    r"\b(\d+|half a|an?|one|two|three|four|five|six|seven|eight|nine|ten|twelve|fifteen|twenty) (min|hour)"
)


def test_how_long_targets_take_is_written_in_one_place(texts: dict[str, str]) -> None:
    """In the table of CONTRIBUTING.md; the log has what was measured on which day."""
    assert not re.search(_MINUTES, (ROOT / "Makefile").read_text())
    assert re.search(rf"^\| `make test` .*{_MINUTES}", texts["CONTRIBUTING.md"], flags=re.MULTILINE)
    others = [text for name, text in texts.items() if not name.startswith(("CONTRIBUTING.md", *_LOG))]
    lines = [line for text in others for line in text.splitlines()]
    assert [line for line in lines if re.search(rf"`make [a-z-]+`.*{_MINUTES}", line)] == []


def test_figures_about_video_are_those_of_the_results(texts: dict[str, str]) -> None:
    page, results = texts["docs/video.md"], texts["benchmarks/results/video_decode.md"]
    (num_cells,) = re.findall(r"all (\d+)\s+cells", page)
    assert int(num_cells) == len(re.findall(r"^\| (?:h264|hevc) ", results, flags=re.MULTILINE))
    cells = re.findall(r"^\| (h264|hevc) .* min \| (\S+) \|.*\*\*(\S+)\*\*", results, flags=re.MULTILINE)
    for codec, row in re.findall(r"^\| (H\.264|HEVC) \| (.+) \|$", page, flags=re.MULTILINE):
        ratios: dict[str, list[float]] = {}
        for name, gap, ratio in cells:
            if name == codec.replace(".", "").lower():
                ratios.setdefault(gap, []).append(float(ratio))
        wanted = [statistics.median(each) for each in ratios.values()]
        assert [float(each) for each in row.split(" | ")] == pytest.approx(wanted, abs=0.0051), codec
    hour = r"first group after (\S+) s, (\S+) % of (?:the whole )?(\d+)"
    assert re.findall(hour, page) == re.findall(hour, results)
    assert re.findall(r"first group of frames ready \| (\S+) ", texts["README.md"]) == [
        re.findall(hour, results)[0][0]
    ]


def test_what_runs_on_a_gpu_is_not_denied(texts: dict[str, str]) -> None:
    """Models, pools and frames are where `--device` says, and kernels run there: on one GPU, not several."""
    assert "--device" in flags_of("serve") & flags_of("ask")
    denied = r"no command (?:takes|puts)|nothing (?:else |here )?(?:can )?runs? on a GPU|can run on a GPU"
    assert [doc for doc, text in _today(texts) if re.search(denied, text, flags=re.IGNORECASE)] == []
    code = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    said = [*_today(texts), *((path.name, path.read_text(encoding="utf-8")) for path in code)]
    denied = r"no GPU has run|none has run it|epd serve runs 1\b"
    found = [name for name, text in said if re.search(denied, _joined(text), flags=re.IGNORECASE)]
    # Several GPUs for one worker, and the list of all that none has run.
    assert set(found) <= {"docs/deployment.md", "docs/models.md"}


def test_figures_of_a_gpu_are_those_of_the_results(texts: dict[str, str]) -> None:
    """README's table has here and transformers' own modules, of one H100."""
    results = json.loads((ROOT / "benchmarks" / "results" / "gpu.json").read_text(encoding="utf-8"))
    assert not any(results[section]["problem"] for section in results if section != "setting")
    steps = {row["requests"]: row for row in results["replays"]["rows"] if row["what"] == "step"}
    peers = {
        (row["what"], row.get("units", row.get("requests"))): row["ms"] for row in results["peers"]["rows"]
    }
    (tower,) = (row["tower ms"] for row in results["encode"]["rows"] if row["units"] == 64)
    first = min(row["first token s"] for row in results["first_token"]["rows"])
    theirs = peers["transformers' tower", 64]
    rows = [f"| {first:.1f} s |", f"| {tower:.0f} ms | {theirs:.0f} ms |"]
    for number in (1, 32):
        compiled = peers["transformers' decode, compiled", number]
        rows.append(f"| {steps[number]['replayed ms']:.1f} ms | {compiled:.1f} ms, compiled |")
    assert [row for row in rows if row not in texts["README.md"]] == []


def test_only_published_figures_cut_shards(texts: dict[str, str]) -> None:
    """The server and its simulation give one group after the other to the least loaded encoder."""
    live = [path for name in ("serve_app", "stages", "epd/simulate") for path in (ROOT / name).rglob("*.py")]
    assert [path for path in live if "plan_shards" in path.read_text(encoding="utf-8")] == []
    named = {doc for doc, text in _today(texts) if "plan_shards" in text}
    assert named == {"docs/encoders.md"}
    assert "`plan_shards` of `benchmarks/published/sharding.py`" in texts["docs/encoders.md"]


def test_every_decision_says_when_it_was_made_and_what_took_its_place(texts: dict[str, str]) -> None:
    decisions = {doc: text for doc, text in texts.items() if doc.startswith("docs/decisions/")}
    numbers = [int(Path(doc).name[:4]) for doc in sorted(decisions)]
    assert numbers == list(range(1, len(numbers) + 1))
    for number, (doc, text) in zip(numbers, sorted(decisions.items()), strict=True):
        assert re.match(rf"# 0*{number}[.:] ", text), doc
        assert re.search(r"^\*\*Decided\*\* \d{4}-\d\d-\d\d\.", text, flags=re.MULTILINE), doc
        for other in re.findall(r"Takes the place of \[decision (\d+)\]", text):
            former = decisions[sorted(decisions)[int(other) - 1]]
            assert re.search(rf"(?:Superseded|Replaced)\b.* by \[decision {number}\]", former), (doc, other)


def _today(texts: dict[str, str]) -> list[tuple[str, str]]:
    """Documents that say what is, each in one line: not the log, decisions and changes."""
    return [(doc, _joined(text)) for doc, text in texts.items() if not doc.startswith(_PAST)]


def _joined(text: str) -> str:
    return " ".join(text.split())


def flags_of(command: str) -> set[str]:
    """Those of a command, and of the commands below it, such as `epd keys new` and `epd bench compare`."""
    commands = getattr(get_command(app), "commands", {})
    found = [each for name, each in commands.items() if name == command or name.startswith(f"{command} ")]
    options = [
        *(option for each in found for option in each.params),
        *(option for part in getattr(found[0], "commands", {}).values() for option in part.params),
    ]
    return {flag for option in options for flag in (*option.opts, *option.secondary_opts)}


def test_commands_exist(texts: dict[str, str]) -> None:
    commands = set(getattr(get_command(app), "commands", {}))
    named = {
        name
        for text in texts.values()
        for name in re.findall(r"(?<!from )\bepd ([a-z][a-z-]+)", _code_of(text))
    }
    assert {"ask", "demo-video"} <= named
    assert named <= commands


def test_flags_exist(texts: dict[str, str]) -> None:
    """Of each `epd COMMAND ...` in code, up to what the shell takes for the next command or a comment."""
    program = get_command(app)
    flags = {name: flags_of(name) | {"--help"} for name in getattr(program, "commands", {})}
    unknown, num_found = [], 0
    for doc, text in texts.items():
        code = _code_of(text).replace("\\\n", " ")
        for command, rest in re.findall(r"\bepd ([a-z][a-z-]+)([^\n`|;#]*)", code):
            found = re.findall(r"(?<![\w-])--[a-z][\w-]*", rest)
            num_found += len(found)
            unknown += [(doc, command, flag) for flag in found if flag not in flags[command]]
    assert num_found > 20
    assert unknown == []


def test_flags_that_stand_alone_exist(texts: dict[str, str]) -> None:
    """Of any command, or of a script of ours. Not those of other programs, nor of a log of what was tried."""
    ours = {flag for name in getattr(get_command(app), "commands", {}) for flag in flags_of(name)}
    scripts = [
        path.read_text()
        for name in ("benchmarks", "training", "tests/faults")
        for path in (ROOT / name).rglob("*.*")
        if path.suffix in (".py", ".sh")
    ]
    docker = {"--shm-size", "--rm", "--gpus", "--target", "--build-arg", "--security-opt", "--stop-timeout"}
    docker |= {"--add-host"}
    ray_start = {"--head"}
    others = {"--help", *docker, *ray_start}
    named = {
        (doc, flag)
        for doc, text in texts.items()
        if not doc.startswith(_LOG)
        for flag in re.findall(r"(?<![\w-])--[a-z][\w-]+", _code_of(text))
    }
    assert len(named) > 50
    assert [
        entry
        for entry in sorted(named)
        if entry[1] not in ours | others and not any(entry[1] in script for script in scripts)
    ] == []


def test_modules_that_are_run_exist(texts: dict[str, str]) -> None:
    modules = {
        name
        for doc, text in texts.items()
        if not doc.startswith(_PAST)
        for name in re.findall(r"python -m ([a-z_.]+)", _code_of(text))
    }
    for module in modules:
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
