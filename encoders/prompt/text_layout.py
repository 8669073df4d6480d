"""Lays out prompts of the families whose media are between words: expanded as text first, then by token.

An item becomes its words with one pad token per unit; the whole is tokenised, so that words join as they
do in the processor; then each pad is repeated as often as its unit has tokens:

    text      User: <video>What?     ->  User: Frame1: <img><pad></img> Frame2: <img><pad></img>What?
    ids       ... img pad /img ...   ->  ... img pad pad pad pad /img ...
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from epd.chat import ChatMessage
from epd.encoders.checkpoint import Checkpoint
from epd.encoders.plans import MediaItem, MediaPlan, PromptPlan
from epd.encoders.prompt.chat import Placeholders, check_media, moved_media, render_chat
from epd.errors import RequestError
from epd.types import Int64Array, MediaKind, PlaceholderRange


@dataclass(frozen=True, slots=True)
class ItemText:
    """Holds the words of one item. pad_lengths: visual tokens that each pad token in `text` represents."""

    text: str
    pad_lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Markers:
    """Names media as a family does.

    in_template: as its chat template writes them. pads: the repeated tokens.
    around: what the family's own template writes for one in the place of its marker, see `Placeholders`.
    begin: that every prompt begins with, whatever the template writes.
    """

    in_template: Mapping[MediaKind, str]
    pads: Mapping[MediaKind, str]
    around: str = "{marker}"
    begin: str = ""

    @property
    def placeholders(self) -> Placeholders:
        """Returns what stands for media where a template wants texts."""
        return {kind: self.around.replace("{marker}", each) for kind, each in self.in_template.items()}


def plan_text_prompt(
    checkpoint: Checkpoint,
    chat_template: str,
    markers: Markers,
    media: Sequence[MediaPlan],
    texts: Sequence[ItemText],
    messages: Sequence[ChatMessage],
) -> PromptPlan:
    """Lays out a conversation with positions that count all tokens.

    media: of the places in the messages, in order; ValueError for others. texts: of the media.
    Raises RequestError as `render_chat` does, and where the template moves or drops media.
    """
    check_media(messages, [plan.kind for plan in media])
    reserved = tuple(dict.fromkeys((*markers.in_template.values(), *markers.pads.values())))
    rendered = render_chat(checkpoint, chat_template, messages, reserved, markers.placeholders)
    rendered = rendered if rendered.startswith(markers.begin) else markers.begin + rendered
    token_ids = _tokenise(checkpoint, _substituted(rendered, markers, media, texts))
    pads = _pad_positions(checkpoint, markers, token_ids)
    lengths = [length for text in texts for length in text.pad_lengths]
    if len(pads) != len(lengths):
        raise RequestError(f"the prompt has {len(pads)} places for {len(lengths)} media units; rephrase it")
    repeats = np.ones(len(token_ids), dtype=np.int64)
    repeats[pads] = lengths
    ranges = [
        PlaceholderRange(int(pad + grown), length)
        for pad, grown, length in zip(pads, _growth(lengths), lengths, strict=True)
    ]
    expanded = np.repeat(token_ids, repeats)
    positions = np.arange(len(expanded), dtype=np.int64)[None]
    return PromptPlan(expanded, positions, len(expanded), _items(media, texts, ranges))


def _substituted(
    rendered: str, markers: Markers, media: Sequence[MediaPlan], texts: Sequence[ItemText]
) -> str:
    """Replaces each marker of the rendered template, in order, with the words of its item."""
    names = dict.fromkeys(markers.in_template.values())
    pieces = re.split(f"({'|'.join(map(re.escape, names))})", rendered)
    if pieces[1::2] != [markers.in_template[plan.kind] for plan in media]:
        raise moved_media(len(pieces) // 2, len(media))
    pieces[1::2] = [text.text for text in texts]
    return "".join(pieces)


def _tokenise(checkpoint: Checkpoint, text: str) -> Int64Array:
    """Tokenises a rendered prompt: its first token is not added once more where the template writes it."""
    tokenizer = checkpoint.tokenizer
    is_begun = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    return np.asarray(tokenizer(text, add_special_tokens=not is_begun)["input_ids"], dtype=np.int64)


def _pad_positions(checkpoint: Checkpoint, markers: Markers, token_ids: Int64Array) -> Int64Array:
    ids = [checkpoint.tokenizer.convert_tokens_to_ids(pad) for pad in markers.pads.values()]
    return np.flatnonzero(np.isin(token_ids, ids))


def _growth(lengths: Sequence[int]) -> list[int]:
    """Computes by how much the prompt has grown before each pad."""
    return [0, *accumulate(length - 1 for length in lengths)][: len(lengths)]


def _items(
    media: Sequence[MediaPlan], texts: Sequence[ItemText], ranges: Sequence[PlaceholderRange]
) -> tuple[MediaItem, ...]:
    stops = list(accumulate(len(text.pad_lengths) for text in texts))
    starts = [0, *stops][:-1]
    return tuple(
        MediaItem(plan, tuple(ranges[start:stop]))
        for plan, start, stop in zip(media, starts, stops, strict=True)
    )
