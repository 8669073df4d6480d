"""The command `epd profile`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from epd import console
from epd.engine_config import EngineConfig
from epd.errors import RequestError
from epd.models import MODEL_HELP, model_folder, served_name
from epd.profiles.files import dump_profile, load_profile
from epd.profiles.profile import Profile
from epd.profiles.silicon import PRODUCTS, SYSTEMS, load_silicon, silicon_profile
from epd.profiles.silicon_tables import BACKENDS
from epd.serve_app.cli.flags import with_fields_of
from epd.serve_app.cli.options import IsJson, Out

_Model = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL]",
        help=f"{MODEL_HELP} MODEL@DEVICE computes costs.",
    ),
]
# A profile has costs of passes without drafts, merges or a budget of memory: other options change nothing.
PROFILED = ("device", "dtype", "kv_cache_dtype", "quantization", "num_threads", "revision", "hub")
_Repeats = Annotated[int, typer.Option(metavar="N", help="Runs of each point.")]
_Machine = Annotated[str, typer.Option(metavar="NAME", help="Name of this machine in the profile.")]


@with_fields_of(EngineConfig, only=PROFILED, defaults={"num_threads": 1})
def profile(
    model: _Model = None,
    out: Out = None,
    repeats: _Repeats = 5,
    machine: _Machine = "this-machine",
    as_json: IsJson = False,
    **engine: Any,
) -> None:
    """Measure what each stage costs on this machine.

    epd simulate and epd plan use the profile: encode by patches and batch, prefill by new and past tokens,
    decode by batch and context, transfers by bytes, reading media by pixels.
    """
    if repeats < 1:
        raise RequestError(f"repeats are {repeats}, there must be at least 1")
    found = _profile_of(model, repeats, machine, EngineConfig.checked(engine))
    _show(found, out, as_json)


def _show(found: Profile, out: Path | None, as_json: bool) -> None:
    """Prints a profile, and writes it if a file is named."""
    if as_json:
        console.stream_text(dump_profile(found))
    else:
        _print(found)
    if out is not None:
        out.write_text(dump_profile(found), encoding="utf-8")


def _profile_of(model: str | None, repeats: int, machine: str, config: EngineConfig) -> Profile:
    if model is not None and "@" in model and not Path(model).exists():
        return load_profile(model, kv_cache_dtype=config.kv_cache_dtype, quantization=config.quantization)
    from epd.stages import placement, profiling  # torch

    path = model_folder(model, config.revision, config.hub)
    where = placement.Placement.resolve(config.device, config.dtype, path, config.quantization)
    with console.loading_bar() as show:
        profiler = profiling.Profiler(path, config.num_threads or 1, where, show, config.kv_cache_dtype)
    with console.progress_bar("stages") as show:
        return profiler.profile(served_name(model), machine, repeats, show)


def _print(found: Profile) -> None:
    """Prints a row for each stage: its cost, how well it fits, and for which sizes it is valid."""
    table = Table("stage", "by", box=None, pad_edge=False)
    for name in ("fixed s", "s per unit", "s per item", "mean error"):
        table.add_column(name, justify="right")
    table.add_column("valid for")
    stages = {"encode": found.encode, "prefill": found.prefill, "decode": found.decode}
    stages |= {"transfer": found.transfer, **found.video}
    reading = {"images": found.images, "audio": found.audio}
    stages |= {name: each for name, each in reading.items() if each is not None}
    for name, stage in stages.items():
        cost, span = stage.cost, stage.valid_units
        figures = [f"{each:.3g}" for each in (cost.fixed_s + cost.floor_s, *cost.slopes)]
        error = f"{stage.error:.1%}" if stage.measurements else "-"
        table.add_row(
            name, f"{stage.units}, {stage.items}", *figures, error, f"{span.low:.2g} to {span.high:.2g}"
        )
    console.stdout_console().print(table)
    for line in found.assumptions:
        console.stdout_console().print(line)


_Tables = Annotated[
    Path,
    typer.Argument(
        metavar="FOLDER", help="A copy of github.com/ai-dynamo/aiconfigurator, or of its systems."
    ),
]
_Device = Annotated[
    str, typer.Option("--device", metavar="NAME", help=f"{', '.join(SYSTEMS)}, or a system's name.")
]
_Of = Annotated[
    str, typer.Option("--model", metavar="MODEL", help="A name of docs/models.md, or a config.json.")
]
_Backend = Annotated[str, typer.Option(metavar="NAME", help=f"Whose kernels: {', '.join(BACKENDS)}.")]
_Products = Annotated[
    str,
    typer.Option(metavar="TYPE", help=f"Of the language model's matrices: {', '.join(PRODUCTS)}."),
]


def import_tables(
    folder: _Tables,
    system: _Device = "h100",
    model: _Of = "qwen2.5-vl-7b",
    backend: _Backend = "vllm",
    products: _Products = "bfloat16",
    out: Out = None,
    as_json: IsJson = False,
) -> None:
    """Make a profile from published tables of measured kernels.

    Reads your copy of AIConfigurator's tables: matrix products, experts, attention of prefill, decode and
    towers, and sums between devices. The rest of the profile is as MODEL@DEVICE computes it.
    """
    console.note(f"reading tables of {system}")
    found = silicon_profile(load_silicon(folder, system, backend, products), system, model)
    _show(found, out, as_json)
