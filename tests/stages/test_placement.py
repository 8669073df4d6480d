"""Options become a device and a type, or one clear line that says what this machine has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from epd.errors import RequestError
from epd.stages.placement import CPU_FLOAT32, Placement


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes torch report two GPUs that compute in bfloat16."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)


def checkpoint(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_machine_without_gpus_computes_in_float32() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert Placement.resolve() == CPU_FLOAT32
    assert Placement.resolve("cpu", "bfloat16") == Placement(torch.device("cpu"), torch.bfloat16)
    assert str(CPU_FLOAT32) == "float32 on cpu"
    with pytest.raises(RequestError, match=r"received the device 'cuda'; allowed here: cpu, since torch"):
        Placement.resolve("cuda")


@pytest.mark.parametrize("config", [{"dtype": "float16"}, {"text_config": {"torch_dtype": "float16"}}])
@pytest.mark.usefixtures("gpus")
def test_a_gpu_computes_in_the_type_of_the_checkpoint(tmp_path: Path, config: dict[str, Any]) -> None:
    path = checkpoint(tmp_path, config)
    assert Placement.resolve(model_path=path) == Placement(torch.device("cuda:0"), torch.float16)
    assert Placement.resolve("cuda:1", "float32", path) == Placement(torch.device("cuda:1"), torch.float32)
    assert Placement.resolve("cpu", "auto", path) == CPU_FLOAT32


# As SmolVLM2-2.2B is published: its parts are named bfloat16.
SMOLVLM2 = {"torch_dtype": "float32", "text_config": {"torch_dtype": "bfloat16"}}


@pytest.mark.parametrize("config", [SMOLVLM2, {"dtype": "float32"}, {"text_config": {"dtype": "float32"}}])
@pytest.mark.usefixtures("gpus")
def test_a_gpu_computes_a_checkpoint_in_float32_in_bfloat16(tmp_path: Path, config: dict[str, Any]) -> None:
    path = checkpoint(tmp_path, config)
    assert Placement.resolve(model_path=path).dtype == torch.bfloat16
    assert Placement.resolve("cuda", "float32", path).dtype == torch.float32, "it was asked for"
    assert Placement.resolve("cpu", "auto", path) == CPU_FLOAT32


@pytest.mark.parametrize("config", [{}, {"dtype": "float8_e4m3fn"}, {"dtype": None, "text_config": None}])
@pytest.mark.usefixtures("gpus")
def test_bfloat16_is_the_type_where_none_is_named(tmp_path: Path, config: dict[str, Any]) -> None:
    assert Placement.resolve(model_path=checkpoint(tmp_path, config)).dtype == torch.bfloat16


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:-1", "cuda:1000000000000", "CPU", "", "mps"])
def test_an_unknown_device_is_refused(device: str) -> None:
    with pytest.raises(RequestError, match="allowed: auto, cpu, cuda, or cuda:N"):
        Placement.resolve(device)


@pytest.mark.usefixtures("gpus")
def test_what_the_gpus_lack_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match=r"'cuda:2'; allowed: cuda:0 to cuda:1"):
        Placement.resolve("cuda:2")
    with pytest.raises(RequestError, match="received the dtype 'int8'; allowed: auto, bfloat16, float16"):
        Placement.resolve("cuda", "int8")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "Tesla T4")
    with pytest.raises(RequestError, match=r"Tesla T4, which does not compute in it; .* set --dtype float16"):
        Placement.resolve("cuda", "auto")
    assert Placement.resolve("cuda", "float16").dtype == torch.float16
