"""Vocabularies of more than 100,000 tokens, in the two forms that models are published with, by a recipe.

    byte_level       GPT-2's and Qwen's form: merges of bytes, here of nearly all pairs and many triples
    byte_fallback    Llama's and Gemma's form: words begin with a mark, a character that has no token is its
                     bytes; one token for most letters of the basic plane, and merges of pairs

Merges of a real vocabulary follow words. These cut letters of three and four bytes anywhere, which is harder.
Both have special tokens, and added ones that are text: in words of the alphabet, in CJK, in emoji.
"""

from __future__ import annotations

import unicodedata
from functools import cache
from itertools import islice, product

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

SPECIAL = ("<|end|>", "<|image|>")
ADDED = ("<tool_call>", "漢字", "🙂👍")
_NUM_TRIPLES = 60_000
_NUM_PAIRS = 60_000


@cache
def byte_level() -> PreTrainedTokenizerFast:
    letters = list(bytes_to_unicode().values())
    pairs = list(product(letters, letters))
    # Triples whose first two are tokens; the third is a byte that goes on in UTF-8, so that letters are cut.
    triples = islice(product((a + b for a, b in pairs[::3]), letters[-100:]), _NUM_TRIPLES)
    merges = [*pairs, *triples]
    vocabulary = {token: number for number, token in enumerate([*letters, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    return _finished(tokenizer)


@cache
def byte_fallback() -> PreTrainedTokenizerFast:
    known = [chr(code) for code in range(32, 0x10000) if unicodedata.category(chr(code))[0] in "LNPS"]
    letters = ["\u2581", *(letter for letter in known if letter not in _UNKNOWN)]
    merges = list(islice(product(letters[:400], letters[:200]), _NUM_PAIRS))
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *(a + b for a, b in merges)]
    vocabulary: dict[str, int] = {}
    for token in tokens:
        vocabulary.setdefault(token, len(vocabulary))
    model = models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return _finished(tokenizer)


# Letters of texts that are to have no token of their own.
_UNKNOWN = frozenset("界ß한")


def _finished(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens(list(ADDED))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[0], pad_token=SPECIAL[0])
