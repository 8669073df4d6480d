"""Reads and writes profiles as JSON, with units in every name and validation, and finds them by name.

A name such as qwen2.5-vl-7b@h100 is computed, anything else is read as a file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from epd.errors import RequestError
from epd.profiles.accelerators import CATALOGUE, Devices
from epd.profiles.analytic import analytic_profile
from epd.profiles.profile import Profile

_UNITS = {
    "seconds": "fixed + max(floor + experts * (1 - (1 - active_share) ** units), per_unit * units) "
    "+ read * units + per_item * items; units and items are named per stage",
    "names": "_s seconds, _bytes bytes, per_hour currency; spread_s lies between the quartiles",
}


class _ProfileFile(BaseModel):
    """Validates a file: unknown fields are refused, in the inner dataclasses too, since they inherit this."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["epd profile, version 1"]
    units: dict[str, str] = {}
    profile: Profile

    @field_validator("profile", mode="before")
    @classmethod
    def _without_empty_host(cls, profile: Any) -> Any:
        """Drops what files of version 0.2 have, of a machine that all workers shared."""
        is_empty = isinstance(profile, dict) and profile.get("host", "") is None
        return {name: value for name, value in profile.items() if name != "host"} if is_empty else profile


def dump_profile(profile: Profile) -> str:
    """Returns the profile as JSON, one to a file."""
    file = _ProfileFile(format="epd profile, version 1", units=_UNITS, profile=profile)
    return file.model_dump_json(indent=1) + "\n"


def parse_profile(text: str, name: str = "profile") -> Profile:
    """Parses `dump_profile`'s output. Raises RequestError for unknown fields, bad values or invalid JSON."""
    try:
        return _ProfileFile.model_validate_json(text).profile
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise RequestError(f"{name}: {where}: {first['msg']}; write a profile with epd profile") from None


def load_profile(
    name_or_path: str,
    devices: Devices = CATALOGUE,
    kv_cache_dtype: str = "auto",
    quantization: str | None = None,
) -> Profile:
    """Loads a profile by name (MODEL@DEVICE) or from a file. Raises RequestError.

    devices: known by name.
    kv_cache_dtype, quantization: of a profile that is computed. A file says its own.
    """
    path = Path(name_or_path)
    model, separator, device = name_or_path.rpartition("@")
    if separator and not path.exists():
        return analytic_profile(device, model, None, devices, kv_cache_dtype, quantization)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise RequestError(
            f"profile {name_or_path!r} is neither a file that can be read nor MODEL@DEVICE; "
            "try qwen2.5-vl-7b@h100"
        ) from None
    return parse_profile(text, repr(name_or_path))
