"""What a decode step costs the host of a GPU: thread CPU time, by part, with the device's work left out.

    python -m benchmarks.engine.host_step [--counts N ...] [--sampling NAME ...] [--steps N]
        [--beside CHECKOUT [--rounds N]] [--no-save]

Passes are replayed by a stand-in for CUDA graphs, which does nothing, and the tokens that they choose are
constants: launches of the sampler's kernels do not count.
All else runs as on an H100: a step launches a pass, reads the tokens of the one before, and books them.
schedule: who goes on, and blocks. inputs: arrays of the pass, and their copy. sample: inputs of the sampler.
read: tokens from the device. book: tokens into sequences, cache and text. rest: of the step.
Each count starts anew, and figures are medians over steps.
--beside: measures another checkout too, in turns with this one, each time in a process of its own; figures
are medians over rounds. Results go to benchmarks/results/host_step.{json,md}.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from time import thread_time_ns
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.reporting import Row, Section, run_sections, setting
from epd.encoders import load_adapter
from epd.encoders.groups import prompt_identity
from epd.engine_config import EngineConfig
from epd.kv.pass_limits import SchedulerConfig
from epd.models import embedded_model_path
from epd.sampling_params import SamplingParams
from epd.stages.attention.device import DeviceHeads
from epd.stages.engine.engine import LanguageEngine
from epd.stages.engine.generation import GenerateRequest, GenerationSettings
from epd.stages.engine.model_runner import ModelRunner
from epd.stages.engine.run_ahead import RunAhead
from epd.stages.engine.setup import build_engine
from epd.stages.loading.weights import load_role
from epd.stages.placement import CPU_FLOAT32
from epd.stages.sampling import sampler
from epd.stages.sampling.sampler import SampledToken, SamplerAhead, TokensAhead

_CONTEXT = 1000
_PROCESSORS, _CHIP = 132, 90  # of an H100
_WARM_UP = 24  # steps, more than a block has tokens
SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=10**4, ignore_eos=True),
    "drawn": SamplingParams(max_tokens=10**4, ignore_eos=True, temperature=0.7, top_p=0.8, top_k=20),
}


class _NoWork:
    """Stands in for CUDA graphs, which do nothing."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:  # noqa: ARG002 # as it is called
        return lambda: None


class _Parts:
    """Adds up the CPU time of parts of a step; what a part calls of another counts there alone."""

    def __init__(self) -> None:
        self.spent_ns: dict[str, int] = {}
        self._open: list[str] = []
        self._since_ns = 0

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self._switch()
            self._open.append(part)
            try:
                return function(*arguments, **options)
            finally:
                self._switch()
                self._open.pop()

        return call

    def _switch(self) -> None:
        now_ns = thread_time_ns()
        if self._open:
            part = self._open[-1]
            self.spent_ns[part] = self.spent_ns.get(part, 0) + now_ns - self._since_ns
        self._since_ns = now_ns


def _device_heads(of: Callable[..., DeviceHeads]) -> Callable[..., DeviceHeads]:
    return lambda *arguments: replace(of(*arguments), num_processors=_PROCESSORS, chip=_CHIP)


def _constants(scores: Tensor, *_: Any) -> Tensor:
    return torch.full((len(scores),), 72)


def _nothing_drawn(scores: Tensor, *_: Any, is_bounded: bool) -> tuple[Tensor, list[Tensor]]:  # noqa: ARG001
    return _constants(scores), []


def _no_logits(runner: ModelRunner, token_ids: Tensor, *_: Any) -> Tensor:
    return torch.zeros(len(token_ids), len(runner._embed.weight))


class HostStep:
    """Measures decode steps of one engine, whose passes do nothing."""

    def __init__(self, count: int) -> None:
        path = embedded_model_path()
        self._adapter = load_adapter(path)
        config = SchedulerConfig(max_num_seqs=count)
        with patch.object(DeviceHeads, "of", _device_heads(DeviceHeads.of)):
            self.engine: LanguageEngine = build_engine(
                load_role(path, "whole", CPU_FLOAT32).model,
                self._adapter,
                GenerationSettings(frozenset()),
                options=EngineConfig(num_kv_tokens=count * (_CONTEXT + 600), async_scheduling=True),
                config=config,
                graphs=_NoWork(),
                enable_prefix_caching=True,
            )

    def add(self, name: str, sampling: SamplingParams) -> None:
        """Adds a request that decodes, as if another worker had prefilled it."""
        prompt = self._adapter.plan_prompt([], name + "x" * (_CONTEXT - len(name)))
        request = GenerateRequest(name, prompt, prompt_identity(prompt, []), sampling)
        kv = self.engine.kv
        kv.open(name, request.identity, max_cached=0)
        kv.allocate(name, len(prompt))
        kv.commit(name, request.identity, len(prompt))
        self.engine.adopt(request, [SampledToken(72)])

    def steps(self, num_steps: int) -> list[dict[str, float]]:
        """Returns microseconds of each part of each step."""
        found = []
        for _ in range(num_steps):
            parts = _Parts()
            with _timing(parts):
                parts.timed("rest", self.engine.step)()
            found.append({part: spent / 1e3 for part, spent in parts.spent_ns.items()})
        return found


