"""The script with vLLM's launch commands starts what the page of the comparison says, here fake programs."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests import ROOT

SCRIPT = ROOT / "benchmarks" / "serving" / "vllm_servers.sh"
PAGE = (ROOT / "benchmarks" / "results" / "vllm.md").read_text(encoding="utf-8")


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """An environment whose programs write what they were started with, one line each."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("vllm", "python"):
        (programs / name).write_text(
            f'#!/bin/sh\necho "{name} $* threads=$OMP_NUM_THREADS" >> {tmp_path}/started\n'
        )
        (programs / name).chmod(0o755)
    return tmp_path


def started(venv: Path, *arguments: str) -> list[str]:
    command = ["bash", str(SCRIPT), str(venv), "MODEL", *arguments]
    environment = {**os.environ, "TMPDIR": str(venv)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in venv.iterdir()) == ["bin", "started"], "nothing else is left"
    return sorted((venv / "started").read_text().splitlines())


def test_colocated_is_one_server_with_the_options_of_the_page(venv: Path) -> None:
    (server,) = started(venv, "colocated", "--media-io-kwargs", "{}")
    assert server.startswith("vllm serve MODEL --served-model-name shapes-vl --host 127.0.0.1 --port 18100 ")
    (options,) = re.findall(r"`vllm serve` with `([^`]+)`", " ".join(PAGE.split()))
    assert options in server
    assert " --media-io-kwargs {} " in server
    assert server.endswith("threads=1")


def test_replicas_are_two_such_servers(venv: Path) -> None:
    servers = started(venv, "replicas")
    assert [re.findall(r"--port (\d+)", server) for server in servers] == [["18100"], ["18101"]]


def test_split_is_an_encoder_the_rest_and_vllms_proxy(venv: Path) -> None:
    proxy, encoder, rest = started(venv, "split", "disagg_epd_proxy.py")
    assert proxy.startswith("python disagg_epd_proxy.py --host 127.0.0.1 --port 18110 ")
    ports = {server: re.findall(r"--port (\d+)", server)[0] for server in (encoder, rest)}
    for server, role in ((encoder, "encode"), (rest, "decode")):
        assert f"--{role}-servers-urls http://127.0.0.1:{ports[server]}" in proxy
    assert '"ec_role":"ec_producer"' in encoder
    assert "--no-enable-prefix-caching" in encoder
    assert '"ec_role":"ec_consumer"' in rest
    folders = {re.findall(r'"shared_storage_path":"([^"]+)"', server)[0] for server in (encoder, rest)}
    assert len(folders) == 1


def test_the_page_names_the_commands_and_the_proxy() -> None:
    assert f"`{SCRIPT.relative_to(ROOT)}`" in PAGE
    assert "`disagg_epd_proxy.py`, from `examples/disaggregated/disaggregated_encoder` of" in PAGE


def test_another_kind_is_refused(venv: Path) -> None:
    command = ["bash", str(SCRIPT), str(venv), "MODEL", "both"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "received the kind 'both'; allowed: colocated, replicas, split PROXY" in done.stderr
