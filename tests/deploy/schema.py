"""KubeRay's schema of a RayService, as far as docs/deploy/kuberay.yaml uses it, and the check against it.

    CRD=ray-operator/config/crd/bases/ray.io_rayservices.yaml
    git -C KUBERAY show v1.7.0:$CRD | python -m tests.deploy.schema

writes tests/deploy/rayservice_schema.yaml again. Objects that the manifest has keep the names and types of
all their fields; of objects that it has not, nothing below is kept, so a manifest that begins to use one
needs the file written again: until then its contents are refused.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

from tests import ROOT

FILE = Path(__file__).with_name("rayservice_schema.yaml")
MANIFEST = ROOT / "docs" / "deploy" / "kuberay.yaml"
_KEPT = ("type", "enum", "required", "pattern", "minimum", "maximum", "minItems", "additionalProperties")
_INT_OR_STRING, _ANY_FIELDS = "x-kubernetes-int-or-string", "x-kubernetes-preserve-unknown-fields"

Schema = Mapping[str, Any]


def violations(service: object) -> list[str]:
    """What KubeRay's schema says of a RayService; fields that it does not know are errors."""
    validator = Draft202012Validator(_closed(yaml.safe_load(FILE.read_text(encoding="utf-8"))))
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(service)]


def _closed(schema: Schema) -> dict[str, Any]:
    """The schema in JSON Schema's own words, with no fields but those that are named."""
    closed = {name: value for name, value in schema.items() if not name.startswith("x-")}
    if schema.get(_INT_OR_STRING):
        closed["type"] = ["integer", "string"]
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            closed[name] = _closed(schema[name])
    if schema.get("type") == "object" and not schema.get(_ANY_FIELDS):
        closed["properties"] = {name: _closed(each) for name, each in schema.get("properties", {}).items()}
        closed.setdefault("additionalProperties", False)
    return closed


def pruned(schema: Schema, used: list[Any]) -> dict[str, Any]:
    """The schema, as far as these values use it."""
    kept = {name: schema[name] for name in (*_KEPT, _INT_OR_STRING, _ANY_FIELDS) if name in schema}
    if "items" in schema and used:
        kept["items"] = pruned(schema["items"], [each for value in used for each in value])
    if "properties" in schema and used:
        kept["properties"] = {
            name: pruned(below, [value[name] for value in used if name in value])
            for name, below in schema["properties"].items()
        }
    return kept


def _lines(schema: Schema, indent: str = "") -> Iterator[str]:
    """YAML, in which a field of which nothing below is kept takes one line."""
    for name, value in schema.items():
        if isinstance(value, dict) and any(isinstance(each, dict) and each for each in value.values()):
            yield f"{indent}{name}:"
            yield from _lines(value, indent + " ")
        else:
            text = yaml.safe_dump(value, default_flow_style=True, width=10_000)
            yield f"{indent}{name}: {text.splitlines()[0]}"


def main() -> None:
    crd = yaml.safe_load(sys.stdin)
    (version,) = (each for each in crd["spec"]["versions"] if each["name"] == "v1")
    service, _ = yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8"))
    schema = pruned(version["schema"]["openAPIV3Schema"], [service])
    schema["properties"]["metadata"][_ANY_FIELDS] = True  # Kubernetes' own, which no CRD describes
    head = [
        "# Part of ray-operator/config/crd/bases/ray.io_rayservices.yaml of KubeRay 1.7.0 (v1; Apache-2.0).",
        "# Written by tests/deploy/schema.py, which says how.",
    ]
    FILE.write_text("\n".join([*head, *_lines(schema)]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
