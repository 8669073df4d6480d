"""Builds the checkpoint folder of `shapes-vl`: configuration, tokenizer, processor, template; untrained.

python -m training.checkpoint --out runs/untrained
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import save_file
from tokenizers import Regex as TokenizerRegex
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from epd.shapes import COLOURS, SHAPES, make_questions, make_scene
from training.clip_questions import ask_which_clip
from training.stories import make_stories

_Model = TypeVar("_Model", bound=PreTrainedModel)
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
VOCAB_SIZE = 512

# A 640x360 frame becomes 84x140: 3 x 5 visual tokens for every two frames.
MIN_PIXELS, MAX_PIXELS = 56 * 56, 13000
MAX_FRAMES = 768

SYSTEM_PROMPT = "You are a helpful assistant."

CHAT_TEMPLATE = """\
{%- set lead = namespace(system=true) -%}
{%- for message in messages -%}
{%- if loop.first and message['role'] != 'system' -%}
<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif -%}
<|im_start|>{{ message['role'] }}
{% if message['content'] is string -%}
{{ message['content'] }}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' or 'image' in part or 'image_url' in part -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- elif part['type'] == 'video' or 'video' in part -%}
<|vision_start|><|video_pad|><|vision_end|>
{%- elif 'text' in part -%}
{{ part['text'] }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
""".replace("{%- set lead = namespace(system=true) -%}\n", "")


def corpus(*, has_stories: bool = False) -> list[str]:
    """Returns every phrasing, many times over, and the words that people put around them.

    has_stories: those of answers of more than one word, too.
    """
    rng = random.Random(0)
    lines = [
        SYSTEM_PROMPT,
        "system\n",
        "user\n",
        "assistant\n",
        "yes",
        "no",
        "nothing",
        "video",
        "image",
        "picture",
    ]
    for seed in range(600):
        scene = make_scene(seed, rng.uniform(8, 512))
        questions = make_questions(scene, rng)
        if has_stories:
            questions += make_stories(scene, rng, 1.0)
            questions.append(ask_which_clip(scene, make_scene(seed + 1, 60.0), rng))
        lines += [part for question in questions for part in (question.text, question.answer)]
    for colour in COLOURS:
        lines += [f"{colour} {shape}" for shape in SHAPES] * 3
    return lines


@cache
def build_tokenizer() -> Qwen2Tokenizer:
    """Returns a byte-level BPE tokenizer of VOCAB_SIZE entries, special tokens last, for any text."""
    draft = Tokenizer(models.BPE())
    draft.normalizer = normalizers.NFC()
    draft.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(TokenizerRegex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    draft.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    draft.train_from_iterator(corpus(), trainer)
    vocab = draft.get_vocab()
    merges = json.loads(draft.to_str())["model"]["merges"]
    tokenizer = Qwen2Tokenizer(
        vocab=vocab,
        merges=[tuple(pair) for pair in merges],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=list(SPECIAL_TOKENS),
        model_max_length=32768,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_processor(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLProcessor:
    size = {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS}
    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=size, patch_size=14, merge_size=2),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(
            size=size,
            fps=1,
            max_frames=MAX_FRAMES,
            patch_size=14,
            merge_size=2,
            cap_pixels_per_frame=False,
        ),
        chat_template=CHAT_TEMPLATE,
    )


def build_config(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLConfig:
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    hidden_size = 256
    return Qwen2_5_VLConfig(
        position_layout="transformers",  # of most videos in training: training/batches.py
        text_config={
            "vocab_size": VOCAB_SIZE,
            "hidden_size": hidden_size,
            "intermediate_size": 512,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32768,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 8, 8]},
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": 4,
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_heads": 4,
            "out_hidden_size": hidden_size,
            "fullatt_block_indexes": [0, 1, 2, 3],
            "tokens_per_second": 2,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
        dtype="float32",
        architectures=["Qwen2_5_VLForConditionalGeneration"],
    )


def build_generation_config(tokenizer: PreTrainedTokenizerBase) -> GenerationConfig:
    end, stop = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    return GenerationConfig(
        do_sample=False, max_new_tokens=512, eos_token_id=[end, stop], pad_token_id=stop, bos_token_id=stop
    )


def save_checkpoint(model: Qwen2_5_VLForConditionalGeneration, out: Path) -> None:
    """Writes the whole folder."""
    tokenizer = build_tokenizer()
    write_folder(model, tokenizer, build_processor(tokenizer), out)


def write_folder(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, processor: ProcessorMixin, out: Path
) -> None:
    """Writes a folder that loads. Weights are stored in bfloat16, half the size, for use in float32."""
    out.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(out)
    build_generation_config(tokenizer).save_pretrained(out)
    processor.save_pretrained(out)
    tied = "lm_head.weight"
    weights = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != tied
    }
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})


def write_untrained(
    description: str | None, build: Callable[[], _Model], save: Callable[[_Model, Path], None]
) -> None:
    """Is the program that builds a model and saves it where the command line says."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    torch.manual_seed(0)
    model = build()
    save(model, out)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters in {out}")


def main() -> None:
    write_untrained(
        __doc__, lambda: Qwen2_5_VLForConditionalGeneration(build_config(build_tokenizer())), save_checkpoint
    )


if __name__ == "__main__":
    main()
