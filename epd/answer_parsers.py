"""Names how answers are read, as vLLM does: what a model thought first, and the functions that it calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from epd.errors import RequestError

# The marks around what a model thinks, by parser.
REASONING_PARSERS: Mapping[str, tuple[str, str]] = {
    "deepseek_r1": ("<think>", "</think>"),
    "glm45": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "qwen3": ("<think>", "</think>"),
}
# Those whose models begin with a thought, even if neither prompt nor answer says so.
ALWAYS_THINKING = frozenset({"deepseek_r1"})
TOOL_CALL_PARSERS = ("glm45", "glm47", "hermes", "qwen3_coder", "qwen3_xml")


def check_parser(option: str, name: str) -> None:
    """Raises RequestError for a name that is not known. option: reasoning_parser or tool_call_parser."""
    known = REASONING_PARSERS if option == "reasoning_parser" else TOOL_CALL_PARSERS
    if name not in known:
        raise RequestError(
            f"received the {option} {name[:64]!r}; allowed: {', '.join(known)}; use one of these"
        )


def tool_call_parser_of(template: str) -> str:
    """Returns the parser of the calls that a chat template shows; hermes where it shows no other."""
    if "<function=" in template and "<parameter=" in template:
        return "qwen3_coder"
    return "glm45" if "<arg_key>" in template and "<arg_value>" in template else "hermes"


@dataclass(frozen=True, slots=True)
class AnswerParsing:
    """Says how the answers to a request are read.

    reasoning, calls: parsers; None to find none
    schemas: of the parameters of the functions that may be called, by their names
    """

    reasoning: str | None = None
    calls: str | None = None
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
