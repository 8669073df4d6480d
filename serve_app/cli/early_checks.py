"""Finds what is wrong with what was asked before anything slow is imported. Says what a model knows."""

from __future__ import annotations

from pathlib import Path

from epd import console
from epd.models import find_model, knowledge_line, knowledge_of, served_name


def say_knowledge(model: Path | str | None) -> None:
    """Says on stderr what the model knows, where its card says that this is little."""
    found = find_model(model)
    knows = knowledge_of(found) if isinstance(found, Path) else None
    if knows is not None:
        console.note(knowledge_line(served_name(model), knows))
