"""Kernels are imported at their first use, on machines with a GPU: their modules must define them there."""

from __future__ import annotations

import re
from types import ModuleType

import pytest

from epd.encoders import kernels as encoder_kernels
from epd.stages import kernels as language_kernels
from tests import ROOT


@pytest.mark.parametrize("package", [encoder_kernels, language_kernels], ids=lambda package: package.__name__)
def test_each_kernel_is_defined_in_its_module(package: ModuleType) -> None:
    folder = ROOT.joinpath(*package.__name__.split("."))
    assert sorted(package._MODULES) == package.__all__
    for name, module in package._MODULES.items():
        assert re.search(rf"^def {name}\(", (folder / f"{module}.py").read_text(), flags=re.MULTILINE), name
