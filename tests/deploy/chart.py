"""Renders docs/deploy/chart as Helm does, as far as its templates go; docs/deploy/kuberay.yaml is made by it.

    python -m tests.deploy.chart

Helm itself is in no package that the tests could use.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml
from jsonschema import Draft202012Validator

from tests import ROOT

CHART = ROOT / "docs" / "deploy" / "chart"
MANIFEST = ROOT / "docs" / "deploy" / "kuberay.yaml"
# The manifest holds what is on without any value given.
_SHOWN = ("rayservice", "networkpolicy")
DEFAULTS: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
_SCHEMA = json.loads((CHART / "values.schema.json").read_text())
_ACTION = re.compile(r"(\s*{{-|{{)\s*(.*?)\s*(-}}\s*|}})", re.DOTALL)
_TOKEN = re.compile(r'"[^"]*"|-?\d[\d.]*|[$.]?[\w.]+|:=|[()|=.]')

Values = Mapping[str, Any]


def merged(below: Values, above: Values) -> dict[str, Any]:
    """Returns values with those above in the place of those below, object by object."""
    both = {
        name: merged(below[name], value) if isinstance(value, dict) and name in below else value
        for name, value in above.items()
    }
    return {**below, **both}


def refusals(values: Values) -> list[str]:
    """Returns what the chart's schema says of values, above its defaults."""
    errors = Draft202012Validator(_SCHEMA).iter_errors(merged(DEFAULTS, values))
    return [f"{error.json_path}: {error.message}" for error in errors]


def objects(values: Values, release: str = "epd") -> list[dict[str, Any]]:
    """Returns the objects that a release consists of."""
    texts = (rendered(path.stem, values, release) for path in sorted((CHART / "templates").glob("*.yaml")))
    return [found for text in texts if (found := yaml.load(text, yaml.CSafeLoader)) is not None]


def rendered(name: str, values: Values, release: str = "epd") -> str:
    """Returns the text of a template. Raises ValueError for what is not read here."""
    known = {"Values": merged(DEFAULTS, values), "Release": {"Name": release}}
    text = (CHART / "templates" / f"{name}.yaml").read_text()
    return _Run(list(_pieces(text)), known).until_end()[0]


def _pieces(text: str) -> Iterator[tuple[bool, str]]:
    """Yields texts and actions. A dash takes the white space beside it."""
    at, eats = 0, False
    for match in _ACTION.finditer(text):
        before = text[at : match.start()]
        yield False, before.lstrip() if eats else before
        yield True, match[2]
        at, eats = match.end(), match[3].startswith("-")
    yield False, text[at:].lstrip() if eats else text[at:]


@dataclass(slots=True)
class _Run:
    """Goes through pieces once. names: variables."""

    pieces: list[tuple[bool, str]]
    known: Values
    names: dict[str, Any] = field(default_factory=dict)
    at: int = 0

    def until_end(self, *, is_live: bool = True) -> tuple[str, str]:
        """Returns what is written up to the `end` or `else` of this level, and which of them it is."""
        written = ""
        while self.at < len(self.pieces):
            is_action, text = self.pieces[self.at]
            self.at += 1
            word, _, rest = text.partition(" ")
            if not is_action:
                written += text
            elif text in ("end", "else"):
                return written, text
            elif word in ("if", "range"):
                written += self._if(rest, is_live) if word == "if" else self._range(rest, is_live)
            elif is_live and not text.startswith("/*"):
                written += self._line(text)
        return written, ""

    def _if(self, condition: str, is_live: bool) -> str:
        holds = is_live and bool(self.value(condition))
        written, end = self.until_end(is_live=holds)
        other = self.until_end(is_live=is_live and not holds)[0] if end == "else" else ""
        return written if holds else other

    def _range(self, over: str, is_live: bool) -> str:
        start, written = self.at, ""
        for item in self.value(over) if is_live else ():
            self.at, outer = start, self.known
            self.known = {**outer, "": item}
            written += self.until_end()[0]
            self.known = outer
        if not is_live:
            self.until_end(is_live=False)
        return written

    def _line(self, text: str) -> str:
        if found := re.match(r"(\$\w+) :?= (.*)", text, re.DOTALL):
            self.names[found[1]] = self.value(found[2])
            return ""
        return _text(self.value(text))

    def value(self, text: str) -> Any:
        return self._pipe(_TOKEN.findall(text))

    def _pipe(self, tokens: list[str]) -> Any:
        """Takes the tokens up to a closing parenthesis; each command gets the value before it as its last."""
        before: list[Any] = []
        command: list[Any] = []
        while tokens:
            token = tokens.pop(0)
            if token == ")":
                break
            if token == "|":
                before, command = [_called(command, before)], []
            else:
                command.append(self._pipe(tokens) if token == "(" else self._operand(token))
        return _called(command, before)

    def _operand(self, token: str) -> Any:
        if token.startswith('"'):
            return token[1:-1]
        if token.startswith("$"):
            return self.names[token]
        if token == ".Files.Get":
            return lambda name: (CHART / name).read_text()
        if token.startswith("."):
            found: Any = self.known
            for part in token[1:].split("."):
                found = found[part]
            return found
        return FUNCTIONS[token] if token in FUNCTIONS else json.loads(token)


def _called(command: list[Any], before: list[Any]) -> Any:
    head, *arguments = command
    return head(*arguments, *before) if callable(head) else head


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


# Those of Helm that the templates use.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": lambda *each: sum(map(int, each)),
    "mul": lambda *each: math.prod(map(int, each)),
    "div": lambda one, other: int(one) // int(other),
    "mulf": lambda *each: math.prod(map(float, each)),
    "divf": lambda one, other: float(one) / float(other),
    "max": lambda *each: max(map(int, each)),
    "ceil": math.ceil,
    "int": int,
    "dict": lambda *each: dict(zip(each[::2], each[1::2], strict=True)),
    "merge": lambda above, below: {**below, **above},
    "quote": lambda value: json.dumps(_text(value), ensure_ascii=False),
    "toJson": lambda value: json.dumps(value, sort_keys=True),
    "regexFindAll": lambda pattern, text, _most: re.findall(pattern, text),
}


def manifest() -> str:
    """Returns what the chart gives without any value, in one file."""
    return "---\n".join(rendered(name, {}).strip("\n") + "\n" for name in _SHOWN)


if __name__ == "__main__":
    MANIFEST.write_text(manifest(), encoding="utf-8")
