"""Schemas of the objects that docs/deploy/chart makes, as far as it uses them, and the check against them.

    CRD=ray-operator/config/crd/bases/ray.io_rayservices.yaml
    git -C KUBERAY show v1.7.0:$CRD | python -m tests.deploy.schema
    python -m tests.deploy.schema DEFINITIONS PODMONITOR

The first writes tests/deploy/rayservice_schema.yaml again, the second object_schemas.yaml beside it: of
Kubernetes' `_definitions.json` and the CRD of PodMonitor in Prometheus' operator. Objects that the chart has
keep the names and types of all their fields; of objects that it has not, nothing below is kept, so a chart
that begins to use one needs the file written again: until then its contents are refused.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

from tests.deploy.chart import objects

FILE = Path(__file__).with_name("rayservice_schema.yaml")
OTHERS = Path(__file__).with_name("object_schemas.yaml")
ALL_ON = {
    name: {"enabled": True} for name in ("autoscaling", "podDisruptionBudget", "podMonitor", "dashboard")
}
_KINDS = {
    "ConfigMap": "io.k8s.api.core.v1.ConfigMap",
    "NetworkPolicy": "io.k8s.api.networking.v1.NetworkPolicy",
    "PodDisruptionBudget": "io.k8s.api.policy.v1.PodDisruptionBudget",
}
_KEPT = ("type", "enum", "required", "pattern", "minimum", "maximum", "minItems", "additionalProperties")
_END = "...\n"
_INT_OR_STRING, _ANY_FIELDS = "x-kubernetes-int-or-string", "x-kubernetes-preserve-unknown-fields"

Schema = Mapping[str, Any]


def violations(found: Mapping[str, Any]) -> list[str]:
    """What the schema of its kind says of an object; fields that it does not know are errors."""
    errors = _validator(found["kind"]).iter_errors(found)
    return [f"{error.json_path}: {error.message}" for error in errors]


@cache
def _validator(kind: str) -> Draft202012Validator:
    if kind == "RayService":
        return Draft202012Validator(_closed(yaml.safe_load(FILE.read_text(encoding="utf-8"))))
    return Draft202012Validator(_closed(yaml.safe_load(OTHERS.read_text(encoding="utf-8"))[kind]))


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
    if isinstance(schema.get("additionalProperties"), dict):
        kept["additionalProperties"] = pruned(schema["additionalProperties"], [])
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
            yield f"{indent}{name}: {' '.join(text.removesuffix(_END).split())}"


def _of_crd(crd: Any) -> Schema:
    (version,) = (each for each in crd["spec"]["versions"] if each["name"] == "v1")
    schema: Schema = version["schema"]["openAPIV3Schema"]
    return schema


def _resolved(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """The schema with what it refers to in its place, and with the first of several types."""
    if not isinstance(schema, dict):
        return schema
    name = schema.get("$ref", "").rpartition("/")[2]
    if name.endswith("IntOrString"):
        return {_INT_OR_STRING: True}
    whole = definitions[name] if name else schema
    found = {key: _resolved(value, definitions) for key, value in whole.items() if key != "properties"}
    if isinstance(found.get("type"), list):
        found["type"] = found["type"][0]
    if "properties" in whole:
        found["properties"] = {key: _resolved(each, definitions) for key, each in whole["properties"].items()}
    return found


def _write(file: Path, head: list[str], schema: Schema) -> None:
    lines = [f"# {line}" for line in (*head, "Written by tests/deploy/schema.py, which says how.")]
    file.write_text("\n".join([*lines, *_lines(schema)]) + "\n", encoding="utf-8")


def _with_metadata(schema: dict[str, Any]) -> dict[str, Any]:
    schema["properties"]["metadata"] = {"type": "object", _ANY_FIELDS: True}  # Kubernetes' own
    return schema


def main() -> None:
    shown = {each["kind"]: each for each in objects(ALL_ON)}
    if len(sys.argv) == 1:
        crd = "ray-operator/config/crd/bases/ray.io_rayservices.yaml"
        schema = _with_metadata(pruned(_of_crd(yaml.safe_load(sys.stdin)), [shown["RayService"]]))
        _write(FILE, [f"Part of {crd} of KubeRay 1.7.0 (v1; Apache-2.0)."], schema)
        return
    definitions = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["$defs"]
    schemas = {kind: _resolved(definitions[name], definitions) for kind, name in _KINDS.items()}
    schemas["PodMonitor"] = _of_crd(yaml.safe_load(Path(sys.argv[2]).read_text(encoding="utf-8")))
    head = ["Parts of the schemas of Kubernetes 1.37 and of Prometheus' operator 0.93 (both Apache-2.0)."]
    found = {kind: _with_metadata(pruned(each, [shown[kind]])) for kind, each in schemas.items()}
    _write(OTHERS, head, found)


if __name__ == "__main__":
    main()
