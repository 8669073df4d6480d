"""The families of `tests/encoders`."""

from tests.encoders.conftest import families, family

__all__ = ["families", "family"]
