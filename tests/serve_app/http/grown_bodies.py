"""Grows a corpus of requests: each is a known one with one thing bent, and stays if it reaches new code."""

from __future__ import annotations

import copy
import json
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tests.serve_app.conftest import JSON, image_part
from tests.serve_app.hostile import _NUMBERS, _OTHERS, png, url_of

TESTS = str(Path(__file__).parents[2])
ROOT = str(Path(__file__).parents[3])
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BATCH_LINE = "a line of a batch"


@dataclass(frozen=True, slots=True)
class Case:
    """A body for a route, or for a line of a batch."""

    path: str
    body: JSON

    def line(self) -> str:
        return json.dumps([self.path, self.body])


def _asked(content: Any = "What is it?", **more: Any) -> JSON:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 3, **more}


_SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["a", 1, None]},
        "sizes": {"type": "array", "items": {"$ref": "#/$defs/size"}, "minItems": 1, "maxItems": 3},
        "name": {"anyOf": [{"type": "string", "pattern": "^[a-z]{1,4}$"}, {"type": "null"}]},
    },
    "required": ["kind"],
    "additionalProperties": False,
    "$defs": {"size": {"type": "integer", "minimum": 0, "multipleOf": 2}},
}
_TOOL = {"type": "function", "function": {"name": "look", "description": "x", "parameters": _SCHEMA}}


def seeds() -> list[Case]:
    """Valid ones of every kind."""
    picture = image_part(url_of("image/png", png(8, 8)))
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"kind": "a"}'}}
    talk = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "Look."}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "a circle"},
    ]
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Look."}]},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "a circle"},
    ]
    drawing = {"temperature": 1.0, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3, "n": 2}
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA}}
    chats = [
        _asked(**drawing, logit_bias={"5": 1.0}, bad_words=["red"], repetition_penalty=1.1),
        _asked(stop=["."], stop_token_ids=[3], min_tokens=1, ignore_eos=True, logprobs=True, top_logprobs=2),
        _asked(stream=True, stream_options={"include_usage": True}, priority=1, cache_salt="s"),
        _asked([picture, {"type": "text", "text": "?"}], mm_processor_kwargs={"max_pixels": 99999}),
        _asked([{**picture, "uuid": "door"}, "What?"], epd={"retention": 0.5, "reduction": "balanced"}),
        _asked(response_format=schema),
        _asked(structured_outputs={"regex": "[0-9]{2}(a|b)*"}),
        _asked(structured_outputs={"grammar": 'start: "a" word\nword: /[a-z]+/'}),
        {"messages": talk, "tools": [_TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    ]
    return [
        *(Case(CHAT, each) for each in chats),
        Case(BATCH_LINE, {"custom_id": "1", "method": "POST", "url": CHAT, "body": chats[3]}),
        Case(BATCH_LINE, {"id": 1, "images": ["a.png"], "question": "What?", "fps": 1.0, "max_tokens": 3}),
        Case(COMPLETIONS, {"prompt": ["a", "b"], "n": 2, "echo": True, "max_tokens": 0}),
        Case(COMPLETIONS, {"prompt": [[1, 2], [3]], "max_tokens": 2, "stream": True}),
        Case(RESPONSES, {"input": items, "tools": [{"type": "function", **_TOOL["function"]}]}),  # type: ignore[dict-item]
        Case(RESPONSES, {"input": "a", "text": {"format": {"type": "json_object"}}, "metadata": {"a": "b"}}),
        Case("/v1/epd/estimate", chats[3]),
        Case("/tokenize", {"messages": talk[:2], "return_token_strs": True}),
        Case("/detokenize", {"tokens": [1, 2, 3]}),
    ]


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each list or object with a key of it."""
    for key in (
        list(value) if isinstance(value, dict) else range(len(value) if isinstance(value, list) else 0)
    ):
        yield value, key
        yield from _places(value[key])


def _near(random_: random.Random, value: Any) -> Any:
    """Something like it."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        return random_.choice((value + 1, value - 1, -value, value * 1000, float(value), str(value)))
    if isinstance(value, str):
        cut = random_.randrange(len(value) + 1)
        inserted = random_.choice(("\0", "é", "\ud83d", '"', "\\", "{", "\n", "9"))
        return random_.choice((value[:cut], value[cut:], value[:cut] + inserted + value[cut:], value * 3))
    return [value] if random_.random() < 0.5 else next(iter(value), None)


def bent(random_: random.Random, corpus: list[Case]) -> Case:
    """One of the corpus with one thing bent."""
    case = random_.choice(corpus)
    body = copy.deepcopy(case.body)
    holder, key = random_.choice(list(_places(body)))
    others = [there[name] for each in corpus for there, name in _places(each.body) if name == key]
    match random_.randrange(5):
        case 0:
            holder[key] = _near(random_, holder[key])
        case 1:
            holder[key] = random_.choice(_NUMBERS if random_.random() < 0.5 else _OTHERS)
        case 2:
            holder[key] = copy.deepcopy(random_.choice(others))
        case 3 if isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        case 3:
            there, name = random_.choice(list(_places(random_.choice(corpus).body)))
            holder[str(name)] = copy.deepcopy(there[name])
        case _:
            del holder[key]
    return Case(case.path, body)


@dataclass
class Lines:
    """The lines of the product that ran in this thread."""

    seen: set[tuple[CodeType, int]] = field(default_factory=set)
    num_new: int = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts those that run in the block and never ran before."""
        num_before = len(self.seen)
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(None)
            self.num_new = len(self.seen) - num_before

    def _called(self, frame: FrameType, _event: str, _argument: object) -> Any:
        name = frame.f_code.co_filename
        return self._ran if name.startswith(ROOT) and not name.startswith(TESTS) else None

    def _ran(self, frame: FrameType, _event: str, _argument: object) -> Any:
        self.seen.add((frame.f_code, frame.f_lineno))
        return self._ran
