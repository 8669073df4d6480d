"""Sets the limits of grammars: of what a client sends, of building one, and of each of its steps."""

from __future__ import annotations

from typing import Any

# Of a format as JSON: bytes, and how deep its lists and objects lie in each other.
MAX_FORMAT_BYTES = 1 << 17
MAX_DEPTH = 60
MAX_CHOICES = 4096
# Of a check, in a process of its own: CPU seconds to build, seconds of one mask, memory beyond the start.
MAX_BUILD_S = 1.0
MAX_MASK_S = 0.1
MAX_MEMORY_BYTES = 1 << 29

# Of an answer, as the library's LLParserLimits: what grows with a grammar is bounded when it is built and at
# every token.
PARSER_LIMITS: dict[str, Any] = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 10_000,
    "max_lexer_states": 10_000,
    "max_grammar_size": 200_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,  # the texts of errors reach clients and logs
}
