"""Tiny random checkpoints of the real architectures, written to disk as anyone would find them.

Recipe: random weights from a fixed seed, matrices scaled by eight (as initialised, greedy output is one token
for ever, whatever is asked), biases and norms drawn, see `draw_weights`; a byte-level tokenizer without
merges but with the special tokens; their own processor classes; a chat template in the manner of Qwen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{% for part in message['content'] -%}
{%- if part['type'] == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part['type'] == 'video' -%}<|vision_start|><|video_pad|><|vision_end|>
{%- else -%}{{ part['text'] }}{%- endif -%}
{%- endfor -%}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""
_WEIGHT_SCALE = 8.0
# Around one, where a new model has norms and scales, and around zero, where it has biases.
_SPREAD = 0.2
_OF_ATTENTION = ("q_norm.weight", "k_norm.weight")
_LOG_MEMORY = 6.0  # a new recurrent state forgets each token at once; with this, half in 10 to 100 tokens
_CONSTANT = 1e-6  # a deviation below it; InternVL's towers begin with 1e-10
_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
_DELTA: dict[str, Any] = {
    "num_hidden_layers": 8,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
# Sizes of a text model with experts, one of them shared by all tokens.
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
_PARTIAL_ROPE: dict[str, Any] = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
    "partial_rotary_factor": 0.25,
}


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token, then the special tokens: any text has ids, any ids have text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=list(SPECIAL_TOKENS),
        chat_template=CHAT_TEMPLATE,
    )


def build_qwen2_5_vl(folder: Path, seed: int = 0, **text: Any) -> Path:
    """Qwen2.5-VL with windowed and full vision attention; frames of at most 84 x 84 pixels or so.

    text: other sizes of the language model.
    """
    tokenizer = byte_level_tokenizer()
    config = Qwen2_5_VLConfig(
        text_config={**_text_config(tokenizer, "default"), **_TEXT, **text},
        vision_config={
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": text.get("hidden_size", _TEXT["hidden_size"]),
            "window_size": 56,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
        },
        **_token_ids(tokenizer),
    )
    size = {"shortest_edge": 56 * 56, "longest_edge": 84 * 84}
    processor = Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=dict(size)),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(size=dict(size), fps=2, cap_pixels_per_frame=False),
        chat_template=CHAT_TEMPLATE,
    )
    return _save(folder, Qwen2_5_VLForConditionalGeneration, config, processor, seed)


def build_qwen3_vl(folder: Path, seed: int = 0, **text: int) -> Path:
    """Qwen3-VL with two deepstack layers; frames of at most 96 x 96 pixels or so, for eight of them.

    text: other sizes of the language model.
    """
    tokenizer, kind, model = byte_level_tokenizer(), Qwen3VLConfig, Qwen3VLForConditionalGeneration
    if "num_experts" in text:
        kind, model = Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration
    config = kind(
        text_config={**_text_config(tokenizer, "default"), **_TEXT, "head_dim": 16, **text},
        vision_config={
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": text.get("hidden_size", _TEXT["hidden_size"]),
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        **_token_ids(tokenizer),
    )
    return _save(folder, model, config, _qwen3_processor(tokenizer), seed)


def build_qwen3_5(folder: Path, seed: int = 0, **text: Any) -> Path:
    """Qwen3.5 with two rounds of its pattern: three gated delta layers, one of attention; frames as above.

    As published: half as many heads of keys as of values, a quarter of each head rotated, a convolution of 4.
    text: other sizes of the language model.
    """
    tokenizer, kind, model = byte_level_tokenizer(), Qwen3_5Config, Qwen3_5ForConditionalGeneration
    if "num_experts" in text:
        kind, model = Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration
    sizes = _TEXT | _DELTA | text
    config = kind(
        text_config={**_text_config(tokenizer, "default"), **sizes, "rope_parameters": {**_PARTIAL_ROPE}},
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": sizes["hidden_size"],
            "num_position_embeddings": 64,
        },
        **_token_ids(tokenizer),
    )
    return _save(folder, model, config, _qwen3_processor(tokenizer), seed)


def add_head(folder: Path, seed: int = 0) -> Path:
    """Adds `mtp.*` to a checkpoint: a layer with attention drawn like the model's own, experts one by one."""
    decoder = load_reference(folder).get_decoder()
    draw, size = torch.Generator().manual_seed(seed), decoder.config.hidden_size
    layer = decoder.layers[decoder.config.layer_types.index("full_attention")]
    tensors = {"mtp.fc.weight": torch.randn(size, 2 * size, generator=draw) * (2 * size) ** -0.5}
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        tensors[f"mtp.{name}.weight"] = 0.2 * torch.randn(size, generator=draw)
    for name, values in layer.state_dict().items():
        drawn = values.mean() + values.std() * torch.randn(values.shape, generator=draw)
        tensors |= dict(_as_published(f"mtp.layers.0.{name}", drawn))
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})
    return folder


