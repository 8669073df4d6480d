"""Gives the classes of records of options: pydantic's, or plain ones where it is not installed.

A machine with torch, transformers and triton alone can compute and measure (`make gpu`). The plain ones have
defaults, and their values are not checked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

__all__ = [
    "BaseModel",
    "ConfigDict",
    "ErrorDetails",
    "Field",
    "PydanticCustomError",
    "ValidationError",
    "ValidationInfo",
    "field_validator",
]


@dataclass(frozen=True, slots=True)
class _Default:
    """One field of a plain record."""

    default: Any = None


def _field(*, default: Any = None, **_: Any) -> Any:
    """Declares a field with its default; bounds and descriptions are for commands, which need pydantic."""
    return _Default(default)


def _unchecked(*_: Any, **__: Any) -> Callable[[Any], Any]:
    """Decorates a check that is not made."""
    return lambda check: check


class _NeverRaisedError(ValueError):
    """Stands for pydantic's errors."""


class PlainModel:
    """A record whose fields are class variables made by `Field`."""

    model_fields: ClassVar[dict[str, _Default]] = {}

    def __init_subclass__(cls) -> None:
        own = {name: value for name, value in vars(cls).items() if isinstance(value, _Default)}
        cls.model_fields = {**cls.model_fields, **own}

    def __init__(self, **values: Any) -> None:
        unknown = values.keys() - self.model_fields.keys()
        if unknown:
            raise TypeError(f"unknown options: {', '.join(sorted(unknown))}")
        for name, field in self.model_fields.items():
            setattr(self, name, values.get(name, field.default))

    @classmethod
    def model_validate(cls, values: Any) -> Self:
        return cls(**values)

    def model_copy(self, *, update: Any) -> Self:
        return type(self)(**{name: getattr(self, name) for name in self.model_fields} | dict(update))


try:
    from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
    from pydantic_core import ErrorDetails, PydanticCustomError
except ModuleNotFoundError:
    if not TYPE_CHECKING:
        BaseModel, ConfigDict, Field, field_validator = PlainModel, dict, _field, _unchecked
        ErrorDetails, ValidationInfo = dict, object
        PydanticCustomError = ValidationError = _NeverRaisedError
