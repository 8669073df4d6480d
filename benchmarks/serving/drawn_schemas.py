"""Draws JSON schemas whose documents are short however wild the model is.

Numbers with decimals, and times, are left to enumerations: a schema does not bound how many decimals they
have.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

_MAX_DEPTH = 3
_PATTERNS = ("^[a-z]{1,6}$", "^(red|blue)-[0-9]{2}$", "^[A-F0-9]{4}$", "^x?(ab|cd){1,3}$")
_FORMATS = ("date", "uuid", "ipv4")
_CONSTANTS: tuple[Any, ...] = ("ü\n\"'\\", 0, -7, 12.5, True, None, ["a", 1], {"k": [None, {"z": "🙂"}]})


def drawn_schema(rng: random.Random) -> Schema:
    """Returns a schema, of an object more often than not."""
    definitions = {f"d{i}": _drawn(rng, 2, ()) for i in range(rng.randint(0, 2))}
    names = tuple(definitions)
    schema = _object(rng, 0, names) if rng.random() < 0.7 else _drawn(rng, 0, names)
    return {**schema, "$defs": definitions} if definitions else schema


def _drawn(rng: random.Random, depth: int, names: tuple[str, ...]) -> Schema:
    kinds: list[Callable[[random.Random, int, tuple[str, ...]], Schema]] = [_number, _text, _listed, _plain]
    if depth < _MAX_DEPTH:
        kinds += [_object, _object, _array, _either]
    if names:
        kinds.append(lambda rng, _depth, names: {"$ref": f"#/$defs/{rng.choice(names)}"})
    return rng.choice(kinds)(rng, depth, names)


def _number(rng: random.Random, _depth: int, _names: tuple[str, ...]) -> Schema:
    low = rng.randint(-1000, 1000)
    high = low + rng.randint(10, 5000)
    bounds = rng.choice([("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")])
    schema: Schema = {"type": "integer", bounds[0]: low, bounds[1]: high}
    return schema | ({"multipleOf": rng.choice([2, 5, 7])} if rng.random() < 0.3 else {})


def _text(rng: random.Random, _depth: int, _names: tuple[str, ...]) -> Schema:
    how = rng.random()
    if how < 0.25:
        return {"type": "string", "pattern": rng.choice(_PATTERNS)}
    if how < 0.4:
        return {"type": "string", "format": rng.choice(_FORMATS)}
    least = rng.randint(0, 4)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 12)}


def _listed(rng: random.Random, _depth: int, _names: tuple[str, ...]) -> Schema:
    if rng.random() < 0.4:
        return {"const": rng.choice(_CONSTANTS)}
    return {"enum": rng.sample(_CONSTANTS, rng.randint(1, 4))}


def _plain(rng: random.Random, _depth: int, _names: tuple[str, ...]) -> Schema:
    return {"type": rng.choice(["boolean", "null", ["boolean", "null"]])}


def _object(rng: random.Random, depth: int, names: tuple[str, ...]) -> Schema:
    properties = {
        rng.choice(["name", "Größe", "a b", 'q"q', "x"]) + str(i): _drawn(rng, depth + 1, names)
        for i in range(rng.randint(0, 4))
    }
    required = [name for name in properties if rng.random() < 0.6]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int, names: tuple[str, ...]) -> Schema:
    first = [_drawn(rng, depth + 1, names) for _ in range(rng.choice([0, 0, 1, 2]))]
    least = rng.randint(0, 2)
    schema: Schema = {
        "type": "array",
        "items": _drawn(rng, depth + 1, names),
        "minItems": least,
        "maxItems": len(first) + least + rng.randint(0, 2),
    }
    return schema | ({"prefixItems": first} if first else {})


def _either(rng: random.Random, depth: int, names: tuple[str, ...]) -> Schema:
    return {"anyOf": [_drawn(rng, depth + 1, names) for _ in range(rng.randint(1, 3))]}
