"""Converts single tokens to text and bytes, for reports of log probabilities."""

from __future__ import annotations

import re
from typing import Any

from tokenizers import decoders

from epd.serve_app.service import TokenLogprob
from epd.stages.sampling.detokenizer import TokenBytes
from epd.stages.sampling.sampler import SampledToken

# How vocabularies with byte fallback name the byte of a character that has no token.
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenTexts:
    """Converts the tokens of one tokenizer of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        is_byte_level = isinstance(getattr(backend, "decoder", None), decoders.ByteLevel)
        self._bytes = TokenBytes(backend) if is_byte_level else None

    def logprob(self, token: SampledToken) -> TokenLogprob:
        """Returns a token as the server reports it, with its alternatives."""
        alternatives = tuple(self._logprob(token_id, logprob) for token_id, logprob in token.top_logprobs)
        return self._logprob(token.token_id, token.logprob or 0.0, alternatives)

    def _logprob(
        self, token_id: int, logprob: float, alternatives: tuple[TokenLogprob, ...] = ()
    ) -> TokenLogprob:
        data = self._data(token_id)
        return TokenLogprob(token_id, data.decode("utf-8", "replace"), data, logprob, alternatives)

    def _data(self, token_id: int) -> bytes:
        if self._bytes is not None:
            return self._bytes[token_id]
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if isinstance(token, str) and (byte := _BYTE.fullmatch(token)):
            return bytes.fromhex(byte[1])
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=True)
        return text.encode()
