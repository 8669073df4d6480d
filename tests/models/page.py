"""Writes the table of checkpoints.md from the published configurations: `python -m tests.models.page`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from epd.encoders.published import read_config
from epd.engine_config import DEFAULT_ENGINE
from epd.kv.pass_limits import SchedulerConfig
from epd.serve_app.worker.worker_stages import embedding_layout
from epd.stages.engine.model_runner import kv_layouts
from epd.stages.engine.setup import kv_shape, states_shape
from epd.stages.loading.weights import part_bytes, skeleton
from tests import ROOT
from tests.encoders.tiny_molmo import PUBLISHED as MOLMO
from tests.models.published import GLM, PUBLISHED, QWEN2_VL, VIDEO_LLAMA, Published
from tests.models.recurrent import MINICPM, RECURRENT
from tests.models.tiny_ernie import PUBLISHED as ERNIE
from tests.models.windowed import WINDOWED

PAGE = ROOT / "benchmarks" / "results" / "checkpoints.md"
_START, _END = "<!-- python -m tests.models.page -->\n", "<!-- end -->\n"
CARD_BYTES = 80 * 10**9
# A worker that computes or continues answers needs room for this context, or it fits in name alone.
LEAST_TOKENS, _ANY_TOKENS = 32_768, 10**6
_GIGA, _MEGA = 10**9, 10**6
_LAST = "| E to P a token, B | P, D on 80 GB, k tokens | 1epd |\n"


@dataclass(frozen=True, slots=True)
class Figures:
    """What one checkpoint takes in bfloat16.

    encode_bytes, language_bytes: weights of an encoder, and of a prefill or decode worker.
    kv_bytes: of a token's keys and values in the layers that attend all tokens.
    embedding_bytes: of a visual token on its way from E to P.
    state_bytes: of a sequence's recurrent state, or of its full windows; 0 without any.
    slot_bytes: of all room for these, of as many answers as grow at once by default.
    """

    encode_bytes: int
    language_bytes: int
    kv_bytes: int
    embedding_bytes: int
    state_bytes: int = 0
    slot_bytes: int = 0

    def kv_tokens(self, *, with_tower: bool) -> int:
        """Tokens that have room beside the weights on one card; negative where the weights have none."""
        held = self.language_bytes + (self.encode_bytes if with_tower else 0) + self.slot_bytes
        return int(CARD_BYTES * DEFAULT_ENGINE.gpu_memory_utilization - held) // self.kv_bytes


def figures(published: Published) -> Figures:
    """Builds the checkpoint without memory, and counts."""
    config = _read(published)
    model: Any = skeleton(config, torch.bfloat16)
    states, (full, *windowed) = states_shape(model, SchedulerConfig().max_num_seqs), kv_layouts(model)
    window_bytes = kv_shape(model, _ANY_TOKENS).bytes_by_group[1:]
    tied = 0 if published.has_head else model.lm_head.weight.nbytes
    return Figures(
        part_bytes(model, "encode"),
        part_bytes(model, "language") - tied,
        full[0].bytes_per_token,
        embedding_layout(config, torch.bfloat16).bytes_per_embedding,
        sum(layout.bytes_per_token * (window or 0) for layout, window in windowed)
        + (0 if states is None else states.layout.bytes_per_sequence),
        sum(window_bytes) + (0 if states is None else states.num_bytes),
    )


def _read(published: Published) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(published.config), encoding="utf-8")
        return read_config(Path(folder))


def table() -> str:
    start, end = "| checkpoint | context | weights E, GB | P, D, GB | KV a token, B ", _LAST
    plain = {**QWEN2_VL, **PUBLISHED, **GLM, **ERNIE, **MOLMO, **VIDEO_LLAMA}
    kept = {**RECURRENT, **MINICPM, **WINDOWED}
    rows = "".join(f"| {' | '.join(_row(name, each))} |\n" for name, each in plain.items())
    more = "".join(f"| {' | '.join(_row(name, each))} |\n" for name, each in kept.items())
    return (
        f"{start}{end}|---|{'---:|' * 7}\n{rows}\n"
        f"{start}| kept of an answer, MB {end}|---|{'---:|' * 8}\n{more}"
    )


def _row(name: str, published: Published) -> Iterator[str]:
    counted = figures(published)
    yield name
    yield f"{published.context_tokens:,}"
    yield f"{counted.encode_bytes / _GIGA:.2f}"
    yield f"{counted.language_bytes / _GIGA:.2f}"
    yield f"{counted.kv_bytes:,}"
    if counted.state_bytes:
        yield f"{counted.state_bytes / _MEGA:.1f}"
    yield f"{counted.embedding_bytes:,}"
    yield _room(counted.kv_tokens(with_tower=False))
    yield _room(counted.kv_tokens(with_tower=True))


def _room(num_tokens: int) -> str:
    return f"{num_tokens // 1000:,}" if num_tokens >= LEAST_TOKENS else "no"


def page(text: str) -> str:
    """The page with its tables anew."""
    return with_block(text, _START, table())


def with_block(text: str, start: str, block: str) -> str:
    before, rest = text.split(start)
    return before + start + block + _END + rest.partition(_END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
