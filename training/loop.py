"""Shares among the training steps: options, the rate, updates, progress, and files to resume from."""

from __future__ import annotations

import argparse
import datetime
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, distributed, nn

_REPORT_STEPS = 25
_WARMUP_STEPS = 100
_SAVE_S = 240


class Training:
    """Modules and optimizers that are saved and resumed together; `step` updates have been made."""

    def __init__(
        self, modules: dict[str, nn.Module], optimizers: list[torch.optim.Optimizer], path: Path
    ) -> None:
        self.step = 0
        self._modules, self._optimizers, self._path = modules, optimizers, path
        if path.exists():
            self._resume()
        self._losses: list[float] = []
        self._reported_at = self._saved_at = time.monotonic()

    def _resume(self) -> None:
        saved = torch.load(self._path, map_location="cpu")
        for name, module in self._modules.items():
            module.load_state_dict(saved[name])
        for optimizer, state in zip(self._optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.step = saved["step"]

    def save(self) -> None:
        """Writes the file whole or not at all."""
        states = {name: module.state_dict() for name, module in self._modules.items()}
        optimizers = [optimizer.state_dict() for optimizer in self._optimizers]
        temporary = self._path.with_suffix(".part")
        torch.save({**states, "optimizers": optimizers, "step": self.step}, temporary)
        temporary.rename(self._path)
        self._saved_at = time.monotonic()

    def save_now_and_then(self, *, is_over: bool) -> None:
        """Saves at the end, and before it every few minutes; one process does."""
        if rank() == 0 and (is_over or time.monotonic() - self._saved_at > _SAVE_S):
            self.save()

    def update(self, loss: Tensor, rate: float) -> None:
        """Takes one step down the gradient of `loss`; prints the mean loss and the pace now and then."""
        loss.backward()
        self._average()
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group.get("rate", 1.0)
                nn.utils.clip_grad_norm_(group["params"], 1.0)
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        self._losses.append(loss.item())
        if self.step % _REPORT_STEPS == 0 and rank() == 0:
            self._report()

    def _average(self) -> None:
        """Makes gradients those of all processes' batches, if there are more than this one."""
        if not distributed.is_initialized():
            return
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        parameters = [each for group in groups for each in group["params"]]
        total = torch.cat([_gradient(each).flatten() for each in parameters])
        distributed.all_reduce(total)
        parts = (total / distributed.get_world_size()).split([each.numel() for each in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)

    def _report(self) -> None:
        pace = len(self._losses) / (time.monotonic() - self._reported_at)
        mean = sum(self._losses) / len(self._losses)
        print(f"step {self.step} loss {mean:.4f} {pace:.2f} steps/s", flush=True)
        self._losses, self._reported_at = [], time.monotonic()


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


@contextmanager
def joined_processes() -> Iterator[None]:
    """Joins the processes that `torchrun` has started, each of which learns from batches of its own.

    None leaves before all have ended: gloo aborts a process whose peer is gone.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    distributed.init_process_group("gloo")
    yield
    distributed.barrier()
    distributed.destroy_process_group()


def rank() -> int:
    """Returns which of the processes this is; 0 where there is one."""
    return distributed.get_rank() if distributed.is_initialized() else 0


class Progress:
    """Says how much of a training is over: by its steps, or by the clock where it is to end at some time."""

    def __init__(self, steps: int, step: int, until: str | None = None, begun: float = 0.0) -> None:
        """step: updates made already; the rate warms up anew.

        until: when to end, like 19:25, whatever the steps. begun: the share that is over now, if so.
        """
        self._steps, self._first, self._begun = steps, step, begun
        self._start_s = time.time()
        self._end_s = until_s(until, self._start_s) if until else None

    def share(self, step: int) -> float:
        if self._end_s is None:
            return step / self._steps
        gone = torch.tensor((time.time() - self._start_s) / max(1.0, self._end_s - self._start_s))
        if distributed.is_initialized():
            distributed.broadcast(gone, 0)  # all are to end at one step
        return min(1.0, self._begun + (1 - self._begun) * gone.item())

    def is_over(self, step: int) -> bool:
        return self.share(step) >= 1

    def warmed(self, step: int) -> float:
        """Returns what the rate is multiplied by in the first steps."""
        return min(1.0, (step - self._first + 1) / _WARMUP_STEPS)


def until_s(clock: str, now_s: float) -> float:
    """Returns when the clock shows a time like 19:25 next, in seconds since the epoch."""
    now = datetime.datetime.fromtimestamp(now_s)
    end = datetime.datetime.combine(now.date(), datetime.time.fromisoformat(clock))
    return (end if end > now else end + datetime.timedelta(days=1)).timestamp()


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Returns a linear warm-up, then a cosine to a twentieth of the peak."""
    if step < _WARMUP_STEPS:
        return peak * (step + 1) / _WARMUP_STEPS
    share = min(1.0, (step - _WARMUP_STEPS) / max(1, steps - _WARMUP_STEPS))
    return peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * share)))


def base_parser(
    description: str | None, *, steps: int, lr: float, needs_clips: bool = True
) -> argparse.ArgumentParser:
    """Returns the options that all steps have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clips", type=Path, required=needs_clips, help="folder that `training.clips` wrote")
    parser.add_argument("--out", type=Path, required=True, help="file to save to and resume from")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--lr", type=float, default=lr, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    return parser
