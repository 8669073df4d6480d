"""The text of one answer while it grows, and whether a stop string has ended it."""

from __future__ import annotations

from typing import Any

from epd.sampling_params import SamplingParams
from stages.detokenizer import IncrementalDetokenizer


class TextStream:
    """Turns tokens into readable text."""

    def __init__(self, tokenizer: Any, params: SamplingParams) -> None:
        self.is_stopped = False
        self._detokenizer = IncrementalDetokenizer(tokenizer)

    def push(self, token_id: int, *, may_stop: bool) -> str:
        return self._detokenizer.push(token_id)

    def finish(self) -> str:
        return self._detokenizer.finish()