@contextmanager
def _timing(parts: _Parts) -> Iterator[None]:
    """Times the parts of a step while it is entered."""
    places: list[tuple[Any, str, str]] = [
        (RunAhead, "_tried", "schedule"),
        (ModelRunner, "run_ahead", "inputs"),
        (SamplerAhead, "sample", "sample"),
        (TokensAhead, "read", "read"),
        (LanguageEngine, "_go_on", "book"),
    ]
    with ExitStack() as stack:
        for owner, name, part in places:
            stack.enter_context(patch.object(owner, name, parts.timed(part, getattr(owner, name))))
        yield


@torch.inference_mode()
def host_rows(counts: Sequence[int], samplings: Sequence[str], num_steps: int) -> list[Row]:
    """Microseconds of steps, by how many requests decode and how their tokens are chosen."""
    rows: list[Row] = []
    with (
        patch.object(sampler, "_largest", _constants),
        patch.object(sampler, "_draw", _nothing_drawn),
        patch.object(ModelRunner, "_decoded", _no_logits),
    ):
        for sampling in samplings:
            for count in counts:
                measured = HostStep(count)
                for index in range(count):
                    measured.add(f"r{index}", SAMPLINGS[sampling])
                steps = measured.steps(_WARM_UP + num_steps)[_WARM_UP:]
                rows.append(_row(count, sampling, steps))
    return rows


def _row(count: int, sampling: str, steps: Sequence[dict[str, float]]) -> Row:
    total = statistics.median(sum(step.values()) for step in steps)
    parts = {
        part: round(statistics.median(step.get(part, 0.0) for step in steps))
        for part in ("schedule", "inputs", "sample", "read", "book", "rest")
    }
    return {
        "requests": count,
        "sampling": sampling,
        "step_us": round(total),
        "us_per_request": round(total / count, 1),
        **parts,
    }


def rows_beside(checkout: Path, arguments: Sequence[str], num_rounds: int) -> list[Row]:
    """Microseconds of steps at another checkout, and here; ratio: median of those of rounds."""
    places = (checkout, Path.cwd())
    describe = ["git", "-C", str(checkout), "log", "-1", "--format=%h %as"]
    commit = subprocess.run(describe, check=True, capture_output=True, text=True).stdout.strip()
    rounds = [[_rows_at(place, arguments) for place in places] for _ in range(num_rounds)]
    found: list[Row] = []
    for index, row in enumerate(rounds[0][0]):
        pairs = [[rows[index]["step_us"] for rows in each] for each in rounds]
        before_us, now_us = (round(statistics.median(times)) for times in zip(*pairs, strict=True))
        ratio = statistics.median(now / before for before, now in pairs)
        found.append(
            {
                "requests": row["requests"],
                "sampling": row["sampling"],
                "before": commit,
                "before_us": before_us,
                "now_us": now_us,
                "now_us_per_request": round(now_us / row["requests"], 1),
                "ratio": round(ratio, 3),
                "ratios": ", ".join(f"{now / before:.2f}" for before, now in pairs),
            }
        )
    return found


def _rows_at(place: Path, arguments: Sequence[str]) -> list[Row]:
    command = [sys.executable, "-m", "benchmarks.engine.host_step", "--no-save", *arguments]
    environment = os.environ | {"PYTHONPATH": str(place)}
    ran = subprocess.run(command, cwd=place, env=environment, check=True, capture_output=True, text=True)
    rows: list[Row] = json.loads(ran.stdout[ran.stdout.index("{") :])["steps"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 16, 64, 128])
    parser.add_argument("--sampling", nargs="+", choices=SAMPLINGS, default=list(SAMPLINGS))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--beside", type=Path, metavar="CHECKOUT")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-save", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sections = {
        "steps": Section(
            "Microseconds of host CPU in a decode step",
            lambda: host_rows(arguments.counts, arguments.sampling, arguments.steps),
        ),
        "beside": Section(
            "Beside another commit, in turns",
            lambda: rows_beside(arguments.beside, _same(arguments), arguments.rounds),
        ),
    }
    run_sections(
        "host_step",
        "What a decode step costs the host",
        sections,
        ["steps"] if arguments.beside is None else ["beside"],
        lambda: setting(["torch", "numpy"], context=_CONTEXT),
        save=not arguments.no_save,
        module="engine.host_step",
    )


def _same(arguments: argparse.Namespace) -> list[str]:
    """Returns the arguments for another process that measures the same."""
    counts = [str(count) for count in arguments.counts]
    return ["--counts", *counts, "--sampling", *arguments.sampling, "--steps", str(arguments.steps)]


if __name__ == "__main__":
    main()
