"""Gives the classes of records of options: pydantic's, or plain ones where it is not installed.

A machine with torch, transformers and triton alone can compute and measure (`make gpu`). Values are
not checked there.
"""

from __future__ import annotations

try:
    from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
    from pydantic_core import ErrorDetails, PydanticCustomError
except ModuleNotFoundError:
    from epd.plain_records import (  # type: ignore[assignment, no-redef]
        BaseModel,
        ConfigDict,
        ErrorDetails,
        Field,
        PydanticCustomError,
        ValidationError,
        ValidationInfo,
        field_validator,
    )

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
