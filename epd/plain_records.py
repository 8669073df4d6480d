"""Stands in for pydantic where it is not installed: records with defaults, whose values are not checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

ConfigDict = dict
ErrorDetails = dict
ValidationInfo = object


class ValidationError(ValueError):
    """Is never raised here."""


class PydanticCustomError(ValueError):
    """Is never raised here."""


@dataclass(frozen=True, slots=True)
class _Default:
    """One field of a record."""

    default: Any = None


def Field(*, default: Any = None, **_: Any) -> Any:
    """Declares a field with its default; bounds and descriptions are for commands, which need pydantic."""
    return _Default(default)


def field_validator(*_: Any, **__: Any) -> Callable[[Any], Any]:
    """Decorates a check that is not made."""
    return lambda check: check


class BaseModel:
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
