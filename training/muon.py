"""Steps all matrices of one shape at once: Muon (Jordan 2024) with few large products."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

_MOMENTUM, _STEPS = 0.95, 5
_A, _B, _C = 3.4445, -4.7750, 2.0315
_RMS = 0.2  # of an update, as Adam's is


class StackedMuon(torch.optim.Optimizer):
    """Does what `torch.optim.Muon(adjust_lr_fn="match_rms_adamw")` does."""

    def __init__(self, matrices: Iterable[nn.Parameter], weight_decay: float) -> None:
        by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for matrix in matrices:
            by_shape[matrix.shape].append(matrix)
        groups = [{"params": params} for params in by_shape.values()]
        super().__init__(groups, {"lr": 0.0, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        """Takes one step."""
        for group in self.param_groups:
            params = group["params"]
            state = self.state[params[0]]
            grads = torch.stack([param.grad for param in params])
            momentum = state.setdefault("momentum", torch.zeros_like(grads))
            momentum.lerp_(grads, 1 - _MOMENTUM)
            rate = group["lr"] * _RMS * max(grads.shape[1:]) ** 0.5
            for param, update in zip(params, orthogonal(grads.lerp(momentum, _MOMENTUM)), strict=True):
                param.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-rate)


def orthogonal(matrices: Tensor) -> Tensor:
    """Returns the nearest matrices with singular values near 1, by Newton and Schulz: [N, A, B]."""
    is_tall = matrices.shape[1] > matrices.shape[2]
    found = (matrices.mT if is_tall else matrices).bfloat16()
    found = found / found.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(_STEPS):
        gram = found @ found.mT
        found = _A * found + (_B * gram + _C * gram @ gram) @ found
    return (found.mT if is_tall else found).float()
