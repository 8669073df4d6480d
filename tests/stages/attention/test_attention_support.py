"""Checkpoints whose attention the paged one would get wrong are refused, and arguments it does not know."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Gemma2Config, Gemma2Model, Qwen2Config

from epd.errors import UnsupportedModelError
from epd.stages.attention.attention import epd_paged, register
from epd.stages.loading.weights import load_role
from epd.stages.placement import CPU_FLOAT32
from tests.encoders.tiny_tiles import build_internvl

WINDOWED = {"use_sliding_window": True, "max_window_layers": 0, "layer_types": None}


@pytest.fixture(scope="module")
def internvl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_internvl(tmp_path_factory.mktemp("model") / "internvl")


def with_text_config(source: Path, target: Path, **changes: Any) -> Path:
    """A copy of a checkpoint whose text model is configured otherwise; the weights are the same."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    config["text_config"] |= changes
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({**WINDOWED, "sliding_window": 16}, "sliding_window=16 in a context of 8192"),
        ({"model_type": "gemma2", "sliding_window": None, "layer_types": ["full_attention"] * 2},
         "attn_logit_softcapping=50"),
        ({"model_type": "gemma2", "attn_logit_softcapping": None}, "final_logit_softcapping=30"),
        ({"model_type": "gpt_oss", "num_local_experts": 2, "head_dim": 16,
          "layer_types": ["full_attention"] * 2}, "attention sinks"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types with 'chunked_attention'"),
    ],
    ids=["window", "softcap", "softcap of logits", "sinks", "chunks"],
)  # fmt: skip
@pytest.mark.parametrize("role", ["encode", "language"])
def test_a_checkpoint_with_other_attention_is_refused_at_load(
    internvl: Path, tmp_path: Path, changes: dict[str, Any], named: str, role: Any
) -> None:
    path = with_text_config(internvl, tmp_path / "changed", **changes)
    with pytest.raises(UnsupportedModelError, match=named):
        load_role(path, role, CPU_FLOAT32)


def test_qwen_with_a_window_is_refused(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path = with_text_config(checkpoints["qwen2_5_vl"], tmp_path / "changed", **WINDOWED, sliding_window=64)
    with pytest.raises(UnsupportedModelError, match="sliding_window=64"):
        load_role(path, "language", CPU_FLOAT32)


def test_a_window_as_wide_as_the_context_is_none(internvl: Path, tmp_path: Path) -> None:
    path = with_text_config(internvl, tmp_path / "changed", **WINDOWED, sliding_window=8192)
    load_role(path, "language", CPU_FLOAT32)


class Layer(nn.Module):
    layer_idx = 0
    config = Qwen2Config(max_position_embeddings=100)


@pytest.mark.parametrize(
    "argument",
    [{"sliding_window": 99}, {"softcap": 50.0}, {"s_aux": torch.zeros(4)}, {"is_causal": False}, {"new": 1}],
    ids=lambda argument: next(iter(argument)),
)
def test_an_argument_that_would_change_the_result_is_refused(argument: dict[str, Any]) -> None:
    tokens = torch.zeros(1, 4, 1, 8)
    with pytest.raises(UnsupportedModelError, match=f"Layer asks for attention with {next(iter(argument))}"):
        epd_paged(Layer(), tokens, tokens, tokens, None, paged=None, dropout=0.0, **argument)  # type: ignore[arg-type]


def test_a_decoder_that_caps_its_scores_is_refused_in_its_first_pass() -> None:
    """As far as a configuration does not tell: transformers' own layers hand over what they need."""
    register()
    config = Gemma2Config(
        vocab_size=50, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, layer_types=["full_attention"],
    )  # fmt: skip
    model = Gemma2Model(config).eval()
    model.set_attn_implementation("epd_paged")
    with pytest.raises(UnsupportedModelError, match="softcap"), torch.inference_mode():
        model(inputs_embeds=torch.zeros(1, 3, 64), use_cache=False, paged=None)
