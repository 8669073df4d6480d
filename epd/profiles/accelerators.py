"""Lists devices as their data sheets describe them; users add theirs in a YAML file.

A profile that is computed for a device scales these figures by stated efficiencies: nothing was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml  # type: ignore[import-untyped]  # its stubs are another package

from epd.errors import RequestError
from epd.records import BaseModel, ConfigDict, Field, ValidationError

_GIGA, _TERA = 10**9, 10**12


class Device(BaseModel):
    """Describes a device, under the names that a YAML file has.

    tflops: dense, 16 bit. link_gb_s: to others of one machine, in one direction
    cores: threads of the CPU that its share of a machine has, which decode videos
    price_per_hour: on demand, typical of clouds; an assumption, to be replaced
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    tflops: float = Field(gt=0)
    memory_gb: float = Field(gt=0)
    bandwidth_gb_s: float = Field(gt=0)
    link_gb_s: float = Field(gt=0)
    power_w: float = Field(gt=0)
    price_per_hour: float = Field(gt=0)
    currency: str = "USD"
    cores: int = Field(default=24, ge=1)

    @property
    def flops_per_s(self) -> float:
        return self.tflops * _TERA

    @property
    def memory_bytes(self) -> int:
        return round(self.memory_gb * _GIGA)

    @property
    def memory_bytes_per_s(self) -> float:
        return self.bandwidth_gb_s * _GIGA

    @property
    def link_bytes_per_s(self) -> float:
        return self.link_gb_s * _GIGA


def _device(
    tflops: float, memory_gb: float, bandwidth_gb_s: float, link_gb_s: float, power_w: float, price: float,
    cores: int = 24,
) -> Device:  # fmt: skip
    return Device(
        tflops=tflops,
        memory_gb=memory_gb,
        bandwidth_gb_s=bandwidth_gb_s,
        link_gb_s=link_gb_s,
        power_w=power_w,
        price_per_hour=price,
        cores=cores,
    )


DEVICES: Mapping[str, Device] = {
    "a100-80gb": _device(312, 80, 2039, 300, 400, 1.8, cores=12),
    "h100": _device(989, 80, 3350, 450, 700, 3.0),
    "h200": _device(989, 141, 4800, 450, 700, 3.8),
    "b200": _device(2250, 180, 8000, 900, 1000, 5.5),
    "gb200": _device(2500, 199, 8000, 900, 1200, 6.5),
    "l40s": _device(362, 48, 864, 32, 350, 1.0),
    "l4": _device(121, 24, 300, 32, 72, 0.7),
    "a10g": _device(70, 24, 600, 32, 300, 0.9),
}


class _DeviceFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    devices: dict[str, Device]


@dataclass(frozen=True, slots=True)
class Devices:
    """Finds devices by name: those of a user's file, then those of the catalogue."""

    own: Mapping[str, Device]

    def named(self, name: str) -> Device:
        """Raises RequestError for a name that is in neither."""
        known = {**DEVICES, **self.own}
        if name not in known:
            raise RequestError(
                f"device is {name!r}; known are {', '.join(known)}; describe others in a file for --devices, "
                "or measure them with epd profile"
            )
        return known[name]


CATALOGUE = Devices({})
# What Ray calls the kinds that it tells apart: `accelerator_type`.
RAY_TYPES: Mapping[str, str] = {
    "a100-80gb": "A100-80G", "h100": "H100", "h200": "H200", "b200": "B200", "l40s": "L40S", "l4": "L4",
    "a10g": "A10G",
}  # fmt: skip


def load_devices(path: Path | None) -> Devices:
    """Loads a user's file. Raises RequestError for unknown fields, bad values or invalid YAML."""
    if path is None:
        return CATALOGUE
    try:
        record = yaml.safe_load(path.read_text(encoding="utf-8"))
        return Devices(_DeviceFile.model_validate(record).devices)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RequestError(
            f"devices {str(path)!r} cannot be read: {' '.join(str(error).split())[:120]}; give a YAML file"
        ) from None
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise RequestError(
            f"devices {str(path)!r}: {where}: {first['msg']}; docs/planning.md has an example"
        ) from None
