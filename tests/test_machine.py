"""CPUs and memory that a process may use, with made-up control groups of both versions."""

from __future__ import annotations

import ast
import gc
import os
from pathlib import Path
from typing import Any

import pytest

from epd.machine import available_memory_bytes, collector_paused, cpu_quota, memory_limit_bytes, usable_cpus
from tests import ROOT

GIB = 1 << 30
# What asks the machine past its control groups: only epd/machine.py may.
PAST_GROUPS = {
    "cpu_count",
    "process_cpu_count",
    "sched_getaffinity",
    "SC_PHYS_PAGES",
    "SC_NPROCESSORS_ONLN",
    "virtual_memory",
}


class Machine:
    """A root folder with files of /proc and /sys."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def group(self, path: str, text: str) -> None:
        self.write(f"sys/fs/cgroup/{path}", text)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    made.write("proc/meminfo", f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {40 << 20} kB\n")
    return made


def test_cpus_are_those_of_the_affinity_and_the_quota(machine: Machine) -> None:
    assert cpu_quota(machine.root) is None
    machine.group("cpu.max", "150000 100000\n")
    assert cpu_quota(machine.root) == 1.5
    assert usable_cpus(machine.root) <= 2
    machine.group("cpu.max", "10000 100000\n")
    assert usable_cpus(machine.root) == 1
    machine.group("cpu.max", "max 100000\n")
    assert cpu_quota(machine.root) is None
    assert usable_cpus(machine.root) == len(os.sched_getaffinity(0))


def test_cpus_of_the_older_kind_of_group(machine: Machine) -> None:
    machine.group("cpu/cpu.cfs_quota_us", "-1\n")
    machine.group("cpu/cpu.cfs_period_us", "100000\n")
    assert cpu_quota(machine.root) is None
    machine.group("cpu/cpu.cfs_quota_us", "250000\n")
    assert cpu_quota(machine.root) == 2.5


def test_a_quota_of_the_own_group_or_of_one_above_counts(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/pod/box\n")
    machine.group("pod/cpu.max", "300000 100000\n")
    assert cpu_quota(machine.root) == 3
    machine.group("pod/box/cpu.max", "200000 100000\n")
    assert cpu_quota(machine.root) == 2


def test_memory_without_a_limit_is_the_machines(machine: Machine) -> None:
    machine.group("memory.max", "max\n")
    assert memory_limit_bytes(machine.root) == 64 * GIB
    assert available_memory_bytes(machine.root) == 40 * GIB


def test_memory_is_what_the_group_and_those_above_allow(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/pod/box\n")
    machine.group("pod/box/memory.max", f"{8 * GIB}\n")
    machine.group("pod/box/memory.current", f"{3 * GIB}\n")
    machine.group("pod/box/memory.stat", f"anon 5\ninactive_file {GIB}\n")
    assert memory_limit_bytes(machine.root) == 8 * GIB
    assert available_memory_bytes(machine.root) == 6 * GIB
    machine.group("pod/memory.max", f"{4 * GIB}\n")
    assert memory_limit_bytes(machine.root) == available_memory_bytes(machine.root) == 4 * GIB


def test_memory_of_the_older_kind_of_group(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/docker/f00\n0::/\n")
    machine.group("memory/memory.limit_in_bytes", f"{2**63 - 4096}\n")
    assert memory_limit_bytes(machine.root) == 64 * GIB
    machine.group("memory/memory.limit_in_bytes", f"{2 * GIB}\n")
    machine.group("memory/memory.usage_in_bytes", f"{2 * GIB + 4096}\n")
    machine.group("memory/memory.stat", "total_inactive_file 8192\n")
    assert memory_limit_bytes(machine.root) == 2 * GIB
    assert available_memory_bytes(machine.root) == 4096


def test_this_machine_has_cpus_and_memory() -> None:
    assert 1 <= usable_cpus() <= len(os.sched_getaffinity(0))
    assert 0 < available_memory_bytes() <= memory_limit_bytes()


def test_nothing_else_asks_for_cpus_or_memory_past_the_control_groups() -> None:
    folders = ("epd", "video", "encoders", "stages", "serve_app", "benchmarks", "training")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 200
    texts = {file: file.read_text(encoding="utf-8") for file in files}
    found = {
        str(file.relative_to(ROOT))
        for file, text in texts.items()
        if any(name in text for name in PAST_GROUPS)  # few: the others need not be parsed
        for node in ast.walk(ast.parse(text))
        if PAST_GROUPS & {getattr(node, "attr", ""), getattr(node, "name", ""), _constant(node)}
    }
    assert found == {"epd/machine.py"}


def _constant(node: ast.AST) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_collector_is_afterwards_as_it_was(is_enabled: bool) -> None:
    was_enabled = gc.isenabled()
    try:
        (gc.enable if is_enabled else gc.disable)()
        with collector_paused():
            assert not gc.isenabled()
            made: list[Any] = []
        assert gc.isenabled() is is_enabled
        assert all(each is not made for each in gc.get_objects())  # it is not searched again
    finally:
        (gc.enable if was_enabled else gc.disable)()
