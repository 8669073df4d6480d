"""The load generators that others wrote: how each is started, and what its report says.

They send media of their own or ours, and do not compare answers; what they count as failed is checked
against the statuses that the server counts.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.clients.asks import IN_FLIGHT, MODEL, Case
from epd.models import embedded_model_path

_LONGEST_S = 1800


@dataclass(frozen=True)
class Order:
    """What a generator is to send. programs: the folder it is installed in; folder: for its files."""

    url: str
    programs: Path
    folder: Path
    cases: Sequence[Case]
    count: int


@dataclass(frozen=True)
class Report:
    """What a generator counted."""

    num_answered: int
    num_failed: int
    requests_per_s: float


@dataclass(frozen=True)
class Generator:
    """package: whose version is reported; asked: what it sends, in words."""

    package: str
    asked: str
    run: Callable[[Order], Report]


def guidellm(order: Order) -> Report:
    data = "kind=synthetic_video,width=96,height=64,frames=8,fps=2,output_tokens=8"
    path = order.folder / "guidellm.json"
    options = {
        "--backend": f"kind=openai_http,target={order.url},model={MODEL}",
        "--profile": f"kind=concurrent,streams={IN_FLIGHT}",
        "--constraint": f"kind=max_requests,count={order.count}",
        "--tokenizer": f"kind=huggingface_auto,model={embedded_model_path()}",
        "--data": data,
        "--output": f"kind=json,path={path}",
    }
    _run(order, "guidellm", "run", *_flat(options), "--disable-console")
    found = _read(path)["benchmarks"][0]
    requests = {kind: len(found["requests"][kind]) for kind in ("successful", "errored", "incomplete")}
    failed = requests["errored"] + requests["incomplete"]
    return Report(requests["successful"], failed, requests["successful"] / found["duration"])


def aiperf(order: Order) -> Report:
    source, artifacts = order.folder / "aiperf.jsonl", order.folder / "aiperf"
    lines = [json.dumps({"text": case.question, "video": case.video}) for case in order.cases]
    source.write_text("\n".join(lines) + "\n", encoding="utf-8")
    options = {
        "-m": MODEL,
        "--url": order.url,
        "--endpoint-type": "chat",
        "--tokenizer": embedded_model_path(),
        "--input-file": source,
        "--custom-dataset-type": "single_turn",
        "--request-count": order.count,
        "--concurrency": IN_FLIGHT,
        "--artifact-dir": artifacts,
        "--extra-inputs": "temperature:0",
        "--ui": "none",
    }
    flags = ("--streaming", "--no-gpu-telemetry", "--no-server-metrics")
    _run(order, "aiperf", "profile", *_flat(options), *flags)
    found = _read(artifacts / "profile_export_aiperf.json")
    failed = found.get("error_request_count", {}).get("avg", 0)
    return Report(int(found["request_count"]["avg"]), int(failed), found["request_throughput"]["avg"])


def vllm_bench(order: Order) -> Report:
    options = {
        "--backend": "openai-chat",
        "--base-url": order.url,
        "--endpoint": "/v1/chat/completions",
        "--model": MODEL,
        "--tokenizer": embedded_model_path(),
        "--dataset-name": "random-mm",
        "--random-input-len": 16,
        "--random-output-len": 8,
        "--random-mm-base-items-per-request": 1,
        "--random-mm-limit-mm-per-prompt": '{"image": 1, "video": 1}',
        "--random-mm-bucket-config": "{(96, 64, 1): 0.5, (96, 64, 8): 0.5}",
        "--num-prompts": order.count,
        "--max-concurrency": IN_FLIGHT,
        "--result-dir": order.folder,
        "--result-filename": "vllm.json",
    }
    _run(order, "vllm", "bench", "serve", *_flat(options), "--save-result", "--disable-tqdm")
    found = _read(order.folder / "vllm.json")
    return Report(found["completed"], found["failed"], found["request_throughput"])


GENERATORS = {
    "guidellm": Generator("guidellm", "drawn videos of 8 frames, streamed", guidellm),
    "AIPerf": Generator("aiperf", "our videos, streamed", aiperf),
    "vllm bench serve": Generator("vllm", "random-mm: images and videos of 8 frames, streamed", vllm_bench),
}


def _flat(options: dict[str, Any]) -> list[str]:
    return [str(each) for option in options.items() for each in option]


def _run(order: Order, program: str, *arguments: str) -> None:
    """Raises RuntimeError with the end of what the program wrote."""
    path = f"{order.programs}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "NO_PROXY": "127.0.0.1"}
    command = [str(order.programs / program), *arguments]
    done = subprocess.run(
        command,
        env=environment,
        cwd=order.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_LONGEST_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{program} ended with {done.returncode}: {done.stdout[-400:]}")


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
