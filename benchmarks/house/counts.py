"""Counts what the code consists of, and how long the sentences of the documents are.

    python -m benchmarks.house.counts [FOLDER]         the repository at FOLDER, by default this one

Prints a table in Markdown. Nothing is imported: files are parsed.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from benchmarks.reporting import table

PACKAGES = ("epd", "video", "encoders", "stages", "serve_app")
_MANY_METHODS, _MANY_PARAMETERS, _SMALL_LINES = 15, 7, 60
_Function = ast.FunctionDef | ast.AsyncFunctionDef
# A sentence ends with a mark, a space and a capital; "e.g." and numbers do not end one.
_SENTENCE = re.compile(r"(?<=[.!?:])\s+(?=[A-Z`*\[])")
_WORD = re.compile(r"[\w'./*_-]*\w[\w'./*_-]*")


def product_files(root: Path) -> list[Path]:
    """Returns the modules of the product. Links between its folders are not followed."""
    return [path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]


def module_name(path: Path, root: Path) -> str:
    """Returns a module's name as its folder has it, such as "video.sampling"."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(tree: ast.Module) -> Iterator[str]:
    """Yields dotted names that a module imports, as folders have them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            inner = name.removeprefix("epd.")
            yield inner if inner.split(".")[0] in PACKAGES[1:] else name


def importers(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Returns who imports each module of ours: the longest part of a name that is a module counts."""
    found: dict[str, set[str]] = defaultdict(set)
    for name, tree in trees.items():
        for imported in imports_of(tree):
            parts = imported.split(".")
            known = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
            module = next((each for each in known if each in trees), None)
            if module not in (None, name):
                found[str(module)].add(name)
    return found


def parameters(function: _Function) -> int:
    """Counts the parameters of a function, but for `self` and `cls`."""
    spec = function.args
    names = [each.arg for each in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def is_record(node: ast.ClassDef) -> bool:
    """Whether a class is a dataclass, a named tuple or a pydantic model, by its decorators and bases."""
    marks = [*node.decorator_list, *node.bases]
    return any(re.search(r"dataclass|NamedTuple|BaseModel", ast.unparse(each)) for each in marks)


def code_counts(root: Path) -> dict[str, int]:
    """Returns figures of the product's code."""
    files = product_files(root)
    trees = {module_name(path, root): ast.parse(path.read_text(encoding="utf-8")) for path in files}
    lines = {module_name(path, root): path.read_text(encoding="utf-8").count("\n") for path in files}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    functions = [node for node in nodes if isinstance(node, _Function)]
    once = [name for name, users in importers(trees).items() if len(users) == 1]
    methods = [sum(isinstance(each, _Function) for each in node.body) for node in classes]
    return {
        "product lines": sum(lines.values()),
        "product files": len(files),
        "classes": len(classes),
        "record types": sum(map(is_record, classes)),
        f"classes over {_MANY_METHODS} methods": sum(count > _MANY_METHODS for count in methods),
        f"constructors over {_MANY_PARAMETERS} parameters": sum(
            parameters(each) > _MANY_PARAMETERS for each in functions if each.name == "__init__"
        ),
        "longest parameter list, commands left out": max(
            parameters(each)
            for name, tree in trees.items()
            for each in ast.walk(tree)
            if isinstance(each, _Function) and ".cli." not in f"{name}."
        ),
        "modules that one other imports": len(once),
        f"of them under {_SMALL_LINES} lines": sum(lines[name] < _SMALL_LINES for name in once),
    }


def documents(root: Path) -> list[Path]:
    """Returns the documents that say what is: no log, no decisions, no list of changes."""
    past = {"log.md", "CHANGELOG.md"}
    found = [*root.glob("*.md"), *(root / "docs").glob("*.md"), *(root / "docs" / "how-to").glob("*.md")]
    return sorted(path for path in found if path.name not in past)


def prose(text: str) -> Iterator[str]:
    """Yields the paragraphs of a document, without code, tables, headings and lists' marks."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for block in re.split(r"\n\s*\n|^(?:[-*]|\d+\.) ", text, flags=re.MULTILINE):
        lines = [line for line in block.splitlines() if not line.lstrip().startswith(("|", "#", ">"))]
        if joined := " ".join(" ".join(lines).split()):
            yield joined


def sentence_lengths(text: str) -> list[int]:
    """Returns the words of each sentence of a document, longest last."""
    sentences = [one for block in prose(text) for one in _SENTENCE.split(block)]
    return sorted(count for one in sentences if (count := len(_WORD.findall(re.sub(r"\]\(.*?\)", "]", one)))))


def text_counts(root: Path) -> dict[str, int]:
    """Returns figures of the documents."""
    texts = [path.read_text(encoding="utf-8") for path in documents(root)]
    lengths = sorted(length for text in texts for length in sentence_lengths(text))
    every = [*(root / "docs").rglob("*.md"), *root.glob("*.md")]
    return {
        "documents, KB": sum(path.stat().st_size for path in every) // 1000,
        "sentences": len(lengths),
        "words of a sentence, median": lengths[len(lengths) // 2],
        "words of a sentence, 90th percentile": lengths[len(lengths) * 9 // 10],
        '"you" in 10,000 words': 10_000
        * sum(len(re.findall(r"\byou\b", text, flags=re.IGNORECASE)) for text in texts)
        // sum(len(text.split()) for text in texts),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path())
    root = parser.parse_args().folder
    figures = code_counts(root) | text_counts(root)
    print(table([{"what": name, "figure": value} for name, value in figures.items()]))


if __name__ == "__main__":
    main()
