"""Small random models of every text stack that our decoder knows, and passes that exercise them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoModelForImageTextToText,
    Glm4vConfig,
    Glm4vMoeConfig,
    GlmOcrConfig,
    InternVLConfig,
    Qwen2_5_VLConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)

from epd.encoders.adapter import Embeddings
from epd.encoders.families.qwen3_vl import Qwen3VLAdapter
from epd.stages.engine.kv_pool import KVGroupShape, KVPools, KVPoolsShape
from epd.stages.engine.model_runner import ModelRunner, kv_layouts
from epd.stages.engine.packed_pass import Segment
from epd.stages.visual_inputs import PlacedEmbeddings

BLOCK_SIZE = 4
NUM_BLOCKS = 64
TEXT: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}


def _internvl(**text: Any) -> Any:
    return InternVLConfig(text_config={**TEXT, **text}, vision_config={**_VISION})


def _qwen3_vl(kind: Any, **text: Any) -> Any:
    vision = {**QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    text = {**TEXT, "head_dim": 16, "rope_parameters": {**SECTIONS}, **text}
    return kind(text_config=text, vision_config=vision)


def _glm(kind: Any, **text: Any) -> Any:
    """Half of each head is rotated."""
    rope = {**SECTIONS, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
    return kind(text_config={**TEXT, "rope_parameters": rope, **text}, vision_config={**QWEN_VISION})


CONFIGS = {
    "qwen2": lambda: _internvl(model_type="qwen2"),
    "qwen3": lambda: _internvl(model_type="qwen3", head_dim=24),
    "llama": lambda: _internvl(model_type="llama"),
    "llama with biases": lambda: _internvl(model_type="llama", attention_bias=True, mlp_bias=True),
    "llama 3": lambda: _internvl(model_type="llama", rope_parameters=_LLAMA3),
    "dynamic": lambda: _internvl(model_type="qwen2", rope_parameters=_DYNAMIC),
    "yarn": lambda: _internvl(model_type="qwen2", rope_parameters=_YARN),
    "tied": lambda: _internvl(model_type="qwen2", tie_word_embeddings=True),
    "qwen2.5-vl": lambda: Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": {**SECTIONS}},
        vision_config={**QWEN_VISION, "fullatt_block_indexes": [0]},
    ),
    "qwen3-vl": lambda: _qwen3_vl(Qwen3VLConfig),
    # All experts of each token: in bfloat16 a choice among them would be one of the last bit.
    "qwen3 moe": lambda: _internvl(
        model_type="qwen3_moe",
        head_dim=24,
        num_experts=4,
        num_experts_per_tok=4,
        moe_intermediate_size=24,
        mlp_only_layers=[1],
        norm_topk_prob=True,
    ),
    "qwen3-vl moe": lambda: _qwen3_vl(
        Qwen3VLMoeConfig, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, mlp_only_layers=[1]
    ),
    "glm-4.1v": lambda: _glm(Glm4vConfig),
    "glm-4.5v": lambda: _glm(
        Glm4vMoeConfig, head_dim=16, n_routed_experts=4, num_experts_per_tok=4, moe_intermediate_size=24
    ),
    "glm-ocr": lambda: _glm(
        GlmOcrConfig, head_dim=24, rope_parameters={**SECTIONS, "mrope_section": [6, 3, 3]}
    ),
}


def model_of(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """Weights that are drawn, biases and norms too, the same each time."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(CONFIGS[name](), attn_implementation="sdpa").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.to(dtype)


class NoAdapter:
    """What a runner asks of an adapter: where deepstack features go."""

    def prepare_decoder(self, decoder: Any) -> None:
        if "qwen3_vl" in decoder.config.model_type:
            Qwen3VLAdapter.prepare_decoder(self, decoder)  # type: ignore[arg-type]

    def decoder_kwargs(self, visual_rows: Tensor, embeddings: Embeddings) -> dict[str, Any]:
        return Qwen3VLAdapter.decoder_kwargs(self, visual_rows, embeddings)  # type: ignore[arg-type]


@dataclass(slots=True)
class Runner:
    """A runner over pools of its own."""

    runner: ModelRunner
    pools: KVPools
    num_rows: int
    num_deepstack: int

    @classmethod
    def of(cls, name: str, dtype: torch.dtype = torch.float32, *, by_modules: bool = False) -> Runner:
        return cls.over(name, model_of(name, dtype), by_modules=by_modules)

    @classmethod
    def over(cls, name: str, model: Any, **options: Any) -> Runner:
        """model: of CONFIGS[name], or a rank's part of it. options: of `ModelRunner`."""
        pools = KVPoolsShape((KVGroupShape(NUM_BLOCKS, kv_layouts(model)[0][0]),), BLOCK_SIZE).build()
        runner = ModelRunner(model, NoAdapter(), pools, **options)  # type: ignore[arg-type]
        return cls(runner, pools, 3 if "-vl" in name else 1, 1 if "qwen3-vl" in name else 0)

    def segment(self, num_new: int, num_cached: int, first_block: int, **options: Any) -> Segment:
        """New tokens with drawn ids; positions of three rows differ."""
        draw = np.random.default_rng(num_new * 100 + num_cached)
        at = np.arange(num_cached, num_cached + num_new)
        positions = np.stack([at // (row + 1) for row in range(self.num_rows)])
        table = np.arange(first_block, NUM_BLOCKS, dtype=np.int32)
        return Segment(draw.integers(1, 90, num_new), positions, [num_cached], [table], **options)

    def visual(self, places: list[int]) -> PlacedEmbeddings:
        draw = torch.Generator().manual_seed(3)
        dtype = self.pools.groups[0].layout.dtype
        rows, *deepstack = (
            torch.randn(len(places), 64, generator=draw).to(dtype) for _ in range(1 + self.num_deepstack)
        )
        return PlacedEmbeddings(Embeddings(rows, tuple(deepstack)), np.array(places))

    def passes(self) -> list[Tensor]:
        """Logits: a chunk with images beside a short prompt; the next chunk beside a decode; decodes."""
        shown = self.visual([2, 3, 4, 9])
        return [
            self.runner.run([
                self.segment(20, 0, 0, visual=shown, num_logits=0), self.segment(5, 0, 16, num_logits=5),
            ]),
            self.runner.run([self.segment(30, 20, 0, num_logits=2), self.segment(1, 5, 16)]),
            self.runner.run([self.segment(1, 50, 0), self.segment(1, 6, 16)]),
            self.runner.run([self.segment(1, 51, 0)]),
        ]  # fmt: skip
