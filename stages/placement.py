"""Decides where a model runs, and in which type: the noun that goes from a command to every tensor."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from epd.devices import DTYPE_NAMES, check_device, check_dtype
from epd.errors import RequestError
from epd.machine import usable_cpus

# By their names in torch, which are also the choices of `--dtype`.
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_NAMES}


@dataclass(frozen=True, slots=True)
class Placement:
    """Says where a model runs, and in which type its weights, activations and caches are.

    device: the CPU, or one GPU by its number, which torch's questions about memory need
    dtype: a floating-point type that the device computes in
    quantization: of the language model's layers when they are loaded, fp8 or None
    """

    device: torch.device
    dtype: torch.dtype
    quantization: str | None = None

    @classmethod
    def resolve(
        cls,
        device: str = "auto",
        dtype: str = "auto",
        model_path: Path | None = None,
        quantization: str | None = None,
    ) -> Self:
        """Returns the placement that these options mean on this machine.

        device: auto, cpu, cuda or cuda:N; cuda is the first GPU, and auto that one where there is one
        dtype: auto, or a name of DTYPES; auto is float32 on a CPU, and on a GPU the checkpoint's own type,
            bfloat16 for float32
        model_path: the folder of the checkpoint, read if the type depends on it
        Raises RequestError for names that are unknown, and for what this machine does not have.
        """
        placed = _device(device)
        return cls(placed, _dtype(dtype, placed, model_path), quantization)

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def __str__(self) -> str:
        types = self.dtype_name if self.quantization is None else f"{self.dtype_name} and {self.quantization}"
        return f"{types} on {self.device}"


CPU_FLOAT32 = Placement(torch.device("cpu"), torch.float32)


def _device(name: str) -> torch.device:
    check_device(name)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type != "cuda":
        return device
    _check_gpu(device)
    return torch.device("cuda", device.index or 0)


def _check_gpu(device: torch.device) -> None:
    if not torch.cuda.is_available():
        built = f"is built for CUDA {torch.version.cuda} and finds no GPU"
        reason = built if torch.version.cuda else "is built for CPUs alone"
        raise RequestError(
            f"received the device '{device}'; allowed here: cpu, since torch {torch.__version__} {reason}; "
            "use --device cpu or auto, or check nvidia-smi and the installed torch"
        )
    num_gpus = torch.cuda.device_count()
    if device.index is not None and device.index >= num_gpus:
        raise RequestError(
            f"received the device '{device}'; allowed: cuda:0 to cuda:{num_gpus - 1}, the GPUs that this "
            "process sees; CUDA_VISIBLE_DEVICES hides others"
        )


def dtype_on(device_type: str, name: str, model_path: Path | None) -> torch.dtype:
    """Returns what a name means on a type of device, cpu or cuda, which may be another machine's.

    Raises RequestError for an unknown name.
    """
    check_dtype(name)
    if name != "auto":
        return DTYPES[name]
    return torch.float32 if device_type == "cpu" else _checkpoint_dtype(model_path)


def _dtype(name: str, device: torch.device, model_path: Path | None) -> torch.dtype:
    dtype = dtype_on(device.type, name, model_path)
    has_bfloat16 = device.type == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False)
    if dtype == torch.bfloat16 and not has_bfloat16:
        raise RequestError(
            f"received bfloat16 for '{device}', {torch.cuda.get_device_name(device)}, which does not compute "
            "in it; allowed: float16 or float32; set --dtype float16"
        )
    return dtype


def _checkpoint_dtype(model_path: Path | None) -> torch.dtype:
    """Reads the type that a checkpoint was saved in; bfloat16, that of all large ones, if it does not say.

    A checkpoint in float32 is computed in bfloat16, too, as vLLM does: GPUs have no fast products in float32.
    """
    try:
        config = json.loads((model_path / "config.json").read_text(encoding="utf-8")) if model_path else {}
    except (OSError, ValueError):  # who loads the checkpoint reports it
        config = {}
    named: list[Any] = [
        part.get(key)
        for part in (config, config.get("text_config") or {})
        for key in ("dtype", "torch_dtype")
    ]
    first = next((DTYPES[each] for each in named if each in DTYPES), torch.bfloat16)
    return torch.bfloat16 if first == torch.float32 else first


def use_own_threads(num_threads: int | None) -> None:
    """Sets torch's number of threads for what this thread computes, whatever others of its process use."""
    if num_threads is not None:
        torch.get_num_threads()  # a thread takes the process' number the first time, and its own after that
        torch.set_num_threads(num_threads)


def use_threads(num_threads: int | None, num_processes: int = 1) -> None:
    """Sets torch's number of threads; by default OMP_NUM_THREADS, else the cores we may use.

    num_processes: that share these threads.
    """
    num = num_threads or int(os.environ.get("OMP_NUM_THREADS") or usable_cpus())
    torch.set_num_threads(max(1, num // num_processes))
