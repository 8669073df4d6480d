"""Adapts Molmo 2 by transformers' own processor and tower: tokens of all media of a prompt attend each other.

    text | <im_start> <im_patch> ... <im_end> | text | <im_start> ... <im_end> | question
           each <-------------------------------------------------> each         causal, as is all text

So what lies from the first to the last of these tokens is computed at once, and known by all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from epd.chat import ChatMessage
from epd.encoders.checkpoint import Checkpoint
from epd.encoders.families.generic import GenericAdapter
from epd.encoders.plans import MediaPlan, PromptPlan
from epd.encoders.prompt.text_layout import Markers


class Molmo2Adapter(GenericAdapter):
    """Adapts `model_type` molmo2."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        tokenizer = checkpoint.tokenizer
        pad = tokenizer.convert_ids_to_tokens(checkpoint.config.image_patch_id)
        begin = tokenizer.bos_token or tokenizer.eos_token
        self.markers = Markers(self.markers.in_template, dict.fromkeys(self._kinds, pad), begin=begin)
        self._items.pads = (pad,)

    def plan_chat(self, media: Sequence[MediaPlan], messages: Sequence[ChatMessage]) -> PromptPlan:
        plan = super().plan_chat(media, messages)
        both_ways = np.isin(plan.token_ids, self.checkpoint.processor.image_token_ids)
        return replace(plan, both_ways=both_ways if both_ways.any() else None)
