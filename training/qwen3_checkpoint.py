"""Builds the checkpoint folder of `shapes-vl-2`, a Qwen3-VL in small; untrained.

    python -m training.qwen3_checkpoint --out runs/untrained

Numbers of up to three digits are one token each, and so is the end of a timestamp, `.5 seconds>`: a model
that is to name a time copies one token of the prompt.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Regex as TokenizerRegex
from torch import Tensor
from torch.nn import functional
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from epd.models import model_folder
from epd.shapes import COLOURS, SHAPES
from training.checkpoint import (
    CHAT_TEMPLATE,
    MAX_FRAMES,
    SPECIAL_TOKENS,
    corpus,
    write_folder,
    write_untrained,
)
from training.lanes import HIDDEN_SIZE, MERGE, PATCH, SCALE, directions

# Entries of the vocabulary that are learned from the texts, bytes among them; numbers come besides.
_NUM_WORDS = 640
_WHOLE_NUMBERS = PRETOKENIZE_REGEX.replace(r"\p{N}|", r"\p{N}{1,3}|")
TIMESTAMP_ENDS = tuple(f".{tenth} seconds>" for tenth in range(10))
# A frame of 640x360 becomes 96x32: three visual tokens for every two frames.
MAX_TOKENS_PER_FRAME = 6
MAX_PIXELS = MAX_TOKENS_PER_FRAME * (PATCH * MERGE) ** 2
_MIN_PIXELS = 2 * (PATCH * MERGE) ** 2
# Numbers of one token. What all text embeddings share: see training/lanes.py.
_NUM_NUMBERS = 1000
_SHARED_LENGTH, _WORD_LENGTH = 0.5, 0.8
SPACE = "Ġ"  # as byte-level vocabularies write it
_WORDS = (*SHAPES, *COLOURS, "left", "middle", "right")  # as the rows of a code
_SHORTEST_WAVE, _LONGEST_WAVE = 3.0, 3000.0


def _words() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Returns vocabulary and merges of a byte-level BPE learned from texts without their numbers."""
    draft = Tokenizer(models.BPE())
    draft.pre_tokenizer = pre_tokenizers.Sequence(_splits())
    trainer = trainers.BpeTrainer(
        vocab_size=_NUM_WORDS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    draft.train_from_iterator([re.sub(r"\d+", "0", line) for line in corpus(has_stories=True)], trainer)
    merges = [(first, second) for first, second in json.loads(draft.to_str())["model"]["merges"]]
    return draft.get_vocab(), merges


def _splits() -> list[pre_tokenizers.PreTokenizer]:
    return [
        pre_tokenizers.Split(TokenizerRegex(_WHOLE_NUMBERS), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


def _number_merges() -> list[tuple[str, str]]:
    """Returns merges that make one token of each number from 10 to 999, whichever two digits meet first."""
    twos = [(text[0], text[1]) for text in map(str, range(10, 100))]
    threes = [(text[:2], text[2]) for text in map(str, range(100, 1000))]
    return [*twos, *threes, *((text[0], text[1:]) for text in map(str, range(100, 1000)) if text[1] != "0")]


@cache
def build_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE tokenizer with whole numbers, special tokens last, for any text."""
    vocab, merges = _words()
    for first, second in _number_merges():
        vocab.setdefault(first + second, len(vocab))
    model = Tokenizer(models.BPE(vocab=vocab, merges=[*merges, *_number_merges()]))
    model.normalizer = normalizers.NFC()
    model.pre_tokenizer = pre_tokenizers.Sequence(_splits())
    model.decoder = decoders.ByteLevel()
    model.add_tokens([AddedToken(end, normalized=False) for end in TIMESTAMP_ENDS])
    model.add_special_tokens(list(SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(
        tokenizer_object=model,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=list(SPECIAL_TOKENS),
        model_max_length=32768,
        chat_template=CHAT_TEMPLATE,
    )


def build_processor(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLProcessor:
    half = [0.5] * 3
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(
            patch_size=PATCH,
            merge_size=MERGE,
            size={"shortest_edge": _MIN_PIXELS, "longest_edge": MAX_PIXELS},
            image_mean=half,
            image_std=half,
        ),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(
            size={"shortest_edge": _MIN_PIXELS, "longest_edge": MAX_PIXELS * MAX_FRAMES},
            fps=1,
            max_frames=MAX_FRAMES,
            patch_size=PATCH,
            merge_size=MERGE,
            cap_pixels_per_frame=True,
            max_video_tokens=MAX_TOKENS_PER_FRAME,
        ),
        chat_template=CHAT_TEMPLATE,
    )


def build_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLConfig:
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    return Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": HIDDEN_SIZE,
            "intermediate_size": 512,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "max_position_embeddings": 32768,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [16, 8, 8],
                "mrope_interleaved": True,
            },
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
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "out_hidden_size": HIDDEN_SIZE,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [],
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
        dtype="float32",
        architectures=["Qwen3VLForConditionalGeneration"],
    )


def places_of(tokenizer: PreTrainedTokenizerFast, words: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yields each token that is one of the words, with a space or a capital or without, and which one."""
    for token, index in tokenizer.get_vocab().items():
        word = token.replace(SPACE, "").lower()
        if word in words:
            yield index, words.index(word)


def number_ids(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Returns the tokens of 0 to 999."""
    return tokenizer.convert_tokens_to_ids([str(number) for number in range(_NUM_NUMBERS)])


def number_embeddings(count: int) -> Tensor:
    """Returns what the embeddings of 0 to `count` - 1 begin as: float32 [count, C], about 1 long.

    Half of each is waves, so that neighbours are alike, and half is its own.
    """
    generator = torch.Generator().manual_seed(6)
    num_waves = HIDDEN_SIZE // 4
    lengths = torch.logspace(math.log10(_SHORTEST_WAVE), math.log10(_LONGEST_WAVE), num_waves)
    angles = 2 * math.pi * torch.arange(count)[:, None] / lengths
    waves = torch.cat([angles.cos(), angles.sin()], dim=1) / num_waves**0.5
    basis = torch.linalg.qr(torch.randn(HIDDEN_SIZE, HIDDEN_SIZE, generator=generator)).Q[: 2 * num_waves]
    own = torch.randn(count, HIDDEN_SIZE, generator=generator) / HIDDEN_SIZE**0.5
    return (waves @ basis + own) / 2**0.5


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLForConditionalGeneration:
    """Returns the model before training; its text embeddings are about as long as those of a lane.

    The words that an answer takes from a lane begin near what it shows: to name it is to copy it.
    """
    model = Qwen3VLForConditionalGeneration(build_config(tokenizer))
    table = model.get_input_embeddings().weight
    with torch.no_grad():
        model.model.language_model.norm.weight.fill_(1 / SCALE)  # the table is the last layer, too
        table.normal_(std=HIDDEN_SIZE**-0.5)
        table[number_ids(tokenizer)] = number_embeddings(_NUM_NUMBERS)
        table += _SHARED_LENGTH * functional.normalize(torch.randn(HIDDEN_SIZE), dim=0)
        for token, place in places_of(tokenizer, _WORDS):
            table[token] += _WORD_LENGTH * functional.normalize(directions()[place], dim=0)
        table *= SCALE
    return model


def load_model(name: str) -> Qwen3VLForConditionalGeneration:
    """Returns a checkpoint of this shape in float32: that of the package by its name, or a folder."""
    return Qwen3VLForConditionalGeneration.from_pretrained(model_folder(name), dtype=torch.float32)


def save_checkpoint(model: Qwen3VLForConditionalGeneration, out: Path) -> None:
    """Writes the whole folder."""
    tokenizer = build_tokenizer()
    write_folder(model, tokenizer, build_processor(tokenizer), out)


def main() -> None:
    write_untrained(__doc__, lambda: build_model(build_tokenizer()), save_checkpoint)


if __name__ == "__main__":
    main()