def _as_published(name: str, values: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields a tensor of a layer, or the matrices of its experts, by their names in the files."""
    start, _, kind = name.rpartition(".")
    if not start.endswith(".experts"):
        yield name, values
        return
    for expert, matrix in enumerate(values):
        parts = (
            {"gate": matrix.chunk(2)[0], "up": matrix.chunk(2)[1]}
            if kind == "gate_up_proj"
            else {"down": matrix}
        )
        yield from ((f"{start}.{expert}.{each}_proj.weight", part.clone()) for each, part in parts.items())


def _qwen3_processor(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLProcessor:
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(
            patch_size=16,
            size={"shortest_edge": 64 * 64, "longest_edge": 96 * 96},
            image_mean=[0.5] * 3,
            image_std=[0.5] * 3,
        ),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(
            size={"shortest_edge": 2 * 64 * 64, "longest_edge": 8 * 96 * 96}, cap_pixels_per_frame=False
        ),
        chat_template=CHAT_TEMPLATE,
    )


BUILDERS: dict[str, Callable[..., Path]] = {"qwen2_5_vl": build_qwen2_5_vl, "qwen3_vl": build_qwen3_vl}


def load_reference(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The transformers model, as its own users load it, with sdpa attention."""
    model = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa", local_files_only=True
    )
    return model.eval()


def _text_config(tokenizer: PreTrainedTokenizerFast, rope_type: str) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
    }


def _token_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    tokens = ("vision_start", "vision_end", "image_pad", "video_pad")
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in tokens}
    return {
        "vision_start_token_id": ids["vision_start"],
        "vision_end_token_id": ids["vision_end"],
        "image_token_id": ids["image_pad"],
        "video_token_id": ids["video_pad"],
    }


@torch.no_grad()
def draw_weights(model: Any, seed: int = 0, *, layers_decide: bool = False) -> Any:
    """Scales the matrices of a new model, and draws what is constant in it.

    A checkpoint of zeros and ones would answer the same where a norm is swapped or a bias lost.
    layers_decide: where answers would else follow from the last token. Embeddings are not scaled then, and
    norms of queries and keys are twice as large, so that tokens get unlike shares of attention. Not for all:
    rounding costs more, in bfloat16 logits are 6 steps off in place of 3.
    """
    draw = torch.Generator().manual_seed(seed)
    embeddings = model.get_input_embeddings().weight
    for name, values in {each.data_ptr(): (name, each) for name, each in model.state_dict().items()}.values():
        if not (values.numel() and values.is_floating_point() and values.isfinite().all()):
            continue
        if values.std(correction=0) < _CONSTANT:
            drawn = float(values.mean() > _CONSTANT) + _SPREAD * torch.randn(values.shape, generator=draw)
            values.copy_(drawn * (2.0 if layers_decide and name.endswith(_OF_ATTENTION) else 1.0))
        elif name.endswith("A_log"):
            values.sub_(_LOG_MEMORY)
        elif values.ndim > 1 and not (layers_decide and values.data_ptr() == embeddings.data_ptr()):
            values.mul_(_WEIGHT_SCALE)
    head = model.get_output_embeddings().weight
    head[[each for each in _placeholders(model.config) if each < len(head)]] = 0
    return model


def _placeholders(config: Any) -> Iterator[int]:
    """Yields the tokens that stand for media, which no trained model answers."""
    for kind, end in product(("image", "video", "audio"), ("id", "index")):
        if (token := getattr(config, f"{kind}_token_{end}", None)) is not None:
            yield token


def _save(
    folder: Path, model_class: Any, config: Any, processor: Any, seed: int, *, layers_decide: bool = False
) -> Path:
    torch.manual_seed(seed)
    model = draw_weights(model_class(config).eval(), seed, layers_decide=layers_decide)
    tokenizer = processor.tokenizer
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id],
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
    )
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
